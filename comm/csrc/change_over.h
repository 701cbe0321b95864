// A group that was made while its C++ was being compiled: stock gloo, and ours from one of its collectives on.
//
// [Note: Change-over of a group] Ranks have to change in front of the same collective, or two of them would wait for each
// other in vain. The n-th collective of a group is the same one on all ranks: that is what c10d demands of every program,
// and all that is used here. No clock, no step of a script's, and no wait is.
//
// A rank puts this in its group in front of gloo when it has the compiled code, each in its own time, since calls go on to
// gloo all the same; from there on it counts. gloo has counted before, all calls alike, so that a rank that has sent or
// received anything until then does not know how many were collectives: its group stays on gloo.
//
// Rank 0 proposes a number some way ahead. A rank that has not come so far is armed for it, and says so; one that has
// gone past it decides in the store that it is not to be. The last one to be armed decides that it is. A decision is
// written once, by whoever comes first (compareSet). A rank that comes to the collective undecided decides against it,
// rather than wait; the next proposal is further ahead. So an armed rank knows what all know when it comes there, and one
// that is not armed has decided already. A rank that is slow, has stopped, or has no compiled code keeps all on gloo.
//
// What gloo still runs at that moment goes on there: ours waits for what was handed to it before it runs anything itself. Its
// reduce_scatters are not waited for: gloo works on copies of its own there, and whoever waits for their works has the
// outputs written once more, as often as he waits.
//
// On one host ours runs over the same gloo. Between hosts an error has to close connections, and torch holds those of that
// gloo for good: ours runs over one of its own, and messages between two ranks stay with the old one, so that they match
// whichever side of the moment they are on.
#pragma once

#include "backend.h"

namespace deepytorch {

class ChangeOver final : public c10d::Backend {
 public:
  // stock: of CPU tensors, in use. ours: over the same one, or one of its own. store: of these ranks and this purpose alone.
  // begun: what stock had counted when it was made.
  ChangeOver(c10::intrusive_ptr<c10d::Backend> stock, c10::intrusive_ptr<deepytorch::Backend> ours, c10::intrusive_ptr<c10d::Store> store,
             uint64_t begun);
  ~ChangeOver() override;

  // Collectives that this rank has called, counted as gloo does.
  uint64_t position() const;
  // Change in front of collective number `at`, if the store says so under `key` by then. Returns why not, or nothing.
  // kept: the process group keeps the Python object of stock alive, which holds it, too.
  std::string arm(uint64_t at, const std::string& key, bool kept);
  // What the store says under `key`.
  void decide(const std::string& key, bool go);
  bool is_over() const { return over_.load(std::memory_order_acquire); }
  c10::intrusive_ptr<deepytorch::Backend> ours() const { return ours_; }

  const std::string getBackendName() const override { return current()->getBackendName(); }
  c10::intrusive_ptr<Options> getBackendOptions() override { return current()->getBackendOptions(); }
  void setTimeout(std::chrono::milliseconds timeout) override;
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return current()->getSequenceNumberForGroup(); }
  void abort() override { ours_->abort(); }
  void shutdown() override { ours_->shutdown(); }

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
  WorkPtr barrier(const c10d::BarrierOptions& options) override;
  WorkPtr send(Tensors& tensors, int target, int tag) override;
  WorkPtr recv(Tensors& tensors, int source, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all) override;

 private:
  template <bool remembers = true, class Run>
  WorkPtr collective(Run run);
  template <class Run>
  auto message(Run run);
  template <class Run>
  auto on_stock(Run run);
  bool reached();
  bool is_decided_for();
  c10::intrusive_ptr<c10d::Backend> current() const;

  c10::intrusive_ptr<c10d::Backend> stock_;  // null from the change-over on
  c10::intrusive_ptr<deepytorch::Backend> ours_;  // null in the destructor only
  const size_t holders_;  // of stock: by the process group under its name, here, and perhaps by ours
  const c10::intrusive_ptr<c10d::Store> store_;
  const uint32_t num_forks_ = num_forks;

  mutable std::mutex mutex_;  // nobody waits for it with the interpreter's lock
  uint64_t position_;
  uint64_t seen_;  // what stock has counted, as far as calls came through here
  bool passed_ = false;  // whether it has counted others, ever
  std::optional<uint64_t> armed_at_;
  std::string key_;
  bool go_ = false;
  std::string lost_;  // why this rank cannot know whether the others have changed
  std::atomic<bool> over_{false};
};

}  // namespace deepytorch
