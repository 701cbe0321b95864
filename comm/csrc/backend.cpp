#include "backend.h"

#include <ATen/Context.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/record_function.h>
#include <c10/util/Exception.h>
#include <pybind11/pybind11.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "checks.h"
#include "quantized.h"

namespace deepytorch {

namespace {

using RedOp = c10d::ReduceOp::RedOpType;

constexpr uint64_t kMostFedBack = 256;  // calls of one size in a step: without steps, memory would grow with every call
constexpr int64_t kLeastQuantized = 1 << 14;  // values: less is quickly sent
constexpr auto kLongest = std::chrono::hours(24 * 365);  // a deadline is a point in time, which has an end

// Without the interpreter's lock for as long as it lives: what this thread waits for may need it.
class WithoutGil {
 public:
  WithoutGil() { if (Py_IsInitialized() && PyGILState_Check()) released_.emplace(); }

 private:
  std::optional<pybind11::gil_scoped_release> released_;
};

bool is_float(at::ScalarType type) { return at::isFloatingType(type); }

Reduce reduction(RedOp op) { return op == RedOp::MIN ? Reduce::min : op == RedOp::MAX ? Reduce::max : Reduce::sum; }

bool somebody_profiles() { return at::hasCallbacks(); }

// What profilers show: as gloo's own operations where the group goes by that name.
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

bool in_memory(const Row& row) { return row.algorithm == Algorithm::shared_memory || row.algorithm == Algorithm::hierarchical; }

uint64_t sizes_of(const std::vector<at::Tensor>& tensors) {
  uint64_t found = tensors.size();
  for (const at::Tensor& tensor : tensors) found = mix(found + 1, tensor.numel());
  return found;
}

std::vector<at::Tensor> flat(const std::vector<at::Tensor>& tensors) { return tensors; }

std::vector<at::Tensor> flat(const std::vector<std::vector<at::Tensor>>& lists) {
  std::vector<at::Tensor> found;
  for (const auto& list : lists) found.insert(found.end(), list.begin(), list.end());
  return found;
}

size_t bytes_of(const at::Tensor& tensor) { return tensor.is_sparse() ? 0 : tensor.nbytes(); }

}  // namespace

class Backend::OwnWork final : public c10d::Work {
 public:
  // title: what profilers show, or null. inputs: whose shapes they show.
  OwnWork(int rank, const Fingerprint& fingerprint, const char* title, const Tensors& inputs, Tensors outputs,
          std::shared_ptr<DeviceCopies> copies)
      : Work(rank, op_type(fingerprint.kind), somebody_profiles() ? title : nullptr,
             somebody_profiles() && !inputs.empty() ? std::optional<Tensors>(inputs) : std::nullopt),
        outputs_(std::move(outputs)),
        copies_(std::move(copies)), sequence_(fingerprint.sequence) {}

  std::vector<at::Tensor> result() override { return outputs_; }
  uint64_t getSequencenumber() const override { return sequence_; }
  void abort() override { TORCH_CHECK(false, "a collective of the deepytorch backend is aborted with its group only"); }
  void synchronize() override { if (copies_) copies_->block_current_stream(); }

  // Settled without the lock: what waits on a future may run Python, whose own lock another caller may hold here.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    bool late;
    c10::intrusive_ptr<c10::ivalue::Future> future;
    {
      const std::lock_guard<std::mutex> lock(future_mutex_);
      late = !future_ && ended_;
      if (!future_) {
        std::vector<c10::Device> devices;
        if (!outputs_.empty() && !outputs_[0].is_cpu()) devices.push_back(outputs_[0].device());
        future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), devices);
      }
      future = future_;
    }
    if (late) settle(*future);
    return future;
  }

  // Returns the future that is to be settled, if anybody has asked for one.
  c10::intrusive_ptr<c10::ivalue::Future> end(std::exception_ptr error) {
    finish(error);
    const std::lock_guard<std::mutex> lock(future_mutex_);
    error_ = std::move(error);
    ended_ = true;
    return future_;
  }

  // Runs what was hung on the future.
  void settle(c10::ivalue::Future& future) const {
    if (error_) future.setError(error_);
    else future.markCompleted(c10::IValue(outputs_));
  }

 private:
  Tensors outputs_;
  std::shared_ptr<DeviceCopies> copies_;
  uint64_t sequence_;
  std::mutex future_mutex_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  bool ended_ = false;
  std::exception_ptr error_;
};

Dtype dtype_of(at::ScalarType type) {
  switch (type) {
    case at::kFloat: return Dtype::f32;
    case at::kDouble: return Dtype::f64;
    case at::kBFloat16: return Dtype::bf16;
    case at::kHalf: return Dtype::f16;
    case at::kChar: return Dtype::i8;
    case at::kByte: return Dtype::u8;
    case at::kInt: return Dtype::i32;
    case at::kLong: return Dtype::i64;
    default: return Dtype::bytes;
  }
}

const char* name_of(Algorithm algorithm) {
  static const char* const names[] = {"engine",     "shared_memory",   "hierarchical",    "streams",
                                      "cpu_reduce", "nvlink_one_shot", "nvlink_two_shot", "nvlink_multimem"};
  return names[static_cast<int>(algorithm)];
}

struct Backend::Wanted {
  Kind kind;
  at::ScalarType dtype = at::kByte;
  int64_t count = -1;
  RedOp reduce = RedOp::UNUSED;
  int root = -1;
  bool on_cuda = false;
  std::chrono::milliseconds timeout = c10d::kUnsetTimeout;
  uint64_t sizes = 0;
  Tensors inputs = {};  // for profilers, where they are not the outputs
  const void* data = nullptr;  // where the host may read it directly
  size_t bytes = 0;
};

struct Backend::Worker {
  std::thread thread;
  bool gone = false;  // read and written on that thread alone

  bool is_this() const { return thread.get_id() == std::this_thread::get_id(); }
};

struct Backend::Job {
  Fingerprint fingerprint;
  bool own = true;         // all ranks of the host run it together; else it only calls an inner backend
  bool may_share = false;  // whether memory was handed out before the call, alike on all ranks
  std::shared_ptr<Kept> kept;
  std::optional<at::ThreadLocalState> caller;  // of the calling thread, where another one runs it
  std::chrono::milliseconds timeout;
  at::ScalarType dtype;
  RedOp reduce;
  std::function<void(Call&, const Fingerprint&)> body;
  c10::intrusive_ptr<OwnWork> work;
  c10::intrusive_ptr<c10::ivalue::Future> settled;  // to be settled once it has run
};

Backend::Backend(Setup setup)
    : c10d::Backend(setup.rank, setup.size), setup_(std::move(setup)), timeout_(setup_.timeout_ms),
      health_(std::make_shared<Health>(setup_.segment)), changed_(*new std::condition_variable), process_(getpid()) {
  const auto& segment = setup_.segment;
  for (const uint64_t value : {static_cast<uint64_t>(setup_.num_hosts), segment ? segment->area_bytes() : 0,
                               segment ? static_cast<uint64_t>(segment->areas()) : 0}) {
    plan_ = mix(plan_ + 1, value);
  }
  if (setup_.store) {
    listener_ = std::make_unique<Listener>(health_, std::move(setup_.store),
                                           "rank " + std::to_string(setup_.rank) + " on host " + std::to_string(setup_.host),
                                           [this] { let_go(); });
  }
}

