// Collectives among the ranks of one host, through a Segment. They run on the calling thread until done.
//
// One exchange of data is: every rank writes what others need into its area, `sync`, every rank reads. The next exchange
// uses the next area, so that nobody overwrites what is still being read: a rank that is past the sync of exchange k + 1
// knows that all ranks have left exchange k. The first sync of an operation also compares what the ranks have called.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <functional>
#include <memory>
#include <vector>

#include "kernels.h"
#include "segment.h"

namespace deepytorch {

class Health;

// Memory that must not go away while an inner backend may still work on it, whatever has become of the operation.
struct Kept {
  std::shared_ptr<Segment> segment;
  std::vector<at::Tensor> tensors;
};

// One operation as the algorithms see it.
struct Call {
  Segment* segment;
  const std::atomic<bool>* stopped;
  Clock::time_point deadline;
  uint64_t sequence;
  Kind kind;
  Dtype dtype;
  Reduce reduce;
  double divisor;
  size_t chunk_bytes;  // at most what an area holds
  size_t most_chunk_bytes() const { return in_rooms ? segment->room_bytes() : segment->area_bytes(); }

  std::shared_ptr<Kept> kept;  // what the payload lies in, for whoever may still work on it after an error; null on one host
  const Health* health = nullptr;  // of the group: what another host has to say comes by it alone where this one has no segment
  bool checked = false;
  bool in_rooms = false;  // whether every rank's areas have grown to their rooms

  void keep(std::initializer_list<at::Tensor> tensors) const {
    if (kept) kept->tensors.insert(kept->tensors.end(), tensors);
  }

  void sync() {
    segment->sync(name_of(kind), sequence, deadline, *stopped);
    if (!checked) segment->check();
    checked = true;
  }
};

// How the payload gets from and to memory that the host can read: plain memory by default, a GPU's in cpu_reduce.
class Copies {
 public:
  virtual ~Copies() = default;
  // Bytes [offset, offset + size) of the payload to `target`. Several may be on their way.
  virtual void read(void* target, size_t offset, size_t size) = 0;
  // What was read since this was called last is one chunk; each `arrived` waits for the first chunk that has not come.
  virtual void asked() = 0;
  virtual void arrived() = 0;
  // The other way; `source` may be overwritten after `left()` was called for the chunk that comes after it.
  virtual void write(size_t offset, const void* source, size_t size) = 0;
  virtual void left() = 0;
  // Returns when nothing of it is on its way any more.
  virtual void finish() {}
  // Where the payload stands if the host can compute on it in place, else null: its own part then skips the area.
  virtual char* direct() = 0;
};

class HostCopies final : public Copies {
 public:
  explicit HostCopies(void* data) : data_(static_cast<char*>(data)) {}
  void read(void* target, size_t offset, size_t size) override;
  void asked() override {}
  void arrived() override {}
  void write(size_t offset, const void* source, size_t size) override;
  void left() override {}
  char* direct() override { return data_; }

 private:
  char* data_;
};

// The step between hosts: sums one rank's slice of a chunk with the same local rank's slices on the other hosts.
class Between {
 public:
  virtual ~Between() = default;
  virtual int depth() const = 0;                                     // chunks on their way at a time
  virtual void start(size_t chunk, void* data, size_t count) = 0;    // returns at once
  virtual void advance(size_t chunk) = 0;                            // called for every chunk on its way, in order
  virtual void finish(size_t chunk) = 0;                             // `data` holds the sum afterwards
};

// Every rank reads all inputs and reduces for itself: one sync. For small payloads.
void all_reduce_one_shot(Call& call, void* data, size_t count);
// Every rank reduces its slice of each chunk and hands it to the others. While a chunk is reduced the next one is brought
// and the one before is taken out, so that each costs one sync. Needs three areas.
void all_reduce_two_shot(Call& call, void* data, size_t count);
// The same for a payload that is elsewhere than in plain memory, or with `between`: each slice then also goes to the other
// hosts, in chunks that overlap with the work inside the host. Two syncs a chunk. `segment` null: a host with one rank,
// whose payload is in plain memory. Needs `areas_needed(...)` areas. From elsewhere a chunk comes by one copy and goes by
// one, and up to kMostAhead chunks are on their way while one is reduced.
void all_reduce_through(Call& call, Copies& payload, size_t count, Between* between);
constexpr int kMostAhead = 3;
inline int areas_needed(int depth, bool copied_ahead) { return depth + 1 + (copied_ahead ? 2 : 0); }
// inputs: for each rank what it is to get the sum of. outputs: for each rank where its part goes.
void reduce_scatter(Call& call, const char* const* inputs, void* output, size_t output_count);
void all_gather(Call& call, const void* input, char* const* outputs, size_t input_bytes);
void broadcast(Call& call, void* data, size_t bytes, int root);

// Bytes for one rank or of it.
struct Part {
  char* data = nullptr;
  size_t bytes = 0;
};
// Each rank hands each other one, and itself, what is meant for it: all_to_all, gather and scatter. Every rank sees all
// sizes before anything moves, so that a size that is not expected is the same error on all ranks.
void exchange(Call& call, const std::vector<Part>& sent, const std::vector<Part>& received);

// The same where every rank's data lies in shared memory (`peers`: rank -> its address here): nothing is staged.
void all_reduce_in_place(Call& call, char* const* peers, size_t count);
void reduce_scatter_in_place(Call& call, char* const* peers, void* output, size_t output_count);
void all_gather_in_place(Call& call, char* const* peers, void* output, size_t input_bytes);

}  // namespace deepytorch
