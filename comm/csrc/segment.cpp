// [Note: how ranks find the segment]
// It is an anonymous file (memfd) that its maker holds open; the others open it through /proc/<pid>/fd. It has no name in
// /dev/shm or elsewhere, so nothing can be left behind by a crash at whatever moment, its size is not bounded by how
// /dev/shm is mounted, and no other user can open it. Where /proc does not lead to the maker (another pid namespace) the
// group goes without shared memory.
//
// [Note: how a death is noticed]
// Every rank holds a POSIX record lock on its byte of the file for as long as it lives; the kernel drops it with the
// process, however it ends, also while nobody has reaped it, and a forked child does not inherit it. A wait looks at the
// locks of those it waits for every few milliseconds.
//
// [Note: where memory lies] Each rank reserves its own areas, so that the kernel takes their pages from the memory that is
// near to that rank's processor, or to its GPU where that is known: the policy is the file's, so it holds for whoever
// touches a page first.
//
// [Note: order of memory accesses] On x86 stores become visible in their order; on ARM and others they do not, unless it is
// asked for:
// - What a rank has written to its area is there for whoever is past the next sync: it enters the sync by a
//   read-modify-write of `arrivals` with acquire and release; those form one release sequence, so the last to come has
//   seen everybody's writes; it publishes `complete` by a store that the others load with acquire.
// - An area is written again only behind a later sync, which its readers enter (release) after they have read it.
// - `ring` is a seqlock per entry, with `published` as its counter: the writer puts a fence between the counter of the
//   call before and the entry that it overwrites, so that whoever sees any of the new entry sees the counter too; the
//   reader copies, puts a fence, and looks at the counter again.
#include "segment.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <new>
#include <sstream>
#include <thread>

