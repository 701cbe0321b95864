// Numbering, announcement to the other ranks, queueing and running of calls: [Note: threads] and [Note: order] in backend.h,
// [Note: our locks and the interpreter's] in gil.h.
#include "work.h"

namespace deepytorch {

namespace {

Reduce reduction(RedOp op) { return op == RedOp::MIN ? Reduce::min : op == RedOp::MAX ? Reduce::max : Reduce::sum; }

}  // namespace

const char* title_of(Kind kind, bool as_gloo) {
  switch (kind) {
    case Kind::all_reduce: case Kind::all_reduce_coalesced: return as_gloo ? "gloo:all_reduce" : "deepytorch:all_reduce";
    case Kind::reduce_scatter: case Kind::reduce_scatter_coalesced: return as_gloo ? "gloo:reduce_scatter" : "deepytorch:reduce_scatter";
    case Kind::all_gather: case Kind::all_gather_coalesced: return as_gloo ? "gloo:all_gather" : "deepytorch:all_gather";
    case Kind::broadcast: return as_gloo ? "gloo:broadcast" : "deepytorch:broadcast";
    case Kind::gather: return as_gloo ? "gloo:gather" : "deepytorch:gather";
    case Kind::scatter: return as_gloo ? "gloo:scatter" : "deepytorch:scatter";
    case Kind::all_to_all: return as_gloo ? "gloo:all_to_all" : "deepytorch:all_to_all";
    case Kind::barrier: return as_gloo ? "gloo:barrier" : "deepytorch:barrier";
    default: return "deepytorch:collective";
  }
}

// Number the call and tell the ranks of this host what comes next. Lets go of the lock where they disagree.
Fingerprint Backend::announce(const Wanted& wanted, uint64_t plan, uint64_t shared, std::unique_lock<std::mutex>& lock) {
  Fingerprint made;
  made.sequence = ++sequence_;
  if (trials_ && sequence_ >= trials_->next) trial_is_due_ = true;
  made.count = wanted.count;
  made.root = wanted.root;
  made.kind = wanted.kind;
  made.reduce = static_cast<uint8_t>(wanted.reduce);
  made.dtype = static_cast<int8_t>(wanted.dtype);
  made.on_cuda = wanted.on_cuda;
  made.plan = plan;
  made.sizes = wanted.sizes;
  made.history = history_;
  made.shared = shared;
  history_ = made.digest();
  if (calls_[wanted.on_cuda]) calls_[wanted.on_cuda]->add(made);
  if (!setup_.segment) return made;
  try {
    setup_.segment->publish(made);
  } catch (const CommError& error) {
    lock.unlock();
    health_->poison(error.what());
    let_go();
    raise(error.what());
  }
  return made;
}

// See [Note: order]. `call` may run on another thread later, and must hold what it works on.
Backend::WorkPtr Backend::delegate(Wanted wanted, std::function<WorkPtr(c10d::Backend&)> call, Tensors outputs,
                                   Copied copied) {
  guard();
  const bool at_once = copied.given.empty() && (!wanted.prepares || !inner_is_at_work());
  std::unique_lock<std::mutex> lock(mutex_);
  if (wanted.on_cuda || (at_once && idle())) {
    const Fingerprint fingerprint = announce(wanted, 0, 0, lock);
    lock.unlock();
    auto work = call(*inner(wanted.on_cuda));
    if (wanted.on_cuda || !work) return work;
    remember(work);
    return c10::make_intrusive<DelegatedWork>(getRank(), fingerprint, std::move(work), health_);
  }
  lock.unlock();
  auto job = std::make_shared<Job>();
  job->own = false;
  job->timeout = std::min<std::chrono::milliseconds>(wanted.timeout.count() > 0 ? wanted.timeout : timeout_, kLongest);
  job->dtype = wanted.dtype;
  job->reduce = wanted.reduce;
  job->work = c10::make_intrusive<OwnWork>(getRank(), wanted.kind, nullptr, Tensors(), std::move(outputs), nullptr);
  job->caller.emplace();
  job->body = [this, call = std::move(call), copied = std::move(copied)](Call&, const Fingerprint& mine) {
    copied.fill();
    WorkPtr work;
    try {
      work = call(*inner(false));
    } catch (...) {
      throw Refused{std::current_exception()};
    }
    if (work) DelegatedWork(getRank(), mine, std::move(work), health_).wait(kNoTimeout);
    copied.give_back(mine.kind);
  };
  lock.lock();
  job->number(announce(wanted, 0, 0, lock));
  enqueue(job, lock);
  lock.unlock();
  changed_.notify_all();
  return job->work;
}

Backend::WorkPtr Backend::submit(Wanted wanted, std::function<void(Call&, const Fingerprint&)> body, Tensors outputs,
                                 bool async, std::shared_ptr<DeviceCopies> copies) {
  guard();
  auto job = std::make_shared<Job>();
  job->timeout = std::min<std::chrono::milliseconds>(wanted.timeout.count() > 0 ? wanted.timeout : timeout_, kLongest);
  job->dtype = wanted.dtype;
  job->reduce = wanted.reduce;
  job->body = std::move(body);
  if (!on_one_host()) job->kept = std::make_shared<Kept>(Kept{setup_.segment, outputs});
  Tensors shown;
  if (somebody_profiles()) shown = wanted.inputs.empty() ? outputs : wanted.inputs;
  job->work = c10::make_intrusive<OwnWork>(getRank(), wanted.kind, title_of(wanted.kind, as_gloo_), shown, std::move(outputs),
                                           std::move(copies));
  if (async) job->caller.emplace();
  bool here = false;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    here = !async && idle();
    if (!here && !job->caller) {  // one of our threads is to run it after all
      lock.unlock();
      job->caller.emplace();
      lock.lock();
    }
    const uint64_t shared = wanted.data != nullptr && setup_.segment ? shared_at(wanted.data, wanted.bytes) : 0;
    job->may_share = num_regions_ != 0;
    job->number(announce(wanted, plan_, shared, lock));
    if (here) busy_ = true;
    else enqueue(job, lock);
  }
  if (!here) {
    changed_.notify_all();
    return job->work;
  }
  execute(*job);
  bool awaited;  // else nobody is woken, which would be a system call
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    busy_ = false;
    awaited = !queue_.empty() || stopped_.load() || num_await_idle_ > 0;
  }
  if (awaited) changed_.notify_all();
  return job->work;
}

