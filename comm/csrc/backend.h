// The c10d backend "deepytorch": runs a collective itself where the table of algorithms says so, and hands it to the inner
// backend (gloo, nccl) elsewhere.
//
// [Note: threads] Collectives that this backend runs itself run on a thread of the group, in the order of the calls; a
// synchronous call with an empty queue runs on the caller's own thread. Callbacks of a future run on the group's thread
// too, and may wait for a later collective: another thread then takes the queue. Inner backends that serve the steps
// between hosts are not shared with delegated calls, so their order is the order of that thread on every rank.
//
// [Note: order] Calls run in the order in which they were made. A call for an inner backend is delegated at once if none of
// our own calls is queued or running, and else through the same queue; our own calls wait for delegated ones. A call whose
// tensors are read or written here before it is delegated also waits, since it would otherwise run ahead of its turn. A
// send or recv goes to the inner backend at once: a rank may need the message before it can come to the collective that
// another rank is in.
//
// [Note: after an error] The group is poisoned: the first message stays, and every later call and every wait, on all ranks
// of the host, throws it. Inner backends are destroyed on a separate thread, since the destructor of a backend with a
// stuck operation blocks; the destruction closes their connections, which tells other hosts.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <array>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <thread>

#include "between.h"
#include "call_history.h"
#include "cpu_reduce.h"
#include "delegated.h"
#include "forked.h"
#include "health.h"
#include "hierarchical.h"
#include "segment.h"
#include "shared_memory.h"

namespace deepytorch {

// Every algorithm that a row of the table can name, by its class's `name` in comm/algorithms.
#define DEEPYTORCH_ALGORITHMS(_) \
  _(engine) _(shared_memory) _(hierarchical) _(streams) _(cpu_reduce) _(nvlink_one_shot) _(nvlink_two_shot) \
  _(nvlink_copies) _(nvlink_multimem)

enum class Algorithm : uint8_t {
#define DEEPYTORCH_VALUE(name) name,
  DEEPYTORCH_ALGORITHMS(DEEPYTORCH_VALUE)
#undef DEEPYTORCH_VALUE
};
const char* name_of(Algorithm algorithm);
Algorithm algorithm_of(const std::string& name);  // throws std::invalid_argument
Dtype dtype_of(at::ScalarType type);  // bytes: one without kernels

// What to do with payloads of up to `max_bytes`.
struct Row {
  uint64_t max_bytes;
  Algorithm algorithm;
  uint64_t chunk_bytes;
  int streams;
  Wire wire;
};

struct Setup {
  int rank, size;
  int64_t timeout_ms;
  c10::intrusive_ptr<c10d::Backend> cpu, cuda;  // inner backends; either may be null
  std::shared_ptr<Segment> segment;             // null where the host has one rank, or no shared memory
  Backends between;                             // over the same local rank of every host
  int num_hosts, host;
  std::vector<int> ranks;                        // of the group: [host * ranks of a host + local rank]; empty: irregular
  c10::intrusive_ptr<c10d::Store> store;         // for errors of other hosts; null on one host
  bool exchanges;                                // whether what only moves data goes through the segment as well
};

class Backend final : public c10d::Backend {
 public:
  explicit Backend(Setup setup);
  ~Backend() override;

  // Replaces the rows of `kind` for a device; rows are in the order of max_bytes. Same on all ranks. fixed: those that
  // hold under torch.use_deterministic_algorithms(True), which do not depend on what was measured.
  void set_table(Kind kind, bool on_cuda, bool fixed, std::vector<Row> rows);
  void set_one_shot_bytes(uint64_t bytes);
  // Called before the first CPU-Reduce of a CUDA tensor.
  void set_pin(std::function<void()> pin) { pin_ = std::move(pin); }
  // Runs a collective of CUDA tensors through symmetric memory, which only torch's Python code can set up. The output of
  // an all-reduce is its input. Returns the stream that the collective runs on, or none if it has ended.
  using Symmetric = std::function<std::optional<c10::Stream>(const std::string& algorithm, const std::string& kind,
                                                             at::Tensor& output, at::Tensor& input, bool average)>;
  void set_symmetric(Symmetric call) { symmetric_ = std::move(call); }
  Row row(Kind kind, bool on_cuda, uint64_t bytes) const;
  // [Note: trials] The links may have been measured in a slow moment. So all-reduces by gloo, through the memory of a
  // host, and between hosts over one or more connections are timed again among the group's collectives. Trials are due
  // at numbers of collectives that all ranks share, each twice the one before. A trial runs if it takes no more than
  // `share` of the time since the group was made; the slowest rank's time decides for all. The times take effect before
  // the collective at the next such number, when no rank has to wait for them any more. `rows`: the payloads
  // (`max_bytes`) and algorithms that are timed; each takes about `expected_us`. `tried` gets the slowest rank's us for a
  // copy of `copy_bytes` and for each row, equal on all ranks, and may set tables. There are at most `number` trials.
  using Tried = std::function<void(Backend&, double copy_us, const std::vector<double>& times_us)>;
  void set_trials(std::vector<Row> rows, const std::vector<double>& expected_us, uint64_t copy_bytes, uint64_t first,
                  int number, double share, Tried tried);
  void end_trials();  // called by all ranks between the same two collectives
  // Whether this group could run the call itself.
  bool accelerates(Kind kind, at::ScalarType dtype, c10d::ReduceOp::RedOpType reduce) const;

