// The state of a group, usable or failed, which ranks of one host share through the segment, and hosts through the store.
//
// [Note: errors between hosts] A failing host closes its connections at once, from which other hosts learn of the error.
// But a rank that waits for nothing does not see that, and a host that hangs closes nothing. So in a group of several
// hosts a thread of each rank looks at one key of the group's store twice a second; a rank that fails writes the key.
// The same thread compares the ranks' calls: [Note: calls between hosts] in call_history.h.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "call_history.h"
#include "segment.h"

namespace deepytorch {

class Health {
 public:
  // hears: whether a Listener brings the errors of other hosts.
  Health(std::shared_ptr<Segment> segment, bool hears) : segment_(std::move(segment)), hears_(hears) {}
  void stop_hearing() { hears_ = false; }

  // The first message stays.
  void poison(const std::string& message);
  // Called when this rank has poisoned the group, by any thread.
  void set_on_poison(std::function<void()> call);
  // Called after a failure that another host's error may have caused: waits until that error may have arrived, since its
  // message says more.
  void await_reason() const;
  bool poisoned() const;
  std::string message() const;
  // Print what the ranks of this host have called, once.
  void report() const;

 private:
  std::shared_ptr<Segment> segment_;
  std::atomic<bool> hears_;
  mutable std::mutex mutex_;
  std::string error_;
  std::atomic<bool> failed_{false};  // whether there is one: asked before every call
  std::function<void()> on_poison_;
};

// Who listens, and to what.
struct Listening {
  int rank, host;
  bool compares;  // this rank's calls with those of rank 0
  std::shared_ptr<Health> health;
  std::shared_ptr<const CallHistory> calls[2];  // on CPU tensors, on CUDA tensors
  c10::intrusive_ptr<c10d::Store> store;  // a connection of its own
};

// The thread of [Note: errors between hosts].
class Listener {
 public:
  // on_error: after an error that did not come up in a call of this rank.
  Listener(Listening listening, std::function<void()> on_error);
  ~Listener();  // waits a second for the thread: the store may not answer any more

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    bool stop = false, ended = false, poked = false;
    std::function<void()> on_error;
  };
  static void listen(std::shared_ptr<State> state, Listening listening);

  std::shared_ptr<State> state_ = std::make_shared<State>();
  std::shared_ptr<Health> health_;
  std::thread thread_;
};

}  // namespace deepytorch