Backend::~Backend() {
  if (getpid() != process_) {  // a forked child has none of the threads: what they hold is left as it is
    (void)setup_.cpu.release();
    (void)setup_.cuda.release();
    for (auto& backend : setup_.between) (void)backend.release();
    (void)new auto(std::move(workers_));
    (void)listener_.release();
    return;  // `changed_` is left too: its destructor would wait for a thread of the parent
  }
  const bool on_worker = std::any_of(workers_.begin(), workers_.end(), [](const auto& worker) { return worker->is_this(); });
  shutdown();
  if (!on_worker) delete &changed_;
}

// ------------------------------------------------------------------ what to run

void Backend::set_one_shot_bytes(uint64_t bytes) {
  one_shot_bytes_ = bytes;
  plan_ = mix(plan_ + 1, bytes);
}

void Backend::set_table(Kind kind, bool on_cuda, bool fixed, std::vector<Row> rows) {
  for (const Row& row : rows) {
    for (const uint64_t value : {static_cast<uint64_t>(kind), static_cast<uint64_t>(on_cuda), static_cast<uint64_t>(fixed), row.max_bytes,
                                 static_cast<uint64_t>(row.algorithm), row.chunk_bytes, static_cast<uint64_t>(row.streams),
                                 static_cast<uint64_t>(row.wire)}) {
      plan_ = mix(plan_ + 1, value);
    }
  }
  table_[{kind, on_cuda, fixed}] = std::move(rows);
}

Row Backend::row(Kind kind, bool on_cuda, uint64_t bytes) const {
  const auto found = table_.find({kind, on_cuda, at::globalContext().deterministicAlgorithms()});
  if (found != table_.end()) {
    for (const Row& row : found->second) {
      if (bytes <= row.max_bytes) return row;
    }
  }
  return {UINT64_MAX, Algorithm::engine, 0, 1, Wire::exact};
}

bool Backend::accelerates(Kind kind, at::ScalarType dtype, RedOp reduce) const {
  if (kind == Kind::all_gather || kind == Kind::broadcast) return true;
  if (dtype_of(dtype) == Dtype::bytes) return false;
  return reduce == RedOp::SUM || reduce == RedOp::MIN || reduce == RedOp::MAX || (reduce == RedOp::AVG && is_float(dtype));
}

c10::intrusive_ptr<c10d::Backend> Backend::engine_of(bool on_cuda) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return on_cuda ? setup_.cuda : setup_.cpu;
}

c10::intrusive_ptr<c10d::Backend> Backend::inner(bool on_cuda) const {
  if (const auto found = engine_of(on_cuda)) return found;
  if (poisoned()) raise(poison_message());
  raise(on_cuda ? "this process group has no inner backend for CUDA tensors: it was made where none is available; expected "
                  "CPU tensors, or a machine with NCCL and a GPU for every rank"
                : "this process group has no inner backend for CPU tensors");
}

Backends Backend::between(int streams) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto num = std::min<size_t>(std::max(streams, 1), setup_.between.size());
  if (num == 0) throw CommError("this process group has no connections between hosts");
  return Backends(setup_.between.begin(), setup_.between.begin() + static_cast<int64_t>(num));
}

void Backend::guard() const {
  if (getpid() != process_) {
    raise("this process was forked after its process group was made, and has none of its threads; expected the group to "
          "be made in the process that uses it: call init_process_group in the child, or start it with spawn");
  }
  if (poisoned()) raise("this process group is of no use after an earlier error: " + poison_message());
  if (stopped_.load()) raise("this process group was destroyed; expected a group made by init_process_group or new_group");
}

// ------------------------------------------------------------------ memory that is shared

at::Tensor Backend::adopt(const std::shared_ptr<Segment>& region) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::erase_if(regions_, [](const auto& entry) { return entry.second.expired(); });
  regions_.emplace_back(++num_regions_, region);
  return at::from_blob(
      region->area(0, region->rank()), {static_cast<int64_t>(region->area_bytes())}, [region](void*) {},
      at::TensorOptions().dtype(at::kByte));
}

// Which region and where in it: (region << 44) | offset, or 0.
uint64_t Backend::shared_at(const void* data, size_t bytes) const {
  for (const auto& [number, held] : regions_) {
    if (const auto region = held.lock()) {
      const char* begin = region->area(0, region->rank());
      const char* at = static_cast<const char*>(data);
      if (at >= begin && at + bytes <= begin + region->area_bytes()) return (number << 44) | static_cast<uint64_t>(at - begin);
    }
  }
  return 0;
}

std::vector<char*> Backend::peers(uint64_t shared) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [number, held] : regions_) {
    const auto region = held.lock();
    if (number != shared >> 44 || !region) continue;
    std::vector<char*> found;
    for (int rank = 0; rank < region->num_ranks(); ++rank) found.push_back(region->area(0, rank) + (shared & ((1ull << 44) - 1)));
    return found;
  }
  raise("memory of a collective was freed while it ran");
}

// ------------------------------------------------------------------ running

// Number the call and tell the ranks of this host what comes next. Lets go of the lock where they disagree.
Fingerprint Backend::announce(const Wanted& wanted, uint64_t plan, uint64_t shared, std::unique_lock<std::mutex>& lock) {
  Fingerprint made;
  made.sequence = ++sequence_;
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
                                   CopiedOutputs copied) {
  guard();
  std::unique_lock<std::mutex> lock(mutex_);
  const Fingerprint fingerprint = announce(wanted, 0, 0, lock);
  if (wanted.on_cuda || (!busy_ && queue_.empty())) {
    lock.unlock();
    auto work = call(*inner(wanted.on_cuda));
    if (wanted.on_cuda || !work) return work;
    lock.lock();
    if (handed_on_.size() >= 64) {
      std::erase_if(handed_on_, [](const auto& weak) {
        const auto other = weak.lock();
        return !other || other->isCompleted();
      });
    }
    handed_on_.emplace_back(work);
    any_handed_on_ = true;
    lock.unlock();
    return c10::make_intrusive<DelegatedWork>(getRank(), fingerprint, std::move(work), health_, std::move(copied));
  }
  auto job = std::make_shared<Job>();
  job->own = false;
  job->fingerprint = fingerprint;
  job->timeout = std::min<std::chrono::milliseconds>(wanted.timeout.count() > 0 ? wanted.timeout : timeout_, kLongest);
  job->dtype = wanted.dtype;
  job->reduce = wanted.reduce;
  job->kept = std::make_shared<Kept>();
  job->work = c10::make_intrusive<OwnWork>(getRank(), fingerprint, nullptr, Tensors(), std::move(outputs), nullptr);
  job->body = [this, call = std::move(call), copied = std::move(copied)](Call&, const Fingerprint& mine) {
    auto work = call(*inner(false));
    if (work) DelegatedWork(getRank(), mine, std::move(work), health_, copied).wait(kNoTimeout);
  };
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
  bool here = false;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    const uint64_t shared = wanted.data != nullptr && setup_.segment ? shared_at(wanted.data, wanted.bytes) : 0;
    job->may_share = num_regions_ != 0;
    job->kept = std::make_shared<Kept>(Kept{setup_.segment, outputs});
    job->fingerprint = announce(wanted, plan_, shared, lock);
    Tensors shown;
    if (somebody_profiles()) shown = wanted.inputs.empty() ? outputs : wanted.inputs;
    job->work = c10::make_intrusive<OwnWork>(getRank(), job->fingerprint, title_of(wanted.kind, as_gloo_), shown,
                                             std::move(outputs), std::move(copies));
    here = !async && !busy_ && queue_.empty();
    if (here) busy_ = true;
    else enqueue(job, lock);
  }
  if (here) {
    execute(*job);
    const std::lock_guard<std::mutex> lock(mutex_);
    busy_ = false;
  }
  changed_.notify_all();
  return job->work;
}