  // Memory of this rank that the other ranks of the host read directly: an area of `region`.
  at::Tensor adopt(const std::shared_ptr<Segment>& region);
  // all_reduce with fewer bits between hosts; `key` names a payload whose rounding errors are fed back (empty: none).
  c10::intrusive_ptr<c10d::Work> allreduce_compressed(at::Tensor& tensor, c10d::ReduceOp::RedOpType reduce, Wire wire,
                                                      const std::string& key, bool async);
  // All large reduce_scatter_tensor and all_gather_into_tensor of floats by the two below, with keys by their order since
  // `mark_step` was called last.
  void set_quantize(Wire wire);
  void mark_step();
  // reduce_scatter_tensor and all_gather_into_tensor with a byte for each value between hosts: see quantized.h.
  c10::intrusive_ptr<c10d::Work> reduce_scatter_quantized(at::Tensor& output, at::Tensor& input,
                                                          c10d::ReduceOp::RedOpType reduce, Wire wire,
                                                          const std::string& key, bool async);
  c10::intrusive_ptr<c10d::Work> all_gather_quantized(at::Tensor& output, at::Tensor& input, Wire wire, bool async);
  uint64_t overflows() const { return overflows_; }
  bool poisoned() const { return health_->poisoned(); }
  std::string poison_message() const { return health_->message(); }
  c10::intrusive_ptr<c10d::Backend> engine_of(bool on_cuda) const;  // null where there is none
  void show_as_gloo() { as_gloo_ = true; }
  bool on_one_host() const { return setup_.num_hosts == 1; }
  std::shared_ptr<Segment> segment() const { return setup_.segment; }

  const std::string getBackendName() const override { return "deepytorch"; }
  c10::intrusive_ptr<Options> getBackendOptions() override;
  bool supportsCoalescing() const override;
  void startCoalescing() override;
  c10::intrusive_ptr<c10d::Work> endCoalescing() override;
  void setTimeout(std::chrono::milliseconds timeout) override;
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  void eagerConnectSingleDevice(at::Device device) override;
  void abort() override;
  void shutdown() override;
  bool supportsTensorAlloc(c10::DeviceIndex device) override;
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;
  std::shared_ptr<c10::Allocator> getMemAllocator() override;

  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<std::vector<at::Tensor>>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_coalesced(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override;
  WorkPtr gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override;
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& options) override;
  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                        std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& options) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override;
  WorkPtr send(Tensors& tensors, int target, int tag) override;
  WorkPtr recv(Tensors& tensors, int source, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all) override;

 private:
  class OwnWork;
  struct Job;
  struct Worker;
  struct Wanted;  // an operation as it was called

  struct Region {  // memory that `adopt` has handed out
    uint64_t number;
    std::weak_ptr<Segment> segment;
    const char* begin;
    size_t bytes;
  };