namespace deepytorch {

namespace {

constexpr uint64_t kMagic = 0x6465657079746f34;  // "deepyto4": another layout of the header gets another one
constexpr size_t kPage = 4096;
constexpr auto kSpin = std::chrono::microseconds(50);  // a barrier of ranks that arrive together takes about 1 us
constexpr long kNapNanoseconds = 20'000'000;           // then a wait sleeps, and looks for the dead this often

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Milliseconds since 1970, a few behind.
int64_t now_ms() {
  timespec now;
  clock_gettime(CLOCK_REALTIME_COARSE, &now);
  return static_cast<int64_t>(now.tv_sec) * 1000 + now.tv_nsec / 1'000'000;
}

std::string last_error() { return std::strerror(errno); }

constexpr int kMostNodes = 1024;
constexpr int kPreferred = 1;  // MPOL_PREFERRED: another node's memory where that one has none left

// Pages of [begin, begin + bytes) that nobody has touched yet come from `node`. A wish: containers may not allow it.
void prefer_node(char* begin, size_t bytes, int node) {
  if (node < 0 || node >= kMostNodes) return;
  constexpr int kBits = 8 * sizeof(unsigned long);
  unsigned long mask[kMostNodes / kBits] = {};
  mask[node / kBits] |= 1ul << (node % kBits);
  syscall(SYS_mbind, begin, bytes, kPreferred, mask, kMostNodes, 0u);
}

// The low half of a counter, which is what the kernel compares before it lets a thread sleep.
uint32_t* futex_word(std::atomic<uint64_t>& value) {
  auto* words = reinterpret_cast<uint32_t*>(&value);
  return words + (std::endian::native == std::endian::big ? 1 : 0);
}

}  // namespace

const char* name_of(Kind kind) {
  static const char* const names[] = {
      "none", "all_reduce", "all_reduce_coalesced", "reduce_scatter", "reduce_scatter_coalesced", "all_gather",
      "all_gather_coalesced", "broadcast", "reduce", "gather", "scatter", "all_to_all", "barrier"};
  return names[static_cast<int>(kind)];
}

struct Segment::Counter {
  alignas(64) std::atomic<uint64_t> value;
  std::atomic<uint32_t> sleepers;  // threads of other ranks that sleep until the value changes
};

struct Segment::RankState {
  alignas(64) std::atomic<uint64_t> steps;      // syncs that this rank has entered
  alignas(64) std::atomic<uint64_t> published;  // sequence number of its newest call
  // What runs, by parity: a rank that is past the first sync of operation n + 1 knows that all have compared operation n.
  alignas(64) Fingerprint current[2];
  alignas(64) Fingerprint ring[kRing];  // what was called, which may be far ahead of what runs
  // For the recorder alone, apart from what other ranks read in every call (processors fetch lines in pairs).
  alignas(128) int64_t called_at[kRing];  // milliseconds since 1970
  std::atomic<uint64_t> begun, ended;     // of what it runs itself; calls of inner backends are not followed
  std::atomic<int64_t> process;
};

struct Segment::Header {
  uint64_t magic, token;
  int32_t num_ranks, areas;
  uint64_t area_bytes, room_bytes, bytes;
  alignas(64) std::atomic<uint32_t> poisoned;  // 0: sound, 1: the message is being written, 2: it is there
  std::atomic<uint32_t> reported;
  char message[4096];
  alignas(64) std::atomic<uint64_t> arrivals;  // of all ranks at all syncs
  Counter complete;                            // syncs that all ranks have entered; what waits sleep on
  alignas(128) RankState ranks[kMaxLocalRanks];
};

bool Fingerprint::matches(const Fingerprint& other) const {
  return same_between_hosts(other) && plan == other.plan;
}

bool Fingerprint::same_between_hosts(const Fingerprint& other) const {
  return count == other.count && what() == other.what() && sizes == other.sizes;
}

uint64_t Fingerprint::digest_between_hosts(uint64_t before) const {
  uint64_t found = before + 1;
  for (const uint64_t value : {static_cast<uint64_t>(count), what(), sizes}) found = mix(found + 1, value);
  return found;
}

uint64_t Fingerprint::digest() const {
  uint64_t found = history + 1;
  for (const uint64_t value : {static_cast<uint64_t>(count), what(), plan, sizes}) found = mix(found + 1, value);
  return found;
}

std::string Fingerprint::describe() const {
  static const char* const reductions[] = {"SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM"};
  static const char* const dtypes[] = {"uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"};
  std::ostringstream out;
  out << name_of(kind);
  const char* separator = "(";
  const auto add = [&](auto&& value) { out << separator << value; separator = ", "; };
  if (dtype >= 0 && dtype < 8) add(dtypes[dtype]);
  else if (dtype == 11) add("bool");
  else if (dtype == 15) add("bfloat16");
  else if (dtype >= 0) add("dtype " + std::to_string(dtype));
  if (count >= 0) add(std::to_string(count) + " elements");
  if (reduce < 9) add(reductions[reduce]);
  const bool compresses = kind == Kind::all_reduce || kind == Kind::reduce_scatter || kind == Kind::all_gather;
  if (root >= 0 && compresses) add(std::string(kWires[root]) + " between hosts");
  else if (root >= 0) add("root " + std::to_string(root));
  if (on_cuda) add("cuda");
  if (sizes) add("sizes #" + std::to_string(sizes % 1000000));
  if (plan) add("plan " + std::to_string(plan % 1000000));
  out << (*separator == '(' ? "()" : ")");
  return out.str();
}

std::shared_ptr<Segment> Segment::create(int num_ranks, int areas, size_t area_bytes, size_t room_bytes, int node) {
  if (num_ranks < 1 || num_ranks > kMaxLocalRanks) throw CommError("shared memory serves 1 to 64 ranks of a host");
  std::shared_ptr<Segment> made(new Segment);
  const size_t head = (sizeof(Header) + kPage - 1) / kPage * kPage;
  room_bytes = std::max(area_bytes, room_bytes / kPage * kPage);
  const size_t bytes = head + static_cast<size_t>(num_ranks) * areas * room_bytes;
  const int descriptor = memfd_create("deepytorch", MFD_CLOEXEC);
  if (descriptor < 0) throw CommError("shared memory cannot be made: " + last_error());
  made->descriptor_ = descriptor;
  if (ftruncate(descriptor, static_cast<off_t>(bytes)) != 0) throw CommError("shared memory cannot be made: " + last_error());
  made->reserve(0, head);
  made->map(descriptor, bytes);
  Header* header = new (made->base_) Header();
  if (getrandom(&header->token, sizeof header->token, 0) != sizeof header->token) throw CommError("no random number");
  header->num_ranks = num_ranks;
  header->areas = areas;
  header->area_bytes = area_bytes;
  header->room_bytes = room_bytes;
  header->bytes = bytes;
  header->magic = kMagic;
  made->num_ranks_ = num_ranks;
  made->areas_ = areas;
  made->area_bytes_ = area_bytes;
  made->room_bytes_ = room_bytes;
  made->reserve_areas(node);
  made->crowded_ = num_ranks > static_cast<int>(std::thread::hardware_concurrency());
  made->state(0).process = getpid();
  return made;
}

std::shared_ptr<Segment> Segment::attach(int64_t pid, int descriptor, uint64_t token, int rank, int node) {
  std::shared_ptr<Segment> found(new Segment);
  const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(descriptor);
  char target[64] = {};  // looked at before it is opened: the process may be another one of that number
  if (readlink(path.c_str(), target, sizeof target - 1) < 0 || std::strncmp(target, "/memfd:deepytorch", 17) != 0) {
    throw CommError("process " + std::to_string(pid) + " shares no segment that this one can open (another pid namespace?)");
  }
  const int opened = open(path.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  if (opened < 0) throw CommError("the shared memory of process " + std::to_string(pid) + " cannot be opened: " + last_error());
  found->descriptor_ = opened;
  struct stat status;
  if (fstat(opened, &status) != 0 || !S_ISREG(status.st_mode) || static_cast<size_t>(status.st_size) < sizeof(Header)) {
    throw CommError("what process " + std::to_string(pid) + " shares is not a segment");
  }
  found->map(opened, static_cast<size_t>(status.st_size));
  const Header& header = *found->header_;
  if (header.magic != kMagic || header.token != token || header.bytes != static_cast<size_t>(status.st_size)) {
    throw CommError("what process " + std::to_string(pid) + " shares is another segment");
  }
  found->rank_ = rank;
  found->num_ranks_ = header.num_ranks;
  found->areas_ = header.areas;
  found->area_bytes_ = header.area_bytes;
  found->crowded_ = header.num_ranks > static_cast<int>(std::thread::hardware_concurrency());
  found->room_bytes_ = header.room_bytes;
  found->reserve_areas(node);
  found->state(rank).process = getpid();
  return found;
}

std::string Segment::look(int64_t pid, int descriptor) {
  const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(descriptor);
  Segment found;
  found.descriptor_ = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  if (found.descriptor_ < 0) throw CommError("the shared memory of process " + std::to_string(pid) + " cannot be opened: " + last_error());
  struct stat status;
  if (fstat(found.descriptor_, &status) != 0 || !S_ISREG(status.st_mode) || static_cast<size_t>(status.st_size) < sizeof(Header)) return "";
  found.map(found.descriptor_, static_cast<size_t>(status.st_size), false);
  if (found.header_->magic != kMagic) throw CommError("process " + std::to_string(pid) + " runs another version of deepytorch");
  found.num_ranks_ = std::min(found.header_->num_ranks, kMaxLocalRanks);
  found.rank_ = -1;
  return found.recorder();
}

// Reserved before it is used: a page that cannot be had later would be a SIGBUS in the middle of a collective.
void Segment::reserve(size_t begin, size_t bytes) {
  int error;
  do error = posix_fallocate(descriptor_, static_cast<off_t>(begin), static_cast<off_t>(bytes));
  while (error == EINTR);
  if (error != 0) throw CommError("no " + std::to_string(bytes >> 20) + " MiB of shared memory: " + std::strerror(error));
}

void Segment::reserve_areas(int node) {
  prefer_node(area(0, rank_), areas_ * room_bytes_, node);
  for (int number = 0; number < areas_; ++number) reserve(static_cast<size_t>(area(number, rank_) - base_), area_bytes_);
}

void Segment::reserve_rooms() {
  if (has_rooms_) return;
  reserve(static_cast<size_t>(area(0, rank_) - base_), areas_ * room_bytes_);
  has_rooms_ = true;
}

void Segment::map(int descriptor, size_t bytes, bool writable) {
  void* mapped = mmap(nullptr, bytes, PROT_READ | (writable ? PROT_WRITE : 0), MAP_SHARED, descriptor, 0);
  if (mapped == MAP_FAILED) throw CommError("shared memory cannot be mapped: " + last_error());
  madvise(mapped, bytes, MADV_HUGEPAGE);  // a wish, not a need
  base_ = static_cast<char*>(mapped);
  mapped_bytes_ = bytes;
  header_ = reinterpret_cast<Header*>(base_);
}

Segment::~Segment() {
  if (unpin_) unpin_();
  if (base_ != nullptr) munmap(base_, mapped_bytes_);
  if (descriptor_ >= 0) close(descriptor_);
}

uint64_t Segment::token() const { return header_->token; }

Segment::RankState& Segment::state(int rank) const { return header_->ranks[rank]; }

char* Segment::area(uint64_t exchange, int rank) const {
  const size_t head = (sizeof(Header) + kPage - 1) / kPage * kPage;
  return base_ + head + (rank * static_cast<size_t>(areas_) + exchange % areas_) * room_bytes_;
}

void Segment::join() {
  struct flock lock = {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = rank_;
  lock.l_len = 1;
  if (fcntl(descriptor_, F_SETLK, &lock) != 0) throw CommError("the segment cannot be locked: " + last_error());
}

bool Segment::is_alive(int rank) const {
  if (rank == rank_) return true;
  struct flock lock = {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = rank;
  lock.l_len = 1;
  return fcntl(descriptor_, F_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

void Segment::poison(const std::string& message) {
  uint32_t sound = 0;
  if (!header_->poisoned.compare_exchange_strong(sound, 1)) return;
  std::strncpy(header_->message, message.c_str(), sizeof(header_->message) - 1);
  header_->poisoned.store(2, std::memory_order_release);
}

bool Segment::poisoned() const { return header_->poisoned.load(std::memory_order_acquire) != 0; }

std::string Segment::poison_message() const {
  for (int look = 0; look < 1000 && header_->poisoned.load(std::memory_order_acquire) == 1; ++look) sched_yield();
  return header_->poisoned.load(std::memory_order_acquire) == 2 ? header_->message : "an error on another rank";
}

void Segment::publish(const Fingerprint& fingerprint) {
  RankState& mine = state(rank_);
  std::atomic_thread_fence(std::memory_order_release);  // see [Note: order of memory accesses]
  mine.ring[fingerprint.sequence % kRing] = fingerprint;
  mine.called_at[fingerprint.sequence % kRing] = now_ms();
  mine.published.store(fingerprint.sequence, std::memory_order_seq_cst);
  Fingerprint theirs;
  for (int other = 0; other < num_ranks_; ++other) {
    if (other == rank_ || !recall(other, fingerprint.sequence, &theirs)) continue;
    theirs.history = fingerprint.history;  // a call before it is named where it runs, while it is still known
    compare(fingerprint, theirs, other);
  }
}

// What a rank called as its collective `sequence`; false where that is not there, or not any more.
bool Segment::recall(int rank, uint64_t sequence, Fingerprint* found) const {
  const auto there = [&] {
    const uint64_t newest = state(rank).published.load(std::memory_order_seq_cst);
    return newest >= sequence && newest < sequence + kRing - 1;
  };
  if (!there()) return false;
  std::memcpy(static_cast<void*>(found), &state(rank).ring[sequence % kRing], sizeof *found);
  std::atomic_thread_fence(std::memory_order_acquire);
  return there() && found->sequence == sequence;
}

void Segment::compare(const Fingerprint& mine, const Fingerprint& theirs, int other) {
  const bool same = theirs.sequence == mine.sequence && mine.matches(theirs);
  if (same && mine.history == theirs.history) return;
  std::ostringstream out;
  if (same) {
    out << "ranks disagree on a collective before number " << mine.sequence << " of this group: " << first_difference(other);
  } else {
    const int low = std::min(rank_, other), high = std::max(rank_, other);
    const Fingerprint& first = rank_ < other ? mine : theirs;
    const Fingerprint& second = rank_ < other ? theirs : mine;
    out << "ranks disagree on collective " << first.sequence << " of this group: local rank " << low << " called "
        << first.describe() << ", local rank " << high << " called " << second.describe();
    if (first.sequence != second.sequence) out << " as its collective " << second.sequence;
  }
  out << "; expected the same call on every rank, in the same order: look at what leads to this call on each rank";
  poison(out.str());
  throw CommError(poison_message());
}

// The earliest of the calls that are still known of both ranks and differ.
std::string Segment::first_difference(int other) const {
  const int low = std::min(rank_, other), high = std::max(rank_, other);
  const uint64_t newest = std::max(state(low).published.load(), state(high).published.load());
  for (uint64_t sequence = newest > kRing ? newest - kRing : 1; sequence <= newest; ++sequence) {
    Fingerprint first, second;
    if (!recall(low, sequence, &first) || !recall(high, sequence, &second) || first.matches(second)) continue;
    return "as number " + std::to_string(sequence) + " local rank " + std::to_string(low) + " called " + first.describe() +
           ", local rank " + std::to_string(high) + " called " + second.describe();
  }
  return "local ranks " + std::to_string(low) + " and " + std::to_string(high) + ", more than " + std::to_string(kRing) +
         " calls ago";
}

void Segment::begin(const Fingerprint& fingerprint) {
  state(rank_).current[++operations_ % 2] = fingerprint;
  state(rank_).begun.store(fingerprint.sequence, std::memory_order_relaxed);
}

void Segment::end(uint64_t sequence) { state(rank_).ended.store(sequence, std::memory_order_relaxed); }

bool Segment::first_to_report() { return header_->reported.exchange(1) == 0; }

std::string Segment::recorder(int last) const {
  std::ostringstream out;
  const int64_t now = now_ms();
  uint64_t any = 0;
  for (int rank = 0; rank < num_ranks_; ++rank) any = std::max(any, state(rank).published.load());
  if (any == 0) return "";
  if (poisoned()) out << "of no use after an error: " << poison_message() << '\n';
  for (int rank = 0; rank < num_ranks_; ++rank) {
    const RankState& one = state(rank);
    const uint64_t newest = one.published.load(), begun = one.begun.load(), ended = one.ended.load();
    out << "local rank " << rank << " (process " << one.process.load() << "): " << newest << " collectives called";
    if (begun > ended) out << ", in number " << begun << " now";
    out << '\n';
    for (uint64_t sequence = newest > static_cast<uint64_t>(last) ? newest - last + 1 : 1; sequence <= newest; ++sequence) {
      Fingerprint call;
      std::memcpy(static_cast<void*>(&call), &one.ring[sequence % kRing], sizeof call);
      if (call.sequence != sequence) continue;  // overwritten meanwhile
      const char* status = call.plan == 0       ? "handed on"
                           : sequence <= ended  ? "done"
                           : sequence == begun  ? "runs"
                                                : "waits";
      out << "  " << sequence << "  " << call.describe() << "  " << status << "  called "
          << static_cast<double>(now - one.called_at[sequence % kRing]) / 1000.0 << " s ago\n";
    }
  }
  return out.str();
}

void Segment::check() {
  const Fingerprint mine = state(rank_).current[operations_ % 2];
  for (int other = 0; other < num_ranks_; ++other) compare(mine, state(other).current[operations_ % 2], other);
}

bool Segment::all_shared() const {
  const uint64_t mine = state(rank_).current[operations_ % 2].shared;
  for (int other = 0; other < num_ranks_; ++other) {
    if (mine == 0 || state(other).current[operations_ % 2].shared != mine) return false;
  }
  return true;
}

// The last rank to come completes the sync and wakes the others, so that each sleeps once at most.
void Segment::sync(const char* what, uint64_t sequence, Clock::time_point deadline, const std::atomic<bool>& stopped) {
  state(rank_).steps.store(++steps_, std::memory_order_release);
  Counter& complete = header_->complete;
  if (header_->arrivals.fetch_add(1, std::memory_order_acq_rel) + 1 == steps_ * num_ranks_) {
    complete.value.store(steps_, std::memory_order_seq_cst);
    if (complete.sleepers.load(std::memory_order_seq_cst) != 0) {
      syscall(SYS_futex, futex_word(complete.value), FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
    }
    return;
  }
  const auto done = [&] { return complete.value.load(std::memory_order_acquire) >= steps_; };
  const Clock::time_point start = Clock::now();
  while (!crowded_ && !done() && Clock::now() - start < kSpin) {
    for (int turn = 0; turn < 32 && !done(); ++turn) pause();
  }
  while (!done()) {
    const auto operation = [&] { return std::string(what) + ", collective " + std::to_string(sequence) + " of this group"; };
    if (poisoned()) throw CommError(poison_message());
    if (stopped.load(std::memory_order_relaxed)) throw CommError("the process group was destroyed during " + operation());
    complete.sleepers.fetch_add(1, std::memory_order_seq_cst);
    const uint64_t seen = complete.value.load(std::memory_order_seq_cst);
    if (seen < steps_) {
      const timespec nap{0, kNapNanoseconds};
      syscall(SYS_futex, futex_word(complete.value), FUTEX_WAIT, static_cast<uint32_t>(seen), &nap, nullptr, 0);
    }
    complete.sleepers.fetch_sub(1, std::memory_order_seq_cst);
    const Clock::time_point now = Clock::now();
    if (!done() && now - start >= std::chrono::nanoseconds(kNapNanoseconds)) find_culprit(operation(), now - start, now > deadline);
  }
}

// Throw where a rank that has not come is dead or, `late`, is past the deadline.
void Segment::find_culprit(const std::string& operation, Clock::duration waited, bool late) {
  for (int other = 0; other < num_ranks_; ++other) {
    const auto behind = [&] { return state(other).steps.load(std::memory_order_acquire) < steps_; };
    if (!behind()) continue;
    if (!is_alive(other)) {
      if (!behind()) continue;
      poison("local rank " + std::to_string(other) + " has died: local rank " + std::to_string(rank_) + " waited for it in " +
             operation + "; see that rank's own output for the cause");
      throw CommError(poison_message());
    }
    if (late) {
      std::ostringstream out;
      out << "timed out after " << std::chrono::duration_cast<std::chrono::milliseconds>(waited).count() / 1000.0 << " s in "
          << operation << ": local rank " << other
          << " has not come to it (suspected; it is alive). Is it slow, stopped, or in another collective? "
             "A longer timeout is set by init_process_group(timeout=...)";
      poison(out.str());
      throw Timeout(poison_message());
    }
  }
}

}  // namespace deepytorch