// Called with the lock, which it lets go of where it throws.
void Backend::enqueue(std::shared_ptr<Job> job, std::unique_lock<std::mutex>& lock) {
  job->caller.emplace();
  queue_.push_back(std::move(job));
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
              job.reduce == RedOp::AVG ? static_cast<double>(getSize()) : 1.0, 0, job.kept};
    if (any_handed_on_) wait_for_inner(call);
    if (call.segment != nullptr) {
      call.segment->begin(job.fingerprint);
      if (job.may_share) call.sync();  // ranks whose data may lie in shared memory begin together, and know of each other
    }
    {
      std::optional<at::ThreadLocalStateGuard> as_the_caller;
      if (job.caller) as_the_caller.emplace(*job.caller);
      job.body(call, job.fingerprint);
    }
    if (call.segment != nullptr) {
      if (!call.checked) call.sync();
      call.segment->end(job.fingerprint.sequence);
    }
  } catch (const std::exception& failure) {
    if (dynamic_cast<const Timeout*>(&failure) != nullptr) health_->report();
    health_->poison(failure.what());
    let_go();
    error = std::make_exception_ptr(
        c10::DistBackendError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, poison_message()));
  }
  job.body = nullptr;
  job.settled = job.work->end(error);
}

// One worker is at hand for what is queued: those that run callbacks may wait there for a later collective.
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
      changed_.notify_all();
      continue;
    }
    --num_at_hand_;
    std::string failure;
    try {
      if (!queue_.empty()) ensure_worker();
    } catch (const std::exception& error) {  // then what is queued waits until the callbacks have ended
      failure = error.what();
    }
    lock.unlock();
    changed_.notify_all();
    if (!failure.empty()) TORCH_WARN("no thread could be started for collectives: ", failure);
    try {
      std::optional<at::ThreadLocalStateGuard> as_the_caller;
      if (job->caller) as_the_caller.emplace(*job->caller);
      job->work->settle(*job->settled);
    } catch (const std::exception& error) {  // of what the caller has hung on the future
      TORCH_WARN("a callback of a collective failed: ", error.what());
    }
    job.reset();
    if (self.gone) return;  // the last reference to the group went in a callback: there is nothing left to look at
    lock.lock();
    ++num_at_hand_;
  }
}

void Backend::shutdown() {
  if (getpid() != process_) return;
  const WithoutGil unlocked;
  listener_.reset();
  for (;;) {  // one of them may start another one as it ends
    std::vector<std::shared_ptr<Worker>> workers;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stopped_ = true;
      workers.swap(workers_);
    }
    if (workers.empty()) break;
    changed_.notify_all();
    for (const auto& worker : workers) {
      if (!worker->is_this()) {
        worker->thread.join();
      } else {  // the group ends in a callback of its own
        worker->gone = true;
        worker->thread.detach();
      }
    }
  }
  let_go();
}

void Backend::abort() {
  if (getpid() != process_) return;
  health_->poison("the process group was aborted by this rank (" + std::to_string(getRank()) + ")");
  stopped_ = true;
  for (const bool on_cuda : {false, true}) {
    if (const auto engine = engine_of(on_cuda)) engine->abort();
  }
  let_go();
}

void Backend::let_go() {
  auto held = std::make_unique<Setup>();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    held->cpu = std::move(setup_.cpu);
    held->cuda = std::move(setup_.cuda);
    held->between = std::move(setup_.between);
    setup_.between.clear();
  }
  if (!held->cpu && !held->cuda && held->between.empty()) return;
  try {
    if (poisoned()) {  // something may be stuck in them
      // torch holds this one too, on one host, and would wait for what is stuck in it: it is never ended.
      if (on_one_host()) (void)held->cpu.release();
      Setup* const rest = held.release();
      std::thread([rest] { delete rest; }).detach();
    } else {
      const WithoutGil unlocked;
      if (held->cpu) held->cpu->shutdown();
      if (held->cuda) held->cuda->shutdown();
      held.reset();
    }
  } catch (const std::exception& error) {
    TORCH_WARN("an inner backend did not shut down: ", error.what());
  }
}

// ------------------------------------------------------------------ collectives that are accelerated

void Backend::run_all_reduce(Call& call, const Fingerprint& mine, char* data, Copies* copies, size_t count, const Row& row,
                             const std::string& key) {
  Segment* segment = setup_.segment.get();
  const size_t bytes = count * element_size(call.dtype);
  call.chunk_bytes = row.chunk_bytes != 0 ? row.chunk_bytes : segment != nullptr ? segment->area_bytes() : (bytes + 63) / 64 * 64;
  if (copies == nullptr && setup_.num_hosts == 1 && call.checked && segment->all_shared()) {
    const auto addresses = peers(mine.shared);
    return all_reduce_in_place(call, addresses.data(), count);
  }
  if (copies == nullptr && setup_.num_hosts == 1) {
    return bytes <= one_shot_bytes_ ? all_reduce_one_shot(call, data, count) : all_reduce_two_shot(call, data, count);
  }
  HostCopies plain(data);
  Copies& payload = copies != nullptr ? *copies : plain;
  if (setup_.num_hosts == 1) return all_reduce_through(call, payload, count, nullptr);

  const Backends streams = between(row.streams);
  HostsAgree agree(call, *streams[0], mine);
  Wire wire = row.wire;
  const bool half = call.dtype == Dtype::bf16 || call.dtype == Dtype::f16;
  const bool floating = half || call.dtype == Dtype::f32;
  // A ring of half-precision sums would round at every hop.
  if (half && wire != Wire::fp8) wire = call.dtype == Dtype::bf16 ? Wire::bf16 : Wire::f16;
  if (wire == Wire::exact || !floating || call.reduce != Reduce::sum) {
    const int room = segment != nullptr ? segment->areas() - areas_needed(0, copies != nullptr) : 16;
    Ring ring(call, streams, std::max(1, std::min(room, std::max(2, row.streams))), &agree);
    return all_reduce_through(call, payload, count, &ring);
  }
  const size_t room = std::min<size_t>(call.chunk_bytes, segment ? segment->area_bytes() : SIZE_MAX) / element_size(call.dtype);
  Residual* residual = nullptr;
  if (!key.empty()) {
    residual = &residuals_[key];
    if (residual->count != count) *residual = {{}, {}, 0, count};  // another payload than before
  }
  Exchange exchange(call, streams, setup_.num_hosts, setup_.host, wire, &agree, residual, room, &overflows_);
  all_reduce_through(call, payload, count, &exchange);
}

Backend::WorkPtr Backend::reduce_all(at::Tensor& tensor, Wanted wanted, Row row, const std::string& key, bool async,
                                     Tensors outputs) {
  if (row.algorithm == Algorithm::cpu_reduce) {
    if (wanted.on_cuda && pin_) std::exchange(pin_, nullptr)();
    auto copies = std::make_shared<DeviceCopies>(tensor);
    const size_t count = tensor.numel();
    return submit(
        wanted, [this, copies, count, row, key](Call& call, const Fingerprint& mine) {
          run_all_reduce(call, mine, nullptr, copies.get(), count, row, key);
          copies->finish();
        },
        std::move(outputs), async, copies);
  }
  if (tensor.is_contiguous()) {
    wanted.data = tensor.data_ptr();
    wanted.bytes = tensor.nbytes();
  }
  return submit(
      wanted, [this, tensor, row, key](Call& call, const Fingerprint& mine) {
        const at::Tensor whole = tensor.contiguous();
        if (!whole.is_same(tensor)) call.kept->tensors.push_back(whole);
        run_all_reduce(call, mine, static_cast<char*>(whole.data_ptr()), nullptr, whole.numel(), row, key);
        if (!whole.is_same(tensor)) at::Tensor(tensor).copy_(whole);
      },
      std::move(outputs), async);
}

