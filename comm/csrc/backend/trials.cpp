// What the choice of algorithms is made by, timed again: [Note: trials] in backend.h.
#include <cstring>

#include "work.h"

namespace deepytorch {

namespace {

constexpr int kRounds = 2;
constexpr uint64_t kShort = 1 << 16;  // bytes: what is no more is run several times in a row
constexpr int kInARow = 8;

}  // namespace

void Backend::set_trials(std::vector<uint64_t> sizes, uint64_t copy_bytes, uint64_t first, int number, Tried tried) {
  const std::lock_guard<std::mutex> lock(mutex_);
  trials_ = std::make_unique<Trials>(Trials{std::move(sizes), copy_bytes, first, number, std::move(tried)});
}

void Backend::end_trials() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (trials_) trials_->next = UINT64_MAX;
  trial_is_due_ = false;
}

Row Backend::next_row(Kind kind, bool on_cuda, uint64_t bytes) {
  if (!on_cuda && trial_is_due_.load(std::memory_order_relaxed)) next_trial();
  return row(kind, on_cuda, bytes);
}

void Backend::next_trial() {
  guard();
  std::vector<double> found;
  bool begins = false;
  {
    const WithoutGil unlocked;
    std::unique_lock<std::mutex> lock(mutex_);
    if (!trial_is_due_.exchange(false)) return;
    changed_.wait(lock, [this] { return !trials_->pending || poisoned() || stopped_.load(); });
    found.swap(trials_->found);
    begins = trials_->left-- > 0;
    trials_->next = begins ? 4 * trials_->next : UINT64_MAX;
    trials_->pending = begins;
  }
  guard();
  if (!found.empty()) trials_->tried(*this, found);
  if (!begins) return;
  const Wanted wanted{Kind::barrier, at::kFloat, -1, RedOp::SUM};
  (void)submit(wanted, [this](Call& call, const Fingerprint& mine) { run_trial(call, mine); }, {}, true);
}

void Backend::run_trial(Call& call, const Fingerprint& mine) {
  const Row through_memory{UINT64_MAX, Algorithm::shared_memory, 0, 1, Wire::exact};
  const auto engine = inner(false);
  std::vector<double> fastest;
  const auto time = [&](int in_a_row, const auto& run) {
    double best = 0;
    for (int round = 0; round < kRounds; ++round) {
      call.sync();  // all begin together
      const auto begin = Clock::now();
      for (int turn = 0; turn < in_a_row; ++turn) run();
      const double us = std::chrono::duration<double, std::micro>(Clock::now() - begin).count() / in_a_row;
      best = round == 0 ? us : std::min(best, us);
    }
    fastest.push_back(best);
  };
  const uint64_t most = std::max(*std::max_element(trials_->sizes.begin(), trials_->sizes.end()), 2 * trials_->copy_bytes);
  const at::Tensor values = at::zeros({static_cast<int64_t>(most / sizeof(float))}, at::kFloat);  // gloo holds it, whatever happens
  char* const data = static_cast<char*>(values.data_ptr());
  for (const uint64_t bytes : trials_->sizes) {
    const size_t count = bytes / sizeof(float);
    const int in_a_row = bytes <= kShort ? kInARow : 1;
    time(in_a_row, [&] { run_all_reduce(call, mine, data, nullptr, count, through_memory, ""); });
    Tensors tensors{values.narrow(0, 0, static_cast<int64_t>(count))};
    time(in_a_row, [&] { wait_for(engine->allreduce(tensors, c10d::AllreduceOptions()), call, "timing the inner backend,"); });
  }
  time(1, [&] { std::memcpy(data, data + trials_->copy_bytes, trials_->copy_bytes); });
  call.dtype = Dtype::f64;
  call.reduce = Reduce::max;  // of the ranks the slowest
  run_all_reduce(call, mine, reinterpret_cast<char*>(fastest.data()), nullptr, fastest.size(), through_memory, "");
  const std::lock_guard<std::mutex> lock(mutex_);
  trials_->found = std::move(fastest);
  trials_->pending = false;
}

}  // namespace deepytorch