// Called with the lock, which it lets go of where it throws. The caller keeps a reference of his own.
void Backend::enqueue(const std::shared_ptr<Job>& job, std::unique_lock<std::mutex>& lock) {
  queue_.push_back(job);
  try {
    ensure_worker();
  } catch (const std::exception& error) {  // the others are told already that this collective comes
    queue_.pop_back();
    lock.unlock();
    health_->poison(std::string("no thread could be started for collectives: ") + error.what());
    raise(poison_message());
  }
}

void Backend::execute(Job& job) {
  std::exception_ptr error;
  try {
    if (poisoned()) throw CommError(poison_message());
    Call call{job.own ? setup_.segment.get() : nullptr, &stopped_, Clock::now() + job.timeout, job.fingerprint.sequence,
              job.fingerprint.kind, dtype_of(job.dtype), reduction(job.reduce),
              job.reduce == RedOp::AVG ? static_cast<double>(getSize()) : 1.0, 0, job.kept, health_.get()};
    if (any_handed_on_) wait_for_inner(call);
    if (call.segment != nullptr) {
      call.segment->begin(job.fingerprint);
      if (job.may_share) call.sync();  // ranks whose data may lie in shared memory begin together, and know of each other
    }
    {
      std::optional<at::ThreadLocalStateGuard> as_the_caller;
      if (job.caller) as_the_caller.emplace(*job.caller);
      try {
        job.body(call, job.fingerprint);
      } catch (const Refused& refused) {
        error = refused.why;
      }
    }
    if (call.segment != nullptr) {
      if (!call.checked) call.sync();
      call.segment->end(job.fingerprint.sequence);
    }
  } catch (const std::exception& failure) {
    if (dynamic_cast<const Timeout*>(&failure) != nullptr) health_->report();
    else health_->await_reason();
    health_->poison(failure.what());
    let_go();
    error = std::make_exception_ptr(
        c10::DistBackendError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, poison_message()));
  }
  job.body = nullptr;
  job.settled = job.work->end(error);
}