// By torch's symmetric-memory kernels, on the caller's stream: nothing is left to wait for but that stream.
Backend::WorkPtr Backend::symmetric(at::Tensor& tensor, Wanted wanted, Row row) {
  guard();
  Fingerprint fingerprint;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    fingerprint = announce(wanted, plan_, 0, lock);
  }
  symmetric_(name_of(row.algorithm), tensor);
  auto work = c10::make_intrusive<OwnWork>(getRank(), fingerprint, title_of(wanted.kind, as_gloo_), Tensors{tensor},
                                           Tensors{tensor}, nullptr);
  (void)work->end(nullptr);
  return work;
}

Backend::WorkPtr Backend::allreduce(Tensors& given_tensors, const c10d::AllreduceOptions& options) {
  auto tensors = each(given_tensors, alias_of);
  TORCH_CHECK(tensors.size() == 1, "all_reduce takes one tensor, found ", tensors.size());
  at::Tensor tensor = tensors[0];
  Wanted wanted{Kind::all_reduce, tensor.scalar_type(), tensor.numel(), options.reduceOp, -1, tensor.is_cuda(), options.timeout};
  if (tensor.is_sparse()) {
    return delegate(wanted, [tensors, options](c10d::Backend& engine) mutable { return engine.allreduce(tensors, options); }, tensors);
  }
  const Row row = this->row(Kind::all_reduce, wanted.on_cuda, tensor.nbytes());
  const bool able = accelerates(wanted.kind, wanted.dtype, wanted.reduce);
  const bool through_symmetric = row.algorithm >= Algorithm::nvlink_one_shot;
  if (through_symmetric && symmetric_ && tensor.is_contiguous() && wanted.reduce == RedOp::SUM &&
      (wanted.dtype == at::kFloat || wanted.dtype == at::kBFloat16) && tensor.nbytes() % 16 == 0) {
    return symmetric(tensor, wanted, row);
  }
  const bool through_host = row.algorithm == Algorithm::cpu_reduce && tensor.is_contiguous();
  const bool in_host_memory = !wanted.on_cuda && row.algorithm >= Algorithm::shared_memory && row.algorithm <= Algorithm::streams;
  if (able && (through_host || in_host_memory)) {
    return reduce_all(tensor, wanted, row, "", options.asyncOp, tensors);
  }
  check_gloo_reduces(wanted.kind, tensor, wanted.reduce);
  CopiedOutputs copied;
  const Tensors outputs = tensors;
  tensors = each(tensors, copied);
  if (able && !wanted.on_cuda && wanted.reduce == RedOp::AVG) {  // gloo averages after the sum, which half types may not hold
    c10d::AllreduceOptions sum = options;
    sum.reduceOp = c10d::ReduceOp::SUM;
    const auto call = [tensors, sum, size = getSize()](c10d::Backend& engine) mutable {
      tensors[0].div_(size);
      return engine.allreduce(tensors, sum);
    };
    return delegate(wanted, call, outputs, std::move(copied));
  }
  const auto call = [tensors, options](c10d::Backend& engine) mutable { return engine.allreduce(tensors, options); };
  return delegate(wanted, call, outputs, std::move(copied));
}

Backend::WorkPtr Backend::allreduce_compressed(at::Tensor& given_tensor, RedOp reduce, Wire wire, const std::string& key,
                                               bool async) {
  auto tensor = alias_of(given_tensor);
  TORCH_CHECK(tensor.is_cpu() && tensor.is_contiguous() && (reduce == RedOp::SUM || reduce == RedOp::AVG) &&
                  (tensor.scalar_type() == at::kFloat || tensor.scalar_type() == at::kBFloat16 || tensor.scalar_type() == at::kHalf),
              "compression takes contiguous CPU tensors of float32, bfloat16 or float16 and the reductions SUM and AVG");
  if (setup_.num_hosts > 1 && !poisoned()) (void)between(1);  // the same answer on all ranks, before they are told
  Wanted wanted{Kind::all_reduce, tensor.scalar_type(), tensor.numel(), reduce, -1, false};
  Row row = this->row(Kind::all_reduce, false, tensor.nbytes());
  if (row.algorithm == Algorithm::engine) row = {0, Algorithm::hierarchical, 1 << 20, 1, wire};
  row.wire = wire;
  wanted.root = static_cast<int>(wire);  // ranks that compress differently disagree
  return reduce_all(tensor, wanted, row, key, async, {tensor});
}

Backend::WorkPtr Backend::allreduce_coalesced(Tensors& given_tensors, const c10d::AllreduceCoalescedOptions& options) {
  auto tensors = each(given_tensors, alias_of);
  TORCH_CHECK(!tensors.empty(), "all_reduce_coalesced takes at least one tensor");
  Wanted wanted{Kind::all_reduce_coalesced, tensors[0].scalar_type(), 0, options.reduceOp, -1, tensors[0].is_cuda(), options.timeout};
  wanted.sizes = sizes_of(tensors);
  size_t bytes = 0;
  bool alike = true;
  for (const at::Tensor& tensor : tensors) {
    wanted.count += tensor.numel();
    bytes += bytes_of(tensor);
    alike = alike && tensor.scalar_type() == wanted.dtype && !tensor.is_sparse() && tensor.is_cuda() == wanted.on_cuda;
  }
  const Row row = this->row(Kind::all_reduce, wanted.on_cuda, bytes);
  if (!alike || wanted.on_cuda || row.algorithm == Algorithm::engine || !accelerates(Kind::all_reduce, wanted.dtype, wanted.reduce)) {
    for (const at::Tensor& tensor : tensors) {
      if (!wanted.on_cuda) check_same_kind(wanted.kind, tensor, tensors[0]);
      check_gloo_reduces(wanted.kind, tensor, wanted.reduce);
    }
    CopiedOutputs copied;
    const Tensors outputs = tensors;
    tensors = each(tensors, copied);
    const auto call = [tensors, options](c10d::Backend& engine) mutable { return engine.allreduce_coalesced(tensors, options); };
    return delegate(wanted, call, outputs, std::move(copied));
  }
  return submit(
      wanted, [this, tensors, row](Call& call, const Fingerprint& mine) {
        Tensors flat;
        for (const at::Tensor& tensor : tensors) flat.push_back(tensor.reshape({-1}));
        const at::Tensor whole = at::cat(flat);
        call.kept->tensors.push_back(whole);
        run_all_reduce(call, mine, static_cast<char*>(whole.data_ptr()), nullptr, whole.numel(), row, "");
        int64_t at = 0;
        for (at::Tensor tensor : tensors) {
          tensor.copy_(whole.narrow(0, at, tensor.numel()).view(tensor.sizes()));
          at += tensor.numel();
        }
      },
      tensors, options.asyncOp);
}

