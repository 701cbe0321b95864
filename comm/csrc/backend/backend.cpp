#include "../backend.h"

#include "work.h"

namespace deepytorch {

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
  switch (algorithm) {
#define DEEPYTORCH_NAME(name) \
  case Algorithm::name: return #name;
    DEEPYTORCH_ALGORITHMS(DEEPYTORCH_NAME)
#undef DEEPYTORCH_NAME
  }
  return "?";
}

Algorithm algorithm_of(const std::string& name) {
#define DEEPYTORCH_SAME(same) \
  if (name == #same) return Algorithm::same;
  DEEPYTORCH_ALGORITHMS(DEEPYTORCH_SAME)
#undef DEEPYTORCH_SAME
  throw std::invalid_argument("unknown algorithm " + name);  // a ValueError in Python
}

Backend::Backend(Setup setup)
    : c10d::Backend(setup.rank, setup.size), setup_(std::move(setup)), timeout_(setup_.timeout_ms),
      health_(std::make_shared<Health>(setup_.segment, setup_.store != nullptr)), changed_(*new std::condition_variable) {
  const auto& segment = setup_.segment;
  for (const uint64_t value : {static_cast<uint64_t>(setup_.num_hosts), segment ? segment->area_bytes() : 0,
                               segment ? static_cast<uint64_t>(segment->areas()) : 0}) {
    plan_ = mix(plan_ + 1, value);
  }
  if (setup_.store) {
    for (auto& calls : calls_) calls = std::make_shared<CallHistory>();
    const bool compares = !segment || segment->rank() == 0;  // the segment compares the host's other ranks with this one
    listener_ = std::make_unique<Listener>(
        Listening{setup_.rank, setup_.host, compares, health_, {calls_[0], calls_[1]}, std::move(setup_.store)},
        [this] { let_go(); });
  }
}

Backend::~Backend() {
  if (forked()) {  // a forked child has none of the threads: what they hold is left as it is
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
  const WithoutGil unlocked;  // gloo waits for its threads, and those drop tensors
  setup_.cpu.reset();
  setup_.cuda.reset();
  setup_.between.clear();
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
  table_[place_of(kind, on_cuda, fixed)] = std::move(rows);
}

Row Backend::row(Kind kind, bool on_cuda, uint64_t bytes) const {
  for (const Row& row : table_[place_of(kind, on_cuda, at::globalContext().deterministicAlgorithms())]) {
    if (bytes <= row.max_bytes) return row;
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
  if (forked()) {
    raise("this process was forked after its process group was made, and has none of its threads; expected the group to "
          "be made in the process that uses it: call init_process_group in the child, or start it with spawn");
  }
  if (poisoned()) raise("this process group is of no use after an earlier error: " + poison_message());
  if (stopped_.load()) raise("this process group was destroyed; expected a group made by init_process_group or new_group");
}

void Backend::set_quantize(Wire wire) {
  quantize_ = wire;
  plan_ = mix(plan_ + 1, static_cast<uint64_t>(wire));
}

void Backend::mark_step() {
  const std::lock_guard<std::mutex> lock(mutex_);
  scattered_.clear();
}

// ------------------------------------------------------------------ memory that is shared

at::Tensor Backend::adopt(const std::shared_ptr<Segment>& region) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::erase_if(regions_, [](const Region& each) { return each.segment.expired(); });
  regions_.push_back({++num_regions_, region, region->area(0, region->rank()), region->area_bytes()});
  return at::from_blob(
      region->area(0, region->rank()), {static_cast<int64_t>(region->area_bytes())}, [region](void*) {},
      at::TensorOptions().dtype(at::kByte));
}

// Which region and where in it: (region << 44) | offset, or 0.
uint64_t Backend::shared_at(const void* data, size_t bytes) const {
  const char* const at = static_cast<const char*>(data);
  for (const Region& each : regions_) {
    if (at < each.begin || at + bytes > each.begin + each.bytes || each.segment.expired()) continue;
    return (each.number << 44) | static_cast<uint64_t>(at - each.begin);
  }
  return 0;
}

std::vector<char*> Backend::peers(uint64_t shared) {
  std::shared_ptr<Segment> region;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = std::find_if(regions_.begin(), regions_.end(), [&](const Region& each) { return each.number == shared >> 44; });
    if (found != regions_.end()) region = found->segment.lock();
  }
  if (!region) raise("memory of a collective was freed while it ran");
  std::vector<char*> found;
  for (int rank = 0; rank < region->num_ranks(); ++rank) found.push_back(region->area(0, rank) + (shared & ((1ull << 44) - 1)));
  return found;
}

// ------------------------------------------------------------------ the end

void Backend::shutdown() {
  if (forked()) return;
  const WithoutGil unlocked;
  listener_.reset();
  for (;;) {  // a worker may start another one before it ends
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
  if (forked()) return;
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
    if (poisoned()) {  // an operation may be stuck in the inner backends
      // On one host torch holds the first one too, and would wait for a stuck operation in it: it is never destroyed.
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
