#include "health.h"

#include <c10/util/Exception.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <exception>
#include <utility>
#include <vector>

namespace deepytorch {

namespace {

using namespace std::chrono_literals;

constexpr auto kLookIntoStore = 500ms;
constexpr char kTrouble[] = "trouble";
constexpr const char* kCalls[] = {"calls", "calls on cuda"};

enum class Heard { nothing, trouble, the_end };

void tell(const Listening& here) {
  const std::string message =
      "rank " + std::to_string(here.rank) + " on host " + std::to_string(here.host) + ": " + here.health->message();
  here.store->set(kTrouble, std::vector<uint8_t>(message.begin(), message.end()));
}

// Rank 0 publishes its calls, the others compare them with their own. told: per device, the calls published so far.
std::string compare(const Listening& here, uint64_t (&told)[2]) {
  for (int on_cuda = 0; on_cuda < 2; ++on_cuda) {
    const CallHistory& mine = *here.calls[on_cuda];
    const uint64_t newest = mine.newest();
    if (here.rank == 0) {
      if (newest != told[on_cuda]) here.store->set(kCalls[on_cuda], mine.lately());
      told[on_cuda] = newest;
    } else if (here.compares && newest != 0 && here.store->check({kCalls[on_cuda]})) {
      const std::string found = mine.difference(here.store->get(kCalls[on_cuda]), 0, here.rank);
      if (!found.empty()) return found;
    }
  }
  return "";
}

// [Note: gloo ends the process] If gloo receives more bytes than it expects, since a rank of another host gave another
// size, gloo's own thread throws, and nobody catches the exception: the process ends without a message about the cause, and
// the other ranks see a closed connection. So the end is delayed until the ranks have compared their calls, two seconds at
// most, and a little longer, so that the caller who waits gets the error that names both sides.
std::mutex& ending() {
  static auto& mutex = *new std::mutex;  // never destroyed: threads may end after main
  return mutex;
}
std::vector<std::pair<std::shared_ptr<Health>, std::function<void()>>>& all_listening() {
  static auto& all = *new std::vector<std::pair<std::shared_ptr<Health>, std::function<void()>>>;
  return all;
}
std::terminate_handler end_of_process = nullptr;
pid_t installed_in = 0;

std::string in_flight() {
  const auto thrown = std::current_exception();
  if (!thrown) return "";
  try {
    std::rethrow_exception(thrown);
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "";
  }
}

void explain_and_end() {
  const std::string what = in_flight();
  if (getpid() == installed_in && what.find("gloo") != std::string::npos) {
    std::vector<std::pair<std::shared_ptr<Health>, std::function<void()>>> all;
    {
      const std::lock_guard<std::mutex> lock(ending());
      all = all_listening();
    }
    for (const auto& [health, look_now] : all) look_now();
    std::string reason;
    for (auto waited = 0ms; waited < 2000ms && reason.empty() && !all.empty(); waited += 20ms) {
      std::this_thread::sleep_for(20ms);
      for (const auto& [health, look_now] : all) {
        if (health->poisoned()) reason = health->message();
      }
    }
    if (!reason.empty()) {
      std::fprintf(stderr, "deepytorch: gloo ends this process: %s\n", reason.c_str());
      std::fflush(stderr);
      std::this_thread::sleep_for(1s);
    }
  }
  if (end_of_process) end_of_process();
  std::abort();
}

void listens(const std::shared_ptr<Health>& health, std::function<void()> look_now) {
  const std::lock_guard<std::mutex> lock(ending());
  if (installed_in != getpid()) {
    if (installed_in == 0) end_of_process = std::set_terminate(explain_and_end);
    installed_in = getpid();
    all_listening().clear();
  }
  all_listening().emplace_back(health, std::move(look_now));
}

void listens_no_more(const Health* health) {
  const std::lock_guard<std::mutex> lock(ending());
  auto& all = all_listening();
  all.erase(std::remove_if(all.begin(), all.end(), [&](const auto& each) { return each.first.get() == health; }), all.end());
}

// One look into the store.
Heard look(const Listening& here, uint64_t (&told)[2]) {
  try {
    if (here.store->check({kTrouble})) {
      const auto found = here.store->get(kTrouble);
      here.health->poison("an error on another host: " + std::string(found.begin(), found.end()));
      return Heard::trouble;
    }
    if (here.health->poisoned()) {
      tell(here);
      return Heard::the_end;
    }
    const std::string found = compare(here, told);
    if (found.empty()) return Heard::nothing;
    here.health->poison(found);
    try {
      tell(here);  // before this rank closes its connections
    } catch (const std::exception&) {  // then the closed connections tell the other hosts
    }
    return Heard::trouble;
  } catch (const std::exception&) {  // the store is gone: closed connections tell the rest
    return Heard::the_end;
  }
}

}  // namespace

void Health::poison(const std::string& message) {
  if (segment_) segment_->poison(message);
  std::function<void()> call;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (error_.empty()) error_ = segment_ ? segment_->poison_message() : message;
    failed_ = !error_.empty();
    call = on_poison_;
  }
  if (call) call();
}

void Health::set_on_poison(std::function<void()> call) {
  const std::lock_guard<std::mutex> lock(mutex_);
  on_poison_ = std::move(call);
}

void Health::await_reason() const {
  for (auto waited = 0ms; hears_ && waited < kLookIntoStore + 100ms && !poisoned(); waited += 10ms) {
    std::this_thread::sleep_for(10ms);
  }
}

bool Health::poisoned() const {
  return failed_.load() || (segment_ && segment_->poisoned());
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

Listener::Listener(Listening listening, std::function<void()> on_error) {
  state_->on_error = std::move(on_error);
  health_ = listening.health;
  const auto look_now = [state = state_, process = getpid()] {
    if (getpid() != process) return;  // a forked child, in which the lock may be held for good
    const std::lock_guard<std::mutex> lock(state->mutex);
    state->poked = true;
    state->changed.notify_all();
  };
  health_->set_on_poison(look_now);  // other hosts are told at once
  listens(health_, look_now);
  thread_ = std::thread(listen, state_, std::move(listening));
}

Listener::~Listener() {
  listens_no_more(health_.get());
  health_->stop_hearing();
  std::unique_lock<std::mutex> lock(state_->mutex);
  state_->stop = true;
  state_->on_error = nullptr;
  state_->changed.notify_all();
  const bool ended = state_->changed.wait_for(lock, std::chrono::seconds(1), [this] { return state_->ended; });
  lock.unlock();
  if (ended) thread_.join();
  else thread_.detach();
}

void Listener::listen(std::shared_ptr<State> state, Listening listening) {
  uint64_t told[2] = {0, 0};
  std::unique_lock<std::mutex> lock(state->mutex);
  for (;;) {
    const bool last = state->stop;
    lock.unlock();
    const Heard heard = look(listening, told);
    lock.lock();
    if (heard == Heard::trouble && state->on_error) state->on_error();
    if (heard != Heard::nothing || last) break;
    state->changed.wait_for(lock, kLookIntoStore, [&] { return state->stop || state->poked; });
    state->poked = false;
  }
  state->ended = true;
  state->changed.notify_all();
}

}  // namespace deepytorch