// reduce_scatter or all_gather, whichever the call is.
void Backend::over_hosts(Call& call, const Fingerprint& mine, const Row& row, const at::Tensor& input, const at::Tensor& output) {
  const Backends streams = between(row.streams);
  HostsAgree agree(call, *streams[0], mine);
  const Hosts hosts{streams, setup_.num_hosts, setup_.ranks, agree};
  const int depth = std::min(call.segment->areas() - 1, std::max(2, row.streams));
  if (call.kind == Kind::reduce_scatter) {
    reduce_scatter_between(call, hosts, depth, input.data_ptr(), output.data_ptr(), output.numel());
  } else {
    all_gather_between(call, hosts, depth, input.data_ptr(), output.data_ptr(), input.nbytes());
  }
}

Backend::WorkPtr Backend::_reduce_scatter_base(at::Tensor& given_output, at::Tensor& given_input,
                                               const c10d::ReduceScatterOptions& options) {
  auto output = alias_of(given_output);
  auto input = alias_of(given_input);
  TORCH_CHECK(input.numel() == output.numel() * getSize() && input.scalar_type() == output.scalar_type(),
              "reduce_scatter_tensor: found an input of ", input.numel(), " elements (", input.scalar_type(),
              ") and an output of ", output.numel(), " (", output.scalar_type(), "); expected one dtype and an input of ",
              getSize(), " times the output");
  if (quantizes(input) && output.is_contiguous() && (options.reduceOp == RedOp::SUM || options.reduceOp == RedOp::AVG)) {
    std::unique_lock<std::mutex> lock(mutex_);
    const uint64_t number = scattered_[input.numel()]++;
    const std::string key =
        number < kMostFedBack ? "call " + std::to_string(number) + " of " + std::to_string(input.numel()) : "";
    lock.unlock();
    return reduce_scatter_quantized(output, input, options.reduceOp, quantize_, key, options.asyncOp);
  }
  Wanted wanted{Kind::reduce_scatter, input.scalar_type(), input.numel(), options.reduceOp, -1, input.is_cuda(), options.timeout};
  const Row row = this->row(wanted.kind, wanted.on_cuda, input.nbytes());
  if (wanted.on_cuda || !in_memory(row) || !accelerates(wanted.kind, wanted.dtype, wanted.reduce)) {
    check_gloo_reduces(wanted.kind, input, wanted.reduce);
    CopiedOutputs copied;
    at::Tensor target = copied(output), source = in_a_row(input);
    c10d::ReduceScatterOptions adapted = options;
    const bool divide = !wanted.on_cuda && wanted.reduce == RedOp::AVG && is_float(wanted.dtype);
    if (divide) adapted.reduceOp = c10d::ReduceOp::SUM;
    const auto call = [target, source, adapted, divide, size = getSize()](c10d::Backend& engine) mutable {
      if (divide) source = source.div(size);
      return engine._reduce_scatter_base(target, source, adapted);
    };
    return delegate(wanted, call, {output}, std::move(copied));
  }
  if (input.is_contiguous()) {
    wanted.data = input.data_ptr();
    wanted.bytes = input.nbytes();
  }
  return submit(
      wanted, [this, input, output, row](Call& call, const Fingerprint& mine) {
        const at::Tensor from = input.contiguous(), to = output.contiguous();
        if (!on_one_host()) call.kept->tensors.insert(call.kept->tensors.end(), {from, to});
        const size_t count = to.numel();
        call.chunk_bytes = row.chunk_bytes != 0 ? row.chunk_bytes : call.segment->area_bytes();
        if (row.algorithm == Algorithm::hierarchical) {
          over_hosts(call, mine, row, from, to);
        } else if (call.checked && call.segment->all_shared()) {
          reduce_scatter_in_place(call, peers(mine.shared).data(), to.data_ptr(), count);
        } else {
          std::vector<const char*> inputs(getSize());
          for (int rank = 0; rank < getSize(); ++rank) inputs[rank] = static_cast<const char*>(from.data_ptr()) + rank * to.nbytes();
          deepytorch::reduce_scatter(call, inputs.data(), to.data_ptr(), count);
        }
        if (!to.is_same(output)) at::Tensor(output).copy_(to);
      },
      {output}, options.asyncOp);
}

Backend::WorkPtr Backend::_allgather_base(at::Tensor& given_output, at::Tensor& given_input, const c10d::AllgatherOptions& options) {
  auto output = alias_of(given_output);
  auto input = alias_of(given_input);
  TORCH_CHECK(output.numel() == input.numel() * getSize() && input.scalar_type() == output.scalar_type(),
              "all_gather_into_tensor: found an input of ", input.numel(), " elements (", input.scalar_type(),
              ") and an output of ", output.numel(), " (", output.scalar_type(), "); expected one dtype and an output of ",
              getSize(), " times the input");
  if (quantizes(output) && input.is_contiguous()) return all_gather_quantized(output, input, quantize_, options.asyncOp);
  Wanted wanted{Kind::all_gather, input.scalar_type(), input.numel(), RedOp::UNUSED, -1, input.is_cuda(), options.timeout};
  const Row row = this->row(wanted.kind, wanted.on_cuda, output.nbytes());
  if (wanted.on_cuda || !in_memory(row)) {
    check_gloo_moves(wanted.kind, input);
    CopiedOutputs copied;
    at::Tensor target = copied(output), source = in_a_row(input);
    const auto call = [target, source, options](c10d::Backend& engine) mutable {
      return engine._allgather_base(target, source, options);
    };
    return delegate(wanted, call, {output}, std::move(copied));
  }
  if (input.is_contiguous()) {
    wanted.data = input.data_ptr();
    wanted.bytes = input.nbytes();
  }
  return submit(
      wanted, [this, input, output, row](Call& call, const Fingerprint& mine) {
        const at::Tensor from = input.contiguous(), to = output.contiguous();
        if (!on_one_host()) call.kept->tensors.insert(call.kept->tensors.end(), {from, to});
        call.chunk_bytes = row.chunk_bytes != 0 ? row.chunk_bytes : call.segment->area_bytes() * call.segment->num_ranks();
        if (row.algorithm == Algorithm::hierarchical) {
          over_hosts(call, mine, row, from, to);
        } else if (call.checked && call.segment->all_shared()) {
          all_gather_in_place(call, peers(mine.shared).data(), to.data_ptr(), from.nbytes());
        } else {
          std::vector<char*> outputs(getSize());
          for (int rank = 0; rank < getSize(); ++rank) outputs[rank] = static_cast<char*>(to.data_ptr()) + rank * from.nbytes();
          all_gather(call, from.data_ptr(), outputs.data(), from.nbytes());
        }
        if (!to.is_same(output)) at::Tensor(output).copy_(to);
      },
      {output}, options.asyncOp);
}

void Backend::set_quantize(Wire wire) {
  quantize_ = wire;
  plan_ = mix(plan_ + 1, static_cast<uint64_t>(wire));
}

void Backend::mark_step() {
  const std::lock_guard<std::mutex> lock(mutex_);
  scattered_.clear();
}

bool Backend::quantizes(const at::Tensor& tensor) const {
  return quantize_ != Wire::exact && tensor.is_cpu() && tensor.is_contiguous() && tensor.numel() >= kLeastQuantized &&
         (tensor.scalar_type() == at::kFloat || tensor.scalar_type() == at::kBFloat16 || tensor.scalar_type() == at::kHalf);
}