  c10::intrusive_ptr<c10d::Backend> inner(bool on_cuda) const;
  Backends between(int streams);
  void guard() const;
  uint64_t shared_at(const void* data, size_t bytes) const;
  std::vector<char*> peers(uint64_t shared);
  Fingerprint announce(const Wanted& wanted, uint64_t plan, uint64_t shared, std::unique_lock<std::mutex>& lock);
  WorkPtr delegate(Wanted wanted, std::function<WorkPtr(c10d::Backend&)> call, Tensors outputs, Copied copied = {});
  WorkPtr submit(Wanted wanted, std::function<void(Call&, const Fingerprint&)> body, Tensors outputs, bool async,
                 std::shared_ptr<DeviceCopies> copies = nullptr);
  bool forked() const { return num_forks_ != num_forks.load(std::memory_order_relaxed); }
  bool idle() const { return !busy_ && queue_.empty(); }  // called with the lock
  void enqueue(const std::shared_ptr<Job>& job, std::unique_lock<std::mutex>& lock);
  void remember(const WorkPtr& work);
  bool inner_is_at_work() const;
  bool moves_itself(const Wanted& wanted) const;
  Row row_to_move(const Wanted& wanted, const at::Tensor& tensor, uint64_t bytes);
  bool quantizes(const at::Tensor& tensor) const;
  WorkPtr exchange_parts(Wanted wanted, Tensors sent, Tensors received, Tensors outputs, bool async);
  void wait_for_inner(const Call& call);
  WorkPtr reduce_all(at::Tensor& tensor, Wanted wanted, Row row, const std::string& key, bool async, Tensors outputs);
  WorkPtr symmetric(at::Tensor& output, at::Tensor& input, Wanted wanted, Row row);
  WorkPtr reduce_scatter_on_gloo(Wanted wanted, const Tensors& given_outputs, const TensorLists& given_parts,
                                 const c10d::ReduceScatterOptions& options);
  template <class Outputs, class Inputs, class Run>
  WorkPtr hand_on(Wanted wanted, const Outputs& given_outputs, const Inputs& given_inputs, Run run);
  template <class Run>
  WorkPtr between_two(const Tensors& given, Run run);
  Row next_row(Kind kind, bool on_cuda, uint64_t bytes);  // of a collective that is called now
  void next_trial();
  void run_trial(Call& call, const Fingerprint& mine);
  void largest_of_all(Call& call, std::vector<double>& numbers);
  void all_reduce_on_host(Call& call, char* data, size_t count);
  void run_all_reduce(Call& call, const Fingerprint& mine, char* data, Copies* copies, size_t count, const Row& row,
                      const std::string& key);
  void over_hosts(Call& call, const Fingerprint& mine, const Row& row, const at::Tensor& input, const at::Tensor& output);
  void execute(Job& job);
  void ensure_worker();
  void work_through(Worker& self);
  void let_go();

  Setup setup_;
  const std::shared_ptr<Health> health_;
  std::shared_ptr<CallHistory> calls_[2];  // on CPU tensors, on CUDA tensors; null on one host
  std::unique_ptr<Listener> listener_;
  uint64_t plan_ = 0;
  static size_t place_of(Kind kind, bool on_cuda, bool fixed) { return (static_cast<size_t>(kind) * 2 + on_cuda) * 2 + fixed; }
  std::array<std::vector<Row>, kKinds * 4> table_;
  uint64_t one_shot_bytes_ = 32 << 10;
  std::chrono::milliseconds timeout_;
  std::vector<Region> regions_;
  uint64_t num_regions_ = 0;
  std::map<std::string, Residual> residuals_;
  bool as_gloo_ = false;  // whether the group goes by that name
  Wire quantize_ = Wire::exact;
  std::map<int64_t, uint64_t> scattered_;  // by size, since the last step
  std::map<std::string, std::vector<float>> scattered_residuals_;  // of quantised reduce_scatters
  Symmetric symmetric_;
  std::function<void()> pin_;
  bool coalescing_ = false;
  std::vector<WorkPtr> coalesced_;
  std::atomic<uint64_t> overflows_{0};

  // Order of sequence numbers, of what is published and of the queue. [Note: our locks and the interpreter's] in gil.h.
  mutable std::mutex mutex_;
  std::condition_variable& changed_;  // on the heap, so that a forked child can leave it alone
  std::deque<std::shared_ptr<Job>> queue_;
  uint64_t sequence_ = 0, history_ = 0;
  struct Trials {
    std::vector<Row> rows;
    double expected_us;  // of a whole trial
    uint64_t copy_bytes, next;  // next: how many collectives go before
    int left;
    double share;
    Tried tried;
    Clock::time_point since = Clock::now();
    double spent_us = 0;
    bool pending = false;
    std::vector<double> found = {};
  };
  std::unique_ptr<Trials> trials_;  // with the lock, but for what never changes
  std::atomic<bool> trial_is_due_{false};
  std::vector<c10::weak_intrusive_ptr<c10d::Work>> handed_on_;  // to the inner backend for CPU tensors, lately
  std::atomic<bool> any_handed_on_{false};
  bool busy_ = false;
  std::atomic<bool> stopped_{false};
  std::vector<std::shared_ptr<Worker>> workers_;
  int num_at_hand_ = 0;  // workers that are not in a callback
  int num_await_idle_ = 0;  // threads
  const uint32_t num_forks_ = num_forks;
};

}  // namespace deepytorch
