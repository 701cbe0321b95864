#include "pending_future.h"

#include <c10/util/Exception.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <thread>
#include <utility>
#include <vector>

namespace deepytorch {

namespace {


// The thread of [Note: who looks at the poison for a future].
class Watch {
 public:
  // Never destroyed: the thread runs until the process ends. A forked child has no such thread, and makes its own.
  static Watch& of_this_process() {
    static std::atomic<Watch*> made{nullptr};
    Watch* found = made.load();
    while (found == nullptr || found->process_ != getpid()) {
      auto own = std::make_unique<Watch>();
      if (made.compare_exchange_strong(found, own.get())) return *own.release();
    }
    return *found;
  }

  void add(std::shared_ptr<PendingFuture> pending) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!started_) std::thread([this] { look(); }).detach();
    started_ = true;
    pending_.push_back(std::move(pending));
    if (pending_.size() == 1) added_.notify_one();
  }

 private:
  [[noreturn]] void look() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      added_.wait(lock, [this] { return !pending_.empty(); });
      lock.unlock();
      std::this_thread::sleep_for(kLook);
      lock.lock();
      const auto first = std::partition(pending_.begin(), pending_.end(), [](const auto& each) { return !each->taken() && !each->poisoned(); });
      std::vector<std::shared_ptr<PendingFuture>> ended(std::make_move_iterator(first), std::make_move_iterator(pending_.end()));
      pending_.erase(first, pending_.end());
      lock.unlock();
      for (const auto& each : ended) {
        if (!each->taken()) end(each);
      }
      ended.clear();  // without the lock: [Note: our locks and the interpreter's] in gil.h
      lock.lock();
    }
  }

  static void end(const std::shared_ptr<PendingFuture>& pending) {
    try {
      std::thread([pending] { pending->fail_by_poison(); }).detach();
    } catch (const std::exception&) {  // no thread is to be had
      pending->fail_by_poison();
    }
  }

  const pid_t process_ = getpid();
  std::mutex mutex_;
  std::condition_variable added_;
  std::vector<std::shared_ptr<PendingFuture>> pending_;
  bool started_ = false;
};

}  // namespace

void watch(std::shared_ptr<PendingFuture> pending) {
  try {
    Watch::of_this_process().add(std::move(pending));
  } catch (const std::exception& error) {
    TORCH_WARN_ONCE("no thread could be started that looks for errors of other ranks, so a future hears of them at its "
                    "timeout only: ", error.what());
  }
}

void PendingFuture::complete(c10::IValue value) {
  settle([&](c10::ivalue::Future& future) { future.markCompleted(std::move(value)); });
}

void PendingFuture::fail(std::exception_ptr error) {
  settle([&](c10::ivalue::Future& future) { future.setError(std::move(error)); });
}

void PendingFuture::fail_by_poison() {
  fail(std::make_exception_ptr(
      c10::DistBackendError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, health_->message())));
}

bool PendingFuture::taken() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return !held_;
}

std::unique_ptr<PendingFuture::Held> PendingFuture::take() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::move(held_);
}

template <typename Settle>
void PendingFuture::settle(Settle&& by) {
  const auto held = take();
  if (!held) return;
  try {
    const at::ThreadLocalStateGuard as_the_caller(held->caller);
    by(*held->future);
  } catch (const std::exception& error) {  // raised by a callback
    TORCH_WARN("a callback of a collective failed: ", error.what());
  }
}

}  // namespace deepytorch