Backend::WorkPtr Backend::reduce_scatter_quantized(at::Tensor& given_output, at::Tensor& given_input, RedOp reduce, Wire wire,
                                                   const std::string& key, bool async) {
  auto output = alias_of(given_output), input = alias_of(given_input);
  if (!poisoned()) (void)between(1);  // the same answer on all ranks, before they are told
  Wanted wanted{Kind::reduce_scatter, input.scalar_type(), input.numel(), reduce, static_cast<int>(wire), false};
  const Row row = this->row(wanted.kind, false, input.nbytes());
  return submit(
      wanted, [this, input, output, row, wire, key](Call& call, const Fingerprint& mine) {
        const size_t count = output.numel();
        const Backends streams = between(row.streams);
        HostsAgree agree(call, *streams[0], mine);
        std::vector<float>* residual = nullptr;
        if (!key.empty()) {
          residual = &scattered_residuals_[key];
          if (residual->size() != count * setup_.num_hosts) residual->assign(count * setup_.num_hosts, 0.0f);
        }
        deepytorch::reduce_scatter_quantized(call, Hosts{streams, setup_.num_hosts, setup_.ranks, agree}, setup_.host,
                                             Codec(wire), residual, &overflows_, input.data_ptr(), output.data_ptr(), count);
      },
      {output}, async);
}

Backend::WorkPtr Backend::all_gather_quantized(at::Tensor& given_output, at::Tensor& given_input, Wire wire, bool async) {
  auto output = alias_of(given_output), input = alias_of(given_input);
  if (!poisoned()) (void)between(1);
  Wanted wanted{Kind::all_gather, input.scalar_type(), input.numel(), RedOp::UNUSED, static_cast<int>(wire), false};
  const Row row = this->row(wanted.kind, false, output.nbytes());
  return submit(
      wanted, [this, input, output, row, wire](Call& call, const Fingerprint& mine) {
        call.chunk_bytes = row.chunk_bytes != 0 || !call.segment ? row.chunk_bytes : call.segment->area_bytes() * setup_.ranks.size();
        const Backends streams = between(row.streams);
        HostsAgree agree(call, *streams[0], mine);
        deepytorch::all_gather_quantized(call, Hosts{streams, setup_.num_hosts, setup_.ranks, agree}, Codec(wire), &overflows_,
                                         input.data_ptr(), output.data_ptr(), input.numel());
      },
      {output}, async);
}

Backend::WorkPtr Backend::broadcast(Tensors& given_tensors, const c10d::BroadcastOptions& options) {
  auto tensors = each(given_tensors, alias_of);
  TORCH_CHECK(tensors.size() == 1, "broadcast takes one tensor, found ", tensors.size());
  at::Tensor tensor = tensors[0];
  Wanted wanted{Kind::broadcast, tensor.scalar_type(), tensor.numel(), RedOp::UNUSED, static_cast<int>(options.rootRank),
                tensor.is_cuda(), options.timeout};
  const Row row = this->row(wanted.kind, wanted.on_cuda, bytes_of(tensor));
  check_root(wanted.kind, options.rootRank, getSize());
  if (wanted.on_cuda || row.algorithm != Algorithm::shared_memory || tensor.is_sparse()) {
    check_gloo_moves(wanted.kind, tensor);
    CopiedOutputs copied;
    const Tensors outputs = tensors;
    tensors = each(tensors, copied);
    const auto call = [tensors, options](c10d::Backend& engine) mutable { return engine.broadcast(tensors, options); };
    return delegate(wanted, call, outputs, std::move(copied));
  }
  return submit(
      wanted, [tensor, row, root = static_cast<int>(options.rootRank)](Call& call, const Fingerprint&) {
        call.chunk_bytes = row.chunk_bytes != 0 ? row.chunk_bytes : call.segment->area_bytes();
        const at::Tensor whole = tensor.contiguous();
        deepytorch::broadcast(call, whole.data_ptr(), whole.nbytes(), root);
        if (!whole.is_same(tensor) && call.segment->rank() != root) at::Tensor(tensor).copy_(whole);
      },
      tensors, options.asyncOp);
}

// ------------------------------------------------------------------ what only moves data

// Whether the ranks are of one host and move a call's bytes through the segment.
bool Backend::moves_itself(const Wanted& wanted) const {
  return setup_.exchanges && !wanted.on_cuda && setup_.segment && setup_.num_hosts == 1;
}

// sent, received: for each rank a tensor, undefined for none.
Backend::WorkPtr Backend::exchange_parts(Wanted wanted, Tensors sent, Tensors received, Tensors outputs, bool async) {
  return submit(
      wanted, [sent = std::move(sent), received = std::move(received)](Call& call, const Fingerprint&) {
        const auto parts_of = [](const Tensors& tensors, Tensors& whole) {
          std::vector<Part> parts;
          for (const at::Tensor& tensor : tensors) {
            whole.push_back(tensor.defined() ? tensor.contiguous() : tensor);
            parts.push_back(tensor.defined() ? Part{static_cast<char*>(whole.back().data_ptr()), whole.back().nbytes()} : Part());
          }
          return parts;
        };
        Tensors from, to;
        const auto parts = parts_of(sent, from);
        exchange(call, parts, parts_of(received, to));
        for (size_t index = 0; index < to.size(); ++index) {
          if (to[index].defined() && !to[index].is_same(received[index])) at::Tensor(received[index]).copy_(to[index]);
        }
      },
      std::move(outputs), async);
}

Backend::WorkPtr Backend::gather(TensorLists& given_outputs, Tensors& given_inputs, const c10d::GatherOptions& options) {
  const at::Tensor& first = first_of(given_inputs, Kind::gather);
  check_root(Kind::gather, options.rootRank, getSize());
  const bool is_root = getRank() == options.rootRank;
  TORCH_CHECK(given_outputs.size() == (is_root ? 1 : 0), "gather: found ", given_outputs.size(),
              " lists of outputs on rank ", getRank(), "; expected one on the root and none elsewhere");
  if (is_root && first.is_cpu()) check_parts(Kind::gather, given_outputs[0], first, getSize(), "output");
  Wanted wanted{Kind::gather, first.scalar_type(), first.is_cuda() ? -1 : first.numel(), RedOp::UNUSED,
                static_cast<int>(options.rootRank), first.is_cuda(), options.timeout};
  if (!moves_itself(wanted)) {
    check_gloo_moves(wanted.kind, first);
    return hand_on(wanted, given_outputs, given_inputs,
                   [options](auto& engine, auto& out, auto& in) { return engine.gather(out, in, options); });
  }
  Tensors sent(getSize()), received(getSize()), outputs;
  sent[options.rootRank] = alias_of(first);
  wanted.inputs = {sent[options.rootRank]};
  if (is_root) outputs = received = each(given_outputs[0], alias_of);
  return exchange_parts(wanted, std::move(sent), std::move(received), std::move(outputs), options.asyncOp);
}

Backend::WorkPtr Backend::scatter(Tensors& given_outputs, TensorLists& given_inputs, const c10d::ScatterOptions& options) {
  const at::Tensor& first = first_of(given_outputs, Kind::scatter);
  check_root(Kind::scatter, options.rootRank, getSize());
  const bool is_root = getRank() == options.rootRank;
  TORCH_CHECK(given_inputs.size() == (is_root ? 1 : 0), "scatter: found ", given_inputs.size(), " lists of inputs on rank ",
              getRank(), "; expected one on the root and none elsewhere");
  if (is_root && first.is_cpu()) check_parts(Kind::scatter, given_inputs[0], first, getSize(), "input");
  Wanted wanted{Kind::scatter, first.scalar_type(), first.is_cuda() ? -1 : first.numel(), RedOp::UNUSED,
                static_cast<int>(options.rootRank), first.is_cuda(), options.timeout};
  if (!moves_itself(wanted)) {
    check_gloo_moves(wanted.kind, first);
    return hand_on(wanted, given_outputs, given_inputs,
                   [options](auto& engine, auto& out, auto& in) { return engine.scatter(out, in, options); });
  }
  Tensors sent(getSize()), received(getSize());
  received[options.rootRank] = alias_of(first);
  if (is_root) wanted.inputs = sent = each(given_inputs[0], alias_of);
  const Tensors outputs{received[options.rootRank]};
  return exchange_parts(wanted, std::move(sent), std::move(received), outputs, options.asyncOp);
}

