// Trials, which time the algorithms again: [Note: trials] in backend.h.
#include <cstring>

#include "work.h"

namespace deepytorch {

namespace {

constexpr int kRounds = 2;
constexpr uint64_t kShort = 1 << 16;  // bytes: payloads up to this size run several times in a row, except between hosts
constexpr int kInARow = 8;

int in_a_row(const Row& row, bool on_one_host) {
  return row.max_bytes <= kShort && (on_one_host || row.algorithm == Algorithm::shared_memory) ? kInARow : 1;
}

double us_since(Clock::time_point begin) { return std::chrono::duration<double, std::micro>(Clock::now() - begin).count(); }

}  // namespace

void Backend::set_trials(std::vector<Row> rows, const std::vector<double>& expected_us, uint64_t copy_bytes, uint64_t first,
                         int number, double share, Tried tried) {
  double expected = 0;
  for (size_t i = 0; i < rows.size(); ++i) expected += kRounds * in_a_row(rows[i], on_one_host()) * expected_us.at(i);
  const std::lock_guard<std::mutex> lock(mutex_);
  trials_ = std::make_unique<Trials>(Trials{std::move(rows), expected, copy_bytes, first, number, share, std::move(tried)});
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
    begins = trials_->left > 0;
    trials_->next = begins ? 2 * trials_->next : UINT64_MAX;
    trials_->pending = begins;
  }
  guard();
  if (!found.empty()) trials_->tried(*this, found.front(), {found.begin() + 1, found.end()});
  if (!begins) return;
  const Wanted wanted{Kind::barrier, at::kFloat, -1, RedOp::SUM};
  (void)submit(wanted, [this](Call& call, const Fingerprint& mine) { run_trial(call, mine); }, {}, true);
}

void Backend::run_trial(Call& call, const Fingerprint& mine) {
  Trials& trials = *trials_;
  if (call.segment != nullptr) call.chunk_bytes = call.most_chunk_bytes();
  if (!on_one_host()) HostsAgree(call, *between(1)[0], mine).wait();
  std::vector<double> times{us_since(trials.since), trials.spent_us};
  largest_of_all(call, times);
  const auto begin = Clock::now();
  const bool timed = times[1] + trials.expected_us <= trials.share * times[0];
  times.clear();
  if (timed) {
    const auto engine = inner(false);
    const auto time = [&](int in_a_row, const auto& run) {
      double best = 0;
      for (int round = 0; round < kRounds; ++round) {
        if (call.segment != nullptr) call.sync();  // all begin together
        const auto begun = Clock::now();
        for (int turn = 0; turn < in_a_row; ++turn) run();
        const double us = us_since(begun) / in_a_row;
        best = round == 0 ? us : std::min(best, us);
      }
      times.push_back(best);
    };
    uint64_t most = 2 * trials.copy_bytes;
    for (const Row& row : trials.rows) most = std::max(most, row.max_bytes);
    const at::Tensor values = at::zeros({static_cast<int64_t>(most / sizeof(float))}, at::kFloat);  // gloo holds it, whatever happens
    char* const data = static_cast<char*>(values.data_ptr());
    time(1, [&] { std::memcpy(data, data + trials.copy_bytes, trials.copy_bytes); });
    for (const Row& row : trials.rows) {
      const auto count = static_cast<int64_t>(row.max_bytes / sizeof(float));
      time(in_a_row(row, on_one_host()), [&] {
        if (row.algorithm == Algorithm::shared_memory) return all_reduce_on_host(call, data, count);
        const Backends over = row.algorithm == Algorithm::streams ? between(row.streams) : Backends{engine};
        Tensors parts = values.narrow(0, 0, count).chunk(over.size() > 1 ? 2 * over.size() : 1);
        std::vector<WorkPtr> works;
        for (size_t part = 0; part < parts.size(); ++part) {
          Tensors tensors{parts[part]};
          works.push_back(over[part % over.size()]->allreduce(tensors, c10d::AllreduceOptions()));
        }
        for (const WorkPtr& work : works) wait_for(work, call, "timing the connections,");
      });
    }
    largest_of_all(call, times);
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  trials.left -= timed;
  trials.spent_us += timed ? us_since(begin) : 0;
  trials.found = std::move(times);
  trials.pending = false;
}

// Each number becomes the largest of all ranks'.
void Backend::largest_of_all(Call& call, std::vector<double>& numbers) {
  if (on_one_host()) {
    const auto before = std::pair(call.dtype, call.reduce);
    call.dtype = Dtype::f64;
    call.reduce = Reduce::max;
    all_reduce_on_host(call, reinterpret_cast<char*>(numbers.data()), numbers.size());
    std::tie(call.dtype, call.reduce) = before;
    return;
  }
  c10d::AllreduceOptions options;
  options.reduceOp = c10d::ReduceOp::MAX;
  Tensors tensors{at::tensor(numbers, at::kDouble)};
  wait_for(inner(false)->allreduce(tensors, options), call, "timing the connections,");
  std::memcpy(numbers.data(), tensors[0].data_ptr(), numbers.size() * sizeof(double));
}

}  // namespace deepytorch
