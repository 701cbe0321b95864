// Whether a group can still be used, as its ranks tell each other: those of one host through the segment, hosts through
// the store.
//
// [Note: errors between hosts] A host learns of another one's error when connections close, which the failing host does
// at once, but a rank that waits for nothing does not see it, and a host that stands still closes nothing. So in a group
// of several hosts a thread of each rank looks at one key of the group's store twice a second; whoever fails writes it.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "segment.h"

namespace deepytorch {

class Health {
 public:
  explicit Health(std::shared_ptr<Segment> segment) : segment_(std::move(segment)) {}

  // The first message stays.
  void poison(const std::string& message);
  bool poisoned() const;
  std::string message() const;
  // Print what the ranks of this host have called, once.
  void report() const;

 private:
  std::shared_ptr<Segment> segment_;
  mutable std::mutex mutex_;
  std::string error_;
};

// The thread of [Note: errors between hosts].
class Listener {
 public:
  // who: this rank, as its message names it. store: a connection of its own. on_error: after another host's error.
  Listener(std::shared_ptr<Health> health, c10::intrusive_ptr<c10d::Store> store, std::string who, std::function<void()> on_error);
  ~Listener();  // waits a second for the thread: the store may not answer any more

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    bool stop = false, ended = false;
    std::function<void()> on_error;
  };
  static void listen(std::shared_ptr<State> state, std::shared_ptr<Health> health, c10::intrusive_ptr<c10d::Store> store,
                     std::string who);

  std::shared_ptr<State> state_ = std::make_shared<State>();
  std::thread thread_;
};

}  // namespace deepytorch
