// Memory that the ranks of one host share: counters to wait on, what each rank says of its operations, and areas to
// exchange data through. See [Note: how ranks find the segment] and [Note: how a death is noticed] in segment.cpp.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace deepytorch {

using Clock = std::chrono::steady_clock;

constexpr int kMaxLocalRanks = 64;
constexpr size_t kLine = 64;  // of a cache: slices begin at lines, so that two ranks never write to one
constexpr std::chrono::milliseconds kLook{100};  // so often whoever waits for others looks whether the group is poisoned
constexpr int kRing = 64;  // calls that a rank may be ahead of another and still be compared before they run

// A collective that cannot go on: a dead or late rank, a mismatch. The group is of no use afterwards.
class CommError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class Timeout final : public CommError {
 public:
  using CommError::CommError;
};

// One step of a digest of numbers.
inline uint64_t mix(uint64_t digest, uint64_t value) { return (digest ^ value) * 0x100000001b3 + (digest >> 29); }

enum class Kind : uint8_t {
  none, all_reduce, all_reduce_coalesced, reduce_scatter, reduce_scatter_coalesced, all_gather, all_gather_coalesced,
  broadcast, reduce, gather, scatter, all_to_all, barrier
};
constexpr int kKinds = static_cast<int>(Kind::barrier) + 1;
const char* name_of(Kind kind);

// What values are cast to on their way between hosts.
enum class Wire : uint8_t { exact, bf16, f16, fp8, int8 };
constexpr const char* kWires[] = {"exact", "bf16", "fp16", "fp8", "int8"};

// What must be alike on all ranks of an operation. `count` and `root` are -1 where they may differ; of a call that was
// asked to compress, `root` is the Wire. `plan` is a digest of everything that was decided beforehand (the table of
// algorithms), `sizes` of the sizes of several tensors, `history` of all calls before this one, so that a difference is
// found however far one rank is ahead. `shared` says where the data lies in memory that `allocate` handed out, 0
// elsewhere: it may differ, and is only acted on where it does not.
struct Fingerprint {
  uint64_t sequence = 0;
  int64_t count = -1;
  int32_t root = -1;
  Kind kind = Kind::none;
  uint8_t reduce = 255;
  int8_t dtype = -1;
  uint8_t on_cuda = 0;
  uint64_t plan = 0;
  uint64_t sizes = 0;
  uint64_t history = 0;
  uint64_t shared = 0;

  bool matches(const Fingerprint& other) const;  // but for the history
  uint64_t digest() const;                       // of what has to match and the history: the next call's history
  // The same for ranks of different hosts, where the plan may differ: whether it is one call, and the next digest.
  bool same_between_hosts(const Fingerprint& other) const;
  uint64_t digest_between_hosts(uint64_t before) const;
  std::string describe() const;

 private:
  uint64_t what() const {
    return static_cast<uint64_t>(static_cast<uint32_t>(root)) << 32 | static_cast<uint64_t>(kind) << 24 |
           static_cast<uint64_t>(reduce) << 16 | static_cast<uint64_t>(static_cast<uint8_t>(dtype)) << 8 | on_cuda;
  }
};

class Segment {
 public:
  // `areas` areas of `area_bytes` for each of `num_ranks`, which may grow to `room_bytes` (0: not). Throws CommError where
  // the memory cannot be had. node: whose memory this rank's areas are to lie in; -1 leaves that to the kernel.
  static std::shared_ptr<Segment> create(int num_ranks, int areas, size_t area_bytes, size_t room_bytes = 0, int node = -1);
  // The segment that process `pid` made and holds as file descriptor `descriptor`.
  static std::shared_ptr<Segment> attach(int64_t pid, int descriptor, uint64_t token, int rank, int node = -1);
  // The recorder of a segment that process `pid` holds, read from outside; empty for one without calls.
  static std::string look(int64_t pid, int descriptor);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  int rank() const { return rank_; }
  int num_ranks() const { return num_ranks_; }
  int descriptor() const { return descriptor_; }
  uint64_t token() const;
  int areas() const { return areas_; }
  size_t area_bytes() const { return area_bytes_; }
  // What an area holds for operations that every rank begins with `reserve_rooms`.
  size_t room_bytes() const { return room_bytes_; }
  // Grow this rank's areas to `room_bytes`, once; throws CommError where the memory cannot be had.
  void reserve_rooms();
  char* area(uint64_t exchange, int rank) const;

  // Lock this rank's byte: from now on its death is seen by the others. Called once every rank holds the mapping.
  void join();

  // Publish what this rank does next, and compare it with what others have published for the same sequence number.
  // At least one of two ranks that differ sees it; it poisons the group and throws.
  void publish(const Fingerprint& fingerprint);
  // What this rank runs now, to be compared by `check` after the first sync of it. Every operation that begins must sync.
  void begin(const Fingerprint& fingerprint);
  // Compare what all ranks run.
  void check();
  // After `check`: whether all ranks have their data at the same place of one region.
  bool all_shared() const;

  // The recorder: what each rank has called last, and how far it is. As text, a line a call; `last` calls of each rank.
  std::string recorder(int last = kRing) const;
  // Whether the recorder is to be printed: true once for all ranks of the host.
  bool first_to_report();
  // Marks the operation that begins as run to its end.
  void end(uint64_t sequence);

  // Wait until every rank has called this as often as this one has.
  void sync(const char* what, uint64_t sequence, Clock::time_point deadline, const std::atomic<bool>& stopped);

  // The number of the next exchange, or of the first of the next `count`: alike on all ranks, and each has its area.
  uint64_t next_exchange(size_t count = 1) { return (exchanges_ += count) - count; }

  // The first message stays. Every wait of every rank then throws it.
  void poison(const std::string& message);
  bool poisoned() const;
  std::string poison_message() const;
  bool is_alive(int rank) const;
  // Called before the memory is unmapped.
  void set_unpin(std::function<void()> unpin) { unpin_ = std::move(unpin); }

 private:
  struct Header;
  struct Counter;
  struct RankState;
  Segment() = default;
  void map(int descriptor, size_t bytes, bool writable = true);
  void reserve(size_t begin, size_t bytes);
  void reserve_areas(int node);
  RankState& state(int rank) const;
  void compare(const Fingerprint& mine, const Fingerprint& theirs, int other);
  bool recall(int rank, uint64_t sequence, Fingerprint* found) const;
  std::string first_difference(int other) const;
  void find_culprit(const std::string& operation, Clock::duration waited, bool late);

  Header* header_ = nullptr;
  char* base_ = nullptr;
  size_t mapped_bytes_ = 0;
  int descriptor_ = -1;
  int rank_ = 0, num_ranks_ = 0, areas_ = 0;
  size_t area_bytes_ = 0, room_bytes_ = 0;
  bool has_rooms_ = false;
  uint64_t steps_ = 0, exchanges_ = 0, operations_ = 0;
  std::function<void()> unpin_;
  bool crowded_ = false;  // more ranks than cores: a wait sleeps at once
};

}  // namespace deepytorch
