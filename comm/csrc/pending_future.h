// The future of a call that an inner backend runs: completed by the backend's result or by the group's poison, the earlier.
//
// [Note: who looks at the poison for a future] A thread that waits on a work looks at the poison itself. A wait on a future
// happens inside torch, which does not know of the poison. So one thread of the process looks ten times a second while a
// future is pending, and sleeps otherwise. This thread holds no group and completes no future itself: callbacks of a future
// may wait for anything, also for another future, so each future that the poison ends gets a thread of its own.
#pragma once

#include <ATen/ThreadLocalState.h>
#include <ATen/core/ivalue.h>

#include <memory>
#include <mutex>

#include "health.h"

namespace deepytorch {

class PendingFuture {
 public:
  using Future = c10::intrusive_ptr<c10::ivalue::Future>;

  PendingFuture(Future future, std::shared_ptr<const Health> health)
      : held_(new Held{std::move(future), at::ThreadLocalState()}), health_(std::move(health)) {}

  // Each completes the future if it is not complete yet; callbacks run at once, with the state of the thread that asked.
  void complete(c10::IValue value);
  void fail(std::exception_ptr error);
  void fail_by_poison();

  bool taken() const;  // whether the future is complete, or is being completed
  bool poisoned() const { return health_->poisoned(); }

 private:
  struct Held {
    Future future;
    at::ThreadLocalState caller;
  };
  // Gives the caller all that may hold Python objects, so that the thread that looks drops none of them.
  std::unique_ptr<Held> take();
  template <typename Settle>
  void settle(Settle&& by);

  mutable std::mutex mutex_;
  std::unique_ptr<Held> held_;
  const std::shared_ptr<const Health> health_;
};

// Completes the future by the poison, if that comes before the result.
void watch(std::shared_ptr<PendingFuture> pending);

}  // namespace deepytorch
