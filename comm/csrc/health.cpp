#include "health.h"

#include <c10/util/Exception.h>

#include <chrono>
#include <utility>
#include <vector>

namespace deepytorch {

namespace {

constexpr auto kLookIntoStore = std::chrono::milliseconds(500);
constexpr char kKey[] = "trouble";

}  // namespace

void Health::poison(const std::string& message) {
  if (segment_) segment_->poison(message);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (error_.empty()) error_ = segment_ ? segment_->poison_message() : message;
}

bool Health::poisoned() const {
  if (segment_ && segment_->poisoned()) return true;
  const std::lock_guard<std::mutex> lock(mutex_);
  return !error_.empty();
}

std::string Health::message() const {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!error_.empty()) return error_;
  }
  return segment_ ? segment_->poison_message() : "";
}

void Health::report() const {
  if (segment_ && segment_->first_to_report()) {
    TORCH_WARN("what the ranks of this host have called last, the newest at the end:\n", segment_->recorder());
  }
}

Listener::Listener(std::shared_ptr<Health> health, c10::intrusive_ptr<c10d::Store> store, std::string who,
                   std::function<void()> on_error) {
  state_->on_error = std::move(on_error);
  thread_ = std::thread(listen, state_, std::move(health), std::move(store), std::move(who));
}

Listener::~Listener() {
  std::unique_lock<std::mutex> lock(state_->mutex);
  state_->stop = true;
  state_->on_error = nullptr;
  state_->changed.notify_all();
  const bool ended = state_->changed.wait_for(lock, std::chrono::seconds(1), [this] { return state_->ended; });
  lock.unlock();
  if (ended) thread_.join();
  else thread_.detach();
}

void Listener::listen(std::shared_ptr<State> state, std::shared_ptr<Health> health, c10::intrusive_ptr<c10d::Store> store,
                      std::string who) {
  const std::vector<std::string> keys{kKey};
  std::unique_lock<std::mutex> lock(state->mutex);
  for (;;) {
    const bool last = state->stop;
    lock.unlock();
    bool over = false;
    std::string theirs;
    try {
      if (store->check(keys)) {
        const auto found = store->get(kKey);
        theirs.assign(found.begin(), found.end());
      } else if (health->poisoned()) {
        const std::string message = who + ": " + health->message();
        store->set(kKey, std::vector<uint8_t>(message.begin(), message.end()));
        over = true;
      }
    } catch (const std::exception&) {  // the store is gone: closed connections tell the rest
      over = true;
    }
    if (!theirs.empty()) {
      health->poison("an error on another host: " + theirs);
      over = true;
    }
    lock.lock();
    if (!theirs.empty() && state->on_error) state->on_error();
    if (over || last) break;
    state->changed.wait_for(lock, kLookIntoStore, [&] { return state->stop; });
  }
  state->ended = true;
  state->changed.notify_all();
}

}  // namespace deepytorch
