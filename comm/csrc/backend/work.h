// What `Backend` is made of inside: an operation as it was called, as it waits in the queue, and as its caller holds it.
#pragma once

#include <ATen/Context.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/record_function.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "../backend.h"
#include "../checks.h"
#include "../gil.h"

namespace deepytorch {

using RedOp = c10d::ReduceOp::RedOpType;

constexpr auto kLongest = std::chrono::hours(24 * 365);  // a deadline is a point in time, which has an end

inline bool is_float(at::ScalarType type) { return at::isFloatingType(type); }
inline bool somebody_profiles() { return at::hasCallbacks(); }
inline size_t bytes_of(const at::Tensor& tensor) { return tensor.is_sparse() ? 0 : tensor.nbytes(); }

inline uint64_t sizes_of(const std::vector<at::Tensor>& tensors) {
  uint64_t found = tensors.size();
  for (const at::Tensor& tensor : tensors) found = mix(found + 1, tensor.numel());
  return found;
}

// What profilers show: as gloo's own operations where the group goes by that name.
const char* title_of(Kind kind, bool as_gloo);

class Backend::OwnWork final : public c10d::Work {
 public:
  // title: what profilers show, or null. inputs: whose shapes they show.
  OwnWork(int rank, Kind kind, const char* title, const Tensors& inputs, Tensors outputs, std::shared_ptr<DeviceCopies> copies)
      : Work(rank, op_type(kind), somebody_profiles() ? title : nullptr,
             somebody_profiles() && !inputs.empty() ? std::optional<Tensors>(inputs) : std::nullopt),
        outputs_(std::move(outputs)),
        copies_(std::move(copies)) {}

  std::vector<at::Tensor> result() override { return outputs_; }
  uint64_t getSequencenumber() const override { return sequence_; }
  void set_sequence(uint64_t sequence) { sequence_ = sequence; }  // called before anybody else has the work
  void abort() override { TORCH_CHECK(false, "a collective of the deepytorch backend is aborted with its group only"); }
  void synchronize() override {
    if (copies_) copies_->block_current_stream();
    if (launched_) launched_->block(c10::impl::VirtualGuardImpl(stream_->device_type()).getStream(stream_->device()));
  }

  // What has been launched on that stream so far is all of it; called before anybody else has the work.
  void runs_on(c10::Stream stream) {
    stream_ = stream;
    launched_.emplace(stream.device_type());
    launched_->record(stream);
  }

  // Settled without the lock: what waits on a future may run Python, whose own lock another caller may hold here.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    bool late;
    c10::intrusive_ptr<c10::ivalue::Future> future;
    {
      const std::lock_guard<std::mutex> lock(future_mutex_);
      late = !future_ && ended_;
      if (!future_) {
        std::vector<c10::Device> devices;
        if (!outputs_.empty() && !outputs_[0].is_cpu()) devices.push_back(outputs_[0].device());
        future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), devices);
      }
      future = future_;
    }
    if (late) settle(*future);
    return future;
  }

  // Returns the future that is to be settled, if anybody has asked for one.
  c10::intrusive_ptr<c10::ivalue::Future> end(std::exception_ptr error) {
    finish(error);
    const std::lock_guard<std::mutex> lock(future_mutex_);
    error_ = std::move(error);
    ended_ = true;
    return future_;
  }

  // Runs the callbacks of the future.
  void settle(c10::ivalue::Future& future) const {
    const c10::OptionalStreamGuard guard(stream_);  // what waits for the future waits for that stream
    if (error_) future.setError(error_);
    else future.markCompleted(c10::IValue(outputs_));
  }

 private:
  Tensors outputs_;
  std::shared_ptr<DeviceCopies> copies_;
  std::optional<c10::Stream> stream_;
  std::optional<c10::Event> launched_;
  uint64_t sequence_ = 0;
  std::mutex future_mutex_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  bool ended_ = false;
  std::exception_ptr error_;
};

struct Backend::Wanted {
  Kind kind;
  at::ScalarType dtype = at::kByte;
  int64_t count = -1;
  RedOp reduce = RedOp::UNUSED;
  int root = -1;
  bool on_cuda = false;
  std::chrono::milliseconds timeout = c10d::kUnsetTimeout;
  uint64_t sizes = 0;
  Tensors inputs = {};  // for profilers, where they are not the outputs
  const void* data = nullptr;  // where the host may read it directly
  size_t bytes = 0;
  bool prepares = false;  // whether its tensors are read or written here before an inner backend gets them
};

struct Backend::Worker {
  std::thread thread;
  bool gone = false;  // read and written on that thread alone

  bool is_this() const { return thread.get_id() == std::this_thread::get_id(); }
};

struct Backend::Job {
  Fingerprint fingerprint;
  bool own = true;         // all ranks of the host run it together; else it only calls an inner backend
  bool may_share = false;  // whether memory was handed out before the call, alike on all ranks
  std::shared_ptr<Kept> kept;  // where inner backends carry parts of it
  std::optional<at::ThreadLocalState> caller;  // of the calling thread, where another one runs it
  std::chrono::milliseconds timeout;
  at::ScalarType dtype;
  RedOp reduce;
  std::function<void(Call&, const Fingerprint&)> body;
  c10::intrusive_ptr<OwnWork> work;
  c10::intrusive_ptr<c10::ivalue::Future> settled;  // to be settled once it has run

  void number(const Fingerprint& announced) {
    fingerprint = announced;
    work->set_sequence(announced.sequence);
  }
};

inline std::vector<at::Tensor> flat(const std::vector<at::Tensor>& tensors) { return tensors; }

inline std::vector<at::Tensor> flat(const std::vector<std::vector<at::Tensor>>& lists) {
  std::vector<at::Tensor> found;
  for (const auto& list : lists) found.insert(found.end(), list.begin(), list.end());
  return found;
}

// Hands a call on whole.
template <class Outputs, class Inputs, class Run>
Backend::WorkPtr Backend::hand_on(Wanted wanted, const Outputs& given_outputs, const Inputs& given_inputs, Run run) {
  Copied copied, brought;
  const auto aliases = each(given_outputs, alias_of);
  auto outputs = each(aliases, copied);
  auto inputs = each(each(given_inputs, alias_of), brought);
  wanted.prepares = !brought.given.empty();
  const auto call = [outputs, inputs, brought, run](c10d::Backend& engine) mutable {
    brought.fill();
    return run(engine, outputs, inputs);
  };
  return delegate(wanted, call, flat(aliases), std::move(copied));
}

}  // namespace deepytorch