Backend::WorkPtr Backend::alltoall_base(at::Tensor& given_output, at::Tensor& given_input, std::vector<int64_t>& output_sizes,
                                        std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& options) {
  Wanted wanted{Kind::all_to_all, given_input.scalar_type(), -1, RedOp::UNUSED, -1, given_input.is_cuda(), options.timeout};
  if (wanted.on_cuda) {
    return hand_on(wanted, Tensors{given_output}, Tensors{given_input},
                   [output_sizes, input_sizes, options](auto& engine, auto& out, auto& in) mutable {
                     return engine.alltoall_base(out[0], in[0], output_sizes, input_sizes, options);
                   });
  }
  check_same_kind(wanted.kind, given_input, given_output);
  const auto rows_in = rows_for_each(wanted.kind, given_input, input_sizes, getSize());
  const auto rows_out = rows_for_each(wanted.kind, given_output, output_sizes, getSize());
  if (input_sizes.empty() && output_sizes.empty()) {
    TORCH_CHECK(given_input.numel() == given_output.numel(), "all_to_all: found an input of ", given_input.numel(),
                " elements and an output of ", given_output.numel(), "; expected the same number, or split sizes");
    wanted.count = given_input.numel();
  }
  if (!moves_itself(wanted)) {
    check_gloo_moves(wanted.kind, given_input);
    return hand_on(wanted, Tensors{given_output}, Tensors{given_input},
                   [output_sizes, input_sizes, options](auto& engine, auto& out, auto& in) mutable {
                     return engine.alltoall_base(out[0], in[0], output_sizes, input_sizes, options);
                   });
  }
  const at::Tensor output = alias_of(given_output), input = alias_of(given_input);
  wanted.inputs = {input};
  return exchange_parts(wanted, input.split_with_sizes(rows_in), output.split_with_sizes(rows_out), {output}, options.asyncOp);
}

Backend::WorkPtr Backend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  const at::Tensor& first = first_of(inputs, Kind::all_to_all);
  Wanted wanted{Kind::all_to_all, first.scalar_type(), -1, RedOp::UNUSED, -1, first.is_cuda(), options.timeout};
  if (!wanted.on_cuda) {
    for (const Tensors* list : {&inputs, &outputs}) {
      TORCH_CHECK(list->size() == static_cast<size_t>(getSize()), "all_to_all: tensor list size ", list->size(),
                  " does not match world size ", getSize());
      for (const at::Tensor& tensor : *list) check_same_kind(wanted.kind, tensor, first);
    }
    TORCH_CHECK(inputs[getRank()].numel() == outputs[getRank()].numel(), "all_to_all: found an input of ",
                inputs[getRank()].numel(), " elements for this rank itself and an output of ", outputs[getRank()].numel(),
                "; expected the same size");
  }
  if (!moves_itself(wanted)) {
    check_gloo_moves(wanted.kind, first);
    return hand_on(wanted, outputs, inputs, [options](auto& engine, auto& out, auto& in) { return engine.alltoall(out, in, options); });
  }
  const Tensors received = each(outputs, alias_of);
  wanted.inputs = each(inputs, alias_of);
  return exchange_parts(wanted, wanted.inputs, received, received, options.asyncOp);
}

Backend::WorkPtr Backend::allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  const at::Tensor& first = first_of(inputs, Kind::all_gather);
  TORCH_CHECK(outputs.size() == inputs.size(), "all_gather: found ", outputs.size(), " lists of outputs for ", inputs.size(), " inputs");
  if (first.is_cpu()) check_parts(Kind::all_gather, outputs[0], first, getSize(), "output");
  const int64_t count = first.is_cuda() ? -1 : first.numel();  // NCCL takes lists of uneven sizes
  Wanted wanted{Kind::all_gather, first.scalar_type(), count, RedOp::UNUSED, -1, first.is_cuda(), options.timeout};
  const Row row = this->row(wanted.kind, wanted.on_cuda, bytes_of(first) * getSize());
  if (inputs.size() != 1 || first.is_sparse() || !moves_itself(wanted) || row.algorithm != Algorithm::shared_memory) {
    check_gloo_moves(wanted.kind, first);
    return hand_on(wanted, outputs, inputs, [options](auto& engine, auto& out, auto& in) { return engine.allgather(out, in, options); });
  }
  const Tensors targets = each(outputs[0], alias_of);
  wanted.inputs = {alias_of(first)};
  return submit(
      wanted, [input = alias_of(first), targets, row](Call& call, const Fingerprint&) {
        const at::Tensor from = input.contiguous();
        Tensors whole;
        std::vector<char*> addresses;
        for (const at::Tensor& target : targets) {
          whole.push_back(target.contiguous());
          addresses.push_back(static_cast<char*>(whole.back().data_ptr()));
        }
        call.chunk_bytes = row.chunk_bytes != 0 ? row.chunk_bytes : call.segment->area_bytes() * call.segment->num_ranks();
        all_gather(call, from.data_ptr(), addresses.data(), from.nbytes());
        for (size_t index = 0; index < whole.size(); ++index) {
          if (!whole[index].is_same(targets[index])) at::Tensor(targets[index]).copy_(whole[index]);
        }
      },
      targets, options.asyncOp);
}

Backend::WorkPtr Backend::reduce_scatter(Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& options) {
  const at::Tensor& first = first_of(outputs, Kind::reduce_scatter);
  TORCH_CHECK(inputs.size() == outputs.size(), "reduce_scatter: found ", inputs.size(), " lists of inputs for ", outputs.size(), " outputs");
  if (first.is_cpu()) check_parts(Kind::reduce_scatter, inputs[0], first, getSize(), "input");
  const int64_t count = first.is_cuda() ? -1 : first.numel() * getSize();
  Wanted wanted{Kind::reduce_scatter, first.scalar_type(), count, options.reduceOp, -1, first.is_cuda(), options.timeout};
  const Row row = this->row(wanted.kind, wanted.on_cuda, bytes_of(first) * getSize());
  if (outputs.size() != 1 || first.is_sparse() || !moves_itself(wanted) || row.algorithm != Algorithm::shared_memory ||
      !accelerates(wanted.kind, wanted.dtype, wanted.reduce)) {
    check_gloo_reduces(wanted.kind, first, wanted.reduce);
    return hand_on(wanted, outputs, inputs,
                   [options](auto& engine, auto& out, auto& in) { return engine.reduce_scatter(out, in, options); });
  }
  return submit(
      wanted, [output = alias_of(first), sources = each(inputs[0], alias_of), row](Call& call, const Fingerprint&) {
        const at::Tensor to = output.contiguous();
        Tensors whole;
        std::vector<const char*> addresses;
        for (const at::Tensor& source : sources) {
          whole.push_back(source.contiguous());
          addresses.push_back(static_cast<const char*>(whole.back().data_ptr()));
        }
        call.chunk_bytes = row.chunk_bytes != 0 ? row.chunk_bytes : call.segment->area_bytes();
        deepytorch::reduce_scatter(call, addresses.data(), to.data_ptr(), to.numel());
        if (!to.is_same(output)) at::Tensor(output).copy_(to);
      },
      {first}, options.asyncOp);
}