// Keeps one worker free for the queue: workers that run callbacks may wait there for a later collective.
void Backend::ensure_worker() {
  if (num_at_hand_ > 0) return;
  auto worker = std::make_shared<Worker>();
  ++num_at_hand_;
  try {
    worker->thread = std::thread([this, worker] { work_through(*worker); });
  } catch (...) {
    --num_at_hand_;
    throw;
  }
  workers_.push_back(std::move(worker));
}

void Backend::work_through(Worker& self) {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return !busy_ && (stopped_.load() || !queue_.empty()); });
    if (queue_.empty()) return;
    auto job = queue_.front();
    queue_.pop_front();
    busy_ = true;
    lock.unlock();
    execute(*job);  // fails at once where the group was destroyed
    lock.lock();
    busy_ = false;
    if (!job->settled) {
      lock.unlock();
      changed_.notify_all();
      job.reset();
      if (self.gone) return;
      lock.lock();
      continue;
    }
    --num_at_hand_;
    std::string failure;
    try {
      if (!queue_.empty()) ensure_worker();
    } catch (const std::exception& error) {  // then the queue waits until the callbacks have ended
      failure = error.what();
    }
    lock.unlock();
    changed_.notify_all();
    if (!failure.empty()) TORCH_WARN("no thread could be started for collectives: ", failure);
    try {
      std::optional<at::ThreadLocalStateGuard> as_the_caller;
      if (job->caller) as_the_caller.emplace(*job->caller);
      job->work->settle(*job->settled);
    } catch (const std::exception& error) {  // raised by the caller's callbacks
      TORCH_WARN("a callback of a collective failed: ", error.what());
    }
    job.reset();
    if (self.gone) return;  // the last reference to the group went in a callback: there is nothing left to look at
    lock.lock();
    ++num_at_hand_;
  }
}

// Remembers calls that were delegated to the inner backend for CPU tensors: the group's own calls wait for them.
void Backend::remember(const WorkPtr& work) {
  std::vector<WorkPtr> others;  // dropped without the lock: each may be the last reference
  const std::lock_guard<std::mutex> lock(mutex_);
  if (handed_on_.size() >= 64) {
    others.reserve(handed_on_.size());
    std::erase_if(handed_on_, [&](const auto& weak) {
      auto other = weak.lock();
      const bool ended = !other || other->isCompleted();
      if (other) others.push_back(std::move(other));
      return ended;
    });
  }
  handed_on_.emplace_back(work);
  any_handed_on_ = true;
}

// Whether a delegated call is still running in the inner backend for CPU tensors.
bool Backend::inner_is_at_work() const {
  if (!any_handed_on_) return false;
  std::vector<WorkPtr> works;  // dropped without the lock
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    works.reserve(handed_on_.size());
    for (const auto& weak : handed_on_) {
      if (auto work = weak.lock()) works.push_back(std::move(work));
    }
  }
  return std::any_of(works.begin(), works.end(), [](const WorkPtr& work) { return !work->isCompleted(); });
}

// Waits for the delegated calls that are still running in the inner backend for CPU tensors.
void Backend::wait_for_inner(const Call& call) {
  std::vector<WorkPtr> works;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& weak : handed_on_) {
      if (auto work = weak.lock()) works.push_back(std::move(work));
    }
    handed_on_.clear();
    any_handed_on_ = false;
  }
  for (const WorkPtr& work : works) {
    if (!work->isCompleted()) wait_for(work, call, "waiting for an earlier collective,");
  }
}

}  // namespace deepytorch
