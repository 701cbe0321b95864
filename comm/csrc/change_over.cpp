#include "change_over.h"

#include <future>
#include <thread>

#include "delegated.h"
#include "gil.h"

namespace deepytorch {

ChangeOver::ChangeOver(c10::intrusive_ptr<c10d::Backend> stock, c10::intrusive_ptr<deepytorch::Backend> ours,
                       c10::intrusive_ptr<c10d::Store> store, uint64_t begun)
    : c10d::Backend(ours->getRank(), ours->getSize()), stock_(std::move(stock)), ours_(std::move(ours)),
      holders_(ours_->engine_of(false) == stock_ ? 3 : 2), store_(std::move(store)),
      position_(stock_->getSequenceNumberForGroup() - begun), seen_(position_ + begun) {
  setGroupUid(stock_->getGroupUid());  // where a process group looks for its own name
  setGroupDesc(stock_->getGroupDesc());
}

ChangeOver::~ChangeOver() {
  if (num_forks_ != num_forks) (void)stock_.release();  // a forked child has none of its threads
  const WithoutGil unlocked;  // both wait for their threads, and those drop tensors
  stock_.reset();
  ours_.reset();
}

uint64_t ChangeOver::position() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return position_;
}

std::string ChangeOver::arm(uint64_t at, const std::string& key, bool kept) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (over_ || position_ >= at) return "the collective was called already";
  if (stock_.use_count() > holders_ + kept) return "somebody holds the group's gloo backend, to call it past the group";
  if (passed_ || stock_->getSequenceNumberForGroup() != seen_) return "the group's gloo backend was called past the group";
  armed_at_ = at;
  key_ = key;
  go_ = false;
  return "";
}

void ChangeOver::decide(const std::string& key, bool go) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!armed_at_ || key_ != key) return;
  if (go) go_ = true;
  else armed_at_.reset();
}

// Called with the lock: what the store says, after this rank has said no. A store may be gone, or hold its answer back for
// ever; then nobody can tell on which side of the moment the others are, and no collective of the group can be right.
bool ChangeOver::is_decided_for() {
  auto answer = std::make_shared<std::promise<std::string>>();
  auto told = answer->get_future();
  std::thread([answer, store = store_, key = key_] {
    try {
      answer->set_value(store->compareSet(key, "", "no"));
    } catch (...) {
      answer->set_exception(std::current_exception());
    }
  }).detach();
  std::string why = "it does not answer";
  if (told.wait_for(ours_->timeout()) == std::future_status::ready) {
    try {
      return told.get() == "go";
    } catch (const c10::Error& error) {
      why = error.what_without_backtrace();
    } catch (const std::exception& error) {
      why = error.what();
    }
  }
  lost_ = "the ranks of this group were about to change over from gloo, and their store is gone, so this rank cannot know whether the "
          "others have changed (" + why + "). Keep the process that holds the store until all ranks have ended, or run `deepytorch build` "
          "before training";
  raise(lost_);
}

// Called with the lock, in front of a collective: whether it is the first one of ours.
bool ChangeOver::reached() {
  if (!armed_at_ || position_ < *armed_at_) return false;
  if (!lost_.empty()) raise(lost_);
  if (!go_) go_ = is_decided_for();
  armed_at_.reset();
  if (!go_) return false;
  ours_->inherit(std::move(stock_));
  over_.store(true, std::memory_order_release);
  return true;
}

c10::intrusive_ptr<c10d::Backend> ChangeOver::current() const {
  const WithoutGil unlocked;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (stock_) return stock_;
  return ours_;
}

void ChangeOver::setTimeout(std::chrono::milliseconds timeout) {
  const WithoutGil unlocked;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (stock_) stock_->setTimeout(timeout);
  ours_->setTimeout(timeout);
}

// Called with the lock. gloo only takes calls in here, and runs them on threads of its own.
template <class Run>
auto ChangeOver::on_stock(Run run) {
  struct Counted {  // also where the call is refused after it was counted
    ChangeOver& self;
    ~Counted() { self.seen_ = self.stock_->getSequenceNumberForGroup(); }
  };
  if (stock_->getSequenceNumberForGroup() != seen_) passed_ = true;
  const Counted counted{*this};
  return run(*stock_);
}

template <bool remembers, class Run>
ChangeOver::WorkPtr ChangeOver::collective(Run run) {
  if (!is_over()) {
    const WithoutGil unlocked;
    std::unique_lock<std::mutex> lock(mutex_);
    if (!over_ && !reached()) {
      struct Moved {
        ChangeOver& self;
        uint64_t before = self.stock_->getSequenceNumberForGroup();
        ~Moved() { self.position_ += self.stock_->getSequenceNumberForGroup() - before; }
      };
      WorkPtr work;
      {
        const Moved moved{*this};
        work = on_stock(run);
      }
      lock.unlock();
      if (remembers && work) ours_->remember(work);
      return work;
    }
  }
  return run(static_cast<c10d::Backend&>(*ours_));
}

