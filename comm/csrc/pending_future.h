// The future of a call that an inner backend runs: completed by what that found or by the group's poison, whichever is first.
//
// [Note: who looks at the poison for a future] Whoever waits on a work looks at the poison himself. A future is waited on
// inside of torch, which knows of none. So one thread of the process looks ten times a second while a future is pending,
// and sleeps else. It holds no group, and completes nothing itself: what hangs on a future may wait for anything, another
// future too, so each that the poison ends gets a thread for it.
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

  // Each completes it unless another one has, with what is hung on it run at once, and as the thread that asked for it.
  void complete(c10::IValue value);
  void fail(std::exception_ptr error);
  void fail_by_poison();

  bool taken() const;  // whether somebody completes it, or has
  bool poisoned() const { return health_->poisoned(); }

 private:
  struct Held {
    Future future;
    at::ThreadLocalState caller;
  };
  // All that may hold Python objects goes with who takes it: the thread that looks drops none of them.
  std::unique_ptr<Held> take();
  template <typename Settle>
  void settle(Settle&& by);

  mutable std::mutex mutex_;
  std::unique_ptr<Held> held_;
  const std::shared_ptr<const Health> health_;
};

// Completes it by the poison should that come first.
void watch(std::shared_ptr<PendingFuture> pending);

}  // namespace deepytorch