// What was handed to the inner backend for CPU tensors and is still under way there.
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

Backend::WorkPtr Backend::barrier(const c10d::BarrierOptions& options) {
  const bool on_cuda = engine_of(true) && (!engine_of(false) || !options.device_ids.empty() || (options.device && options.device->is_cuda()));
  const Wanted wanted{Kind::barrier, at::kByte, -1, RedOp::UNUSED, -1, on_cuda, options.timeout};
  if (moves_itself(wanted)) {
    return submit(wanted, [](Call&, const Fingerprint&) {}, {}, options.asyncOp);
  }
  return delegate(wanted, [options](c10d::Backend& engine) { return engine.barrier(options); }, {});
}

// ------------------------------------------------------------------ collectives that are handed on

// Hands a call on whole.
template <class Outputs, class Inputs, class Run>
Backend::WorkPtr Backend::hand_on(Wanted wanted, const Outputs& given_outputs, const Inputs& given_inputs, Run run) {
  CopiedOutputs copied;
  const auto aliases = each(given_outputs, alias_of);
  auto outputs = each(aliases, copied);
  auto inputs = each(each(given_inputs, alias_of), in_a_row);
  return delegate(wanted, [outputs, inputs, run](c10d::Backend& engine) mutable { return run(engine, outputs, inputs); },
                  flat(aliases), std::move(copied));
}

Backend::WorkPtr Backend::allreduce_sparse(Tensors& given_tensors, const c10d::AllreduceOptions& options) {
  auto tensors = each(given_tensors, alias_of);
  const at::Tensor& first = first_of(tensors, Kind::all_reduce);
  const Wanted wanted{Kind::all_reduce, first.scalar_type(), -1, options.reduceOp, -1, first.is_cuda()};
  const auto call = [tensors, options](c10d::Backend& engine) mutable { return engine.allreduce_sparse(tensors, options); };
  return delegate(wanted, call, tensors);
}

Backend::WorkPtr Backend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  const at::Tensor& first = first_of(tensors, Kind::reduce);
  check_root(Kind::reduce, options.rootRank, getSize());
  check_gloo_reduces(Kind::reduce, first, options.reduceOp);
  const Wanted wanted{Kind::reduce, first.scalar_type(), first.numel(), options.reduceOp, static_cast<int>(options.rootRank),
                      first.is_cuda(), options.timeout};
  return hand_on(wanted, tensors, Tensors(), [options](auto& engine, auto& given, auto&) { return engine.reduce(given, options); });
}

Backend::WorkPtr Backend::allgather_coalesced(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  const at::Tensor& first = first_of(inputs, Kind::all_gather_coalesced);
  Wanted wanted{Kind::all_gather_coalesced, first.scalar_type(), -1, RedOp::UNUSED, -1, first.is_cuda(), options.timeout};
  if (!wanted.on_cuda) wanted.sizes = sizes_of(inputs);
  for (const at::Tensor& input : inputs) check_gloo_moves(wanted.kind, input);
  return hand_on(wanted, outputs, inputs,
                 [options](auto& engine, auto& out, auto& in) { return engine.allgather_coalesced(out, in, options); });
}

Backend::WorkPtr Backend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                          const c10d::AllgatherOptions& options) {
  const at::Tensor& first = first_of(inputs, Kind::all_gather_coalesced);
  Wanted wanted{Kind::all_gather_coalesced, first.scalar_type(), -1, RedOp::UNUSED, -1, first.is_cuda(), options.timeout};
  if (!wanted.on_cuda) wanted.sizes = sizes_of(inputs);
  for (const at::Tensor& input : inputs) check_gloo_moves(wanted.kind, input);
  return hand_on(wanted, outputs, inputs, [options](auto& engine, auto& out, auto& in) {
    return engine.allgather_into_tensor_coalesced(out, in, options);
  });
}

Backend::WorkPtr Backend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                          const c10d::ReduceScatterOptions& options) {
  const at::Tensor& first = first_of(inputs, Kind::reduce_scatter_coalesced);
  Wanted wanted{Kind::reduce_scatter_coalesced, first.scalar_type(), -1, options.reduceOp, -1, first.is_cuda(), options.timeout};
  if (!wanted.on_cuda) wanted.sizes = sizes_of(inputs);
  for (const at::Tensor& input : inputs) check_gloo_reduces(wanted.kind, input, options.reduceOp);
  return hand_on(wanted, outputs, inputs, [options](auto& engine, auto& out, auto& in) {
    return engine.reduce_scatter_tensor_coalesced(out, in, options);
  });
}

void Backend::monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all) {
  guard();
  {
    const WithoutGil unlocked;
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return !busy_ && queue_.empty(); });
  }
  inner(false)->monitoredBarrier(options, wait_all);
}

// Between two ranks, so not counted among the collectives of all. The work of a call on CPU tensors is kept while calls
// are coalesced: nccl's end of it knows nothing of them.
template <class Run>
Backend::WorkPtr Backend::between_two(const Tensors& given, Run run) {
  auto tensors = each(given, alias_of);
  const bool on_cuda = first_of(tensors, Kind::none).is_cuda();
  guard();
  WorkPtr work = run(*inner(on_cuda), tensors);
  if (coalescing_ && !on_cuda) coalesced_.push_back(work);
  return work;
}

Backend::WorkPtr Backend::send(Tensors& tensors, int target, int tag) {
  return between_two(tensors, [&](auto& engine, auto& given) { return engine.send(given, target, tag); });
}

Backend::WorkPtr Backend::recv(Tensors& tensors, int source, int tag) {
  return between_two(tensors, [&](auto& engine, auto& given) { return engine.recv(given, source, tag); });
}

Backend::WorkPtr Backend::recvAnysource(Tensors& tensors, int tag) {
  return between_two(tensors, [&](auto& engine, auto& given) { return engine.recvAnysource(given, tag); });
}

// ------------------------------------------------------------------ the rest of the interface

c10::intrusive_ptr<c10d::Backend::Options> Backend::getBackendOptions() {
  return c10::make_intrusive<Options>("deepytorch", timeout_);
}

void Backend::startCoalescing() {
  coalescing_ = true;
  coalesced_.clear();
  inner(true)->startCoalescing();
}

Backend::WorkPtr Backend::endCoalescing() {
  coalescing_ = false;
  auto on_cuda = inner(true)->endCoalescing();
  if (coalesced_.empty()) return on_cuda;
  if (on_cuda) coalesced_.push_back(on_cuda);
  return c10::make_intrusive<ManyWorks>(std::exchange(coalesced_, {}));
}

void Backend::setTimeout(std::chrono::milliseconds timeout) {
  timeout_ = timeout;
  for (const bool on_cuda : {false, true}) {
    if (const auto engine = engine_of(on_cuda)) engine->setTimeout(timeout);
  }
}

void Backend::eagerConnectSingleDevice(at::Device device) {
  if (device.is_cuda()) inner(true)->eagerConnectSingleDevice(device);
}

bool Backend::supportsCoalescing() const {
  const auto cuda = engine_of(true);
  return cuda && cuda->supportsCoalescing();
}

bool Backend::supportsTensorAlloc(c10::DeviceIndex device) {
  const auto cuda = engine_of(true);
  return cuda && cuda->supportsTensorAlloc(device);
}

at::Tensor Backend::allocateTensor(long size, at::TensorOptions options) { return inner(true)->allocateTensor(size, options); }

std::shared_ptr<c10::Allocator> Backend::getMemAllocator() { return inner(true)->getMemAllocator(); }

}  // namespace deepytorch