// Between two ranks: nothing that all ranks count.
template <class Run>
auto ChangeOver::message(Run run) {
  if (!is_over()) {
    const WithoutGil unlocked;
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!over_) return on_stock(run);
  }
  return run(static_cast<c10d::Backend&>(*ours_));
}

ChangeOver::WorkPtr ChangeOver::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  return collective([&](auto& to) { return to.broadcast(tensors, options); });
}

ChangeOver::WorkPtr ChangeOver::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  return collective([&](auto& to) { return to.allreduce(tensors, options); });
}

ChangeOver::WorkPtr ChangeOver::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) {
  return collective([&](auto& to) { return to.allreduce_sparse(tensors, options); });
}

ChangeOver::WorkPtr ChangeOver::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  return collective([&](auto& to) { return to.allreduce_coalesced(tensors, options); });
}

ChangeOver::WorkPtr ChangeOver::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  return collective([&](auto& to) { return to.reduce(tensors, options); });
}

ChangeOver::WorkPtr ChangeOver::allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  return collective([&](auto& to) { return to.allgather(outputs, inputs, options); });
}

ChangeOver::WorkPtr ChangeOver::_allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) {
  return collective([&](auto& to) { return to._allgather_base(output, input, options); });
}

ChangeOver::WorkPtr ChangeOver::allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                                    const c10d::AllgatherOptions& options) {
  return collective([&](auto& to) { return to.allgather_coalesced(outputs, inputs, options); });
}

ChangeOver::WorkPtr ChangeOver::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                const c10d::AllgatherOptions& options) {
  return collective([&](auto& to) { return to.allgather_into_tensor_coalesced(outputs, inputs, options); });
}

ChangeOver::WorkPtr ChangeOver::gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
  return collective([&](auto& to) { return to.gather(outputs, inputs, options); });
}

ChangeOver::WorkPtr ChangeOver::scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& options) {
  return collective([&](auto& to) { return to.scatter(outputs, inputs, options); });
}

ChangeOver::WorkPtr ChangeOver::reduce_scatter(Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& options) {
  return collective<false>([&](auto& to) { return to.reduce_scatter(outputs, inputs, options); });
}

ChangeOver::WorkPtr ChangeOver::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                     const c10d::ReduceScatterOptions& options) {
  return collective<false>([&](auto& to) { return to._reduce_scatter_base(output, input, options); });
}

ChangeOver::WorkPtr ChangeOver::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                const c10d::ReduceScatterOptions& options) {
  return collective<false>([&](auto& to) { return to.reduce_scatter_tensor_coalesced(outputs, inputs, options); });
}

ChangeOver::WorkPtr ChangeOver::alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                                              std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& options) {
  return collective([&](auto& to) { return to.alltoall_base(output, input, output_sizes, input_sizes, options); });
}

ChangeOver::WorkPtr ChangeOver::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  return collective([&](auto& to) { return to.alltoall(outputs, inputs, options); });
}

ChangeOver::WorkPtr ChangeOver::barrier(const c10d::BarrierOptions& options) {
  return collective([&](auto& to) { return to.barrier(options); });
}

ChangeOver::WorkPtr ChangeOver::send(Tensors& tensors, int target, int tag) {
  return message([&](auto& to) { return to.send(tensors, target, tag); });
}

ChangeOver::WorkPtr ChangeOver::recv(Tensors& tensors, int source, int tag) {
  return message([&](auto& to) { return to.recv(tensors, source, tag); });
}

ChangeOver::WorkPtr ChangeOver::recvAnysource(Tensors& tensors, int tag) {
  return message([&](auto& to) { return to.recvAnysource(tensors, tag); });
}

// Made of messages, and waits for them, without the lock: others may have to call something before theirs come. A collective
// of another thread's meanwhile finds that gloo has counted more than came through here, and the group stays on gloo.
void ChangeOver::monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all) {
  c10::intrusive_ptr<c10d::Backend> stock;
  const WithoutGil unlocked;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stock = stock_;
  }
  if (!stock) return ours_->monitoredBarrier(options, wait_all);
  struct Counted {
    ChangeOver& self;
    c10d::Backend& stock;
    ~Counted() {
      const std::lock_guard<std::mutex> lock(self.mutex_);
      self.seen_ = stock.getSequenceNumberForGroup();
    }
  };
  const Counted counted{*this, *stock};
  stock->monitoredBarrier(options, wait_all);
}

}  // namespace deepytorch
