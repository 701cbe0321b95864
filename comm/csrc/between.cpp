#include "between.h"

#include <c10/util/Float8_e4m3fn.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>

#include "health.h"

namespace deepytorch {

namespace {

constexpr float kLargestFp8 = 448.0f;

void fail(const Call& call, const std::string& message) {
  if (call.segment != nullptr) call.segment->poison(message);
  throw CommError(message);
}

}  // namespace

std::chrono::milliseconds remaining(const Call& call) {
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(call.deadline - Clock::now());
  return std::max(left, std::chrono::milliseconds(1));
}

at::ScalarType scalar_type(Dtype dtype) {
  switch (dtype) {
    case Dtype::f32: return at::kFloat;
    case Dtype::f64: return at::kDouble;
    case Dtype::bf16: return at::kBFloat16;
    case Dtype::f16: return at::kHalf;
    case Dtype::i8: return at::kChar;
    case Dtype::i32: return at::kInt;
    case Dtype::i64: return at::kLong;
    default: return at::kByte;
  }
}

void wait_for(const c10::intrusive_ptr<c10d::Work>& work, const Call& call, const char* where) {
  const std::string what =
      std::string(name_of(call.kind)) + ", collective " + std::to_string(call.sequence) + " of this group, " + where;
  for (;;) {
    const bool done = work->isCompleted();
    try {
      work->wait(kLook);
      return;
    } catch (const std::exception& error) {  // the end of this look, or an error if it was done before
      if (done) throw CommError(what + " failed: " + error.what());  // the caller may still hear the cause from another host
      if (work->isCompleted()) continue;
    }
    if (call.health != nullptr && call.health->poisoned()) throw CommError(call.health->message());
    if (call.stopped->load()) throw CommError("the process group was destroyed during " + what);
    if (Clock::now() > call.deadline) {
      const std::string message = what + " timed out: a rank of another host has not come to it. Is it slow, stopped, or in "
                                         "another collective? A longer timeout is set by init_process_group(timeout=...)";
      if (call.segment != nullptr) call.segment->poison(message);
      throw Timeout(message);
    }
  }
}

HostsAgree::HostsAgree(const Call& call, c10d::Backend& backend, const Fingerprint& mine) : call_(call), mine_(mine) {
  mine_.shared = 0;
  own_ = at::empty({static_cast<int64_t>(sizeof(Fingerprint))}, at::kByte);
  all_ = at::empty({static_cast<int64_t>(sizeof(Fingerprint)) * backend.getSize()}, at::kByte);
  std::memcpy(own_.data_ptr(), &mine_, sizeof mine_);
  c10d::AllgatherOptions options;
  options.timeout = remaining(call);
  work_ = backend._allgather_base(all_, own_, options);
}

void HostsAgree::wait() {
  if (!work_) return;
  wait_for(work_, call_, "comparing calls between hosts,");
  work_.reset();
  for (int64_t host = 0; host < all_.numel() / static_cast<int64_t>(sizeof(Fingerprint)); ++host) {
    Fingerprint theirs;
    std::memcpy(&theirs, static_cast<char*>(all_.data_ptr()) + host * sizeof theirs, sizeof theirs);
    if (theirs.sequence == mine_.sequence && mine_.matches(theirs)) {
      if (theirs.history == mine_.history) continue;
      fail(call_, "hosts disagree on a collective before number " + std::to_string(mine_.sequence) + " of this group, " +
                      mine_.describe() + ": host " + std::to_string(host) +
                      " has called something else; expected the same calls on every rank, in the same order");
    }
    fail(call_, "hosts disagree on collective " + std::to_string(mine_.sequence) + " of this group: this host called " +
                    mine_.describe() + ", host " + std::to_string(host) + " called " + theirs.describe() +
                    (theirs.sequence == mine_.sequence ? "" : " as its collective " + std::to_string(theirs.sequence)) +
                    "; expected the same call on every rank, in the same order");
  }
}

Ring::Ring(const Call& call, Backends streams, int depth, HostsAgree* agree)
    : call_(call), streams_(std::move(streams)), depth_(depth), agree_(agree), works_(depth) {}

void Ring::start(size_t chunk, void* data, size_t count) {
  agree_->wait();
  if (count == 0) return;
  c10d::AllreduceOptions options;
  options.timeout = remaining(call_);
  options.reduceOp = call_.reduce == Reduce::sum   ? c10d::ReduceOp::SUM
                     : call_.reduce == Reduce::min ? c10d::ReduceOp::MIN
                                                   : c10d::ReduceOp::MAX;
  std::vector<at::Tensor> tensors{at::from_blob(
      data, {static_cast<int64_t>(count)}, [kept = call_.kept](void*) {}, scalar_type(call_.dtype))};
  works_[chunk % depth_] = streams_[chunk % streams_.size()]->allreduce(tensors, options);
}

void Ring::finish(size_t chunk) {
  auto& work = works_[chunk % depth_];
  if (work) wait_for(work, call_, "between hosts,");
  work.reset();
}

Exchange::Exchange(const Call& call, Backends streams, int num_hosts, int host, Wire wire, HostsAgree* agree,
                   Residual* residual, size_t slice_capacity, std::atomic<uint64_t>* overflows)
    : call_(call), streams_(std::move(streams)), num_hosts_(num_hosts), host_(host), wire_(wire), agree_(agree),
      residual_(residual), slice_capacity_(slice_capacity), overflows_(overflows) {}

size_t Exchange::wire_bytes(size_t count) const { return wire_ == Wire::fp8 ? sizeof(float) + count : 2 * count; }

void Exchange::to_floats(float* target, const void* data, size_t count) const {
  kernels().reduce(target, nullptr, &data, 1, count, call_.dtype, Dtype::f32, Reduce::sum, 1.0);
}

void Exchange::from_floats(void* data, const float* source, size_t count) const {
  const void* in = source;
  kernels().reduce(data, nullptr, &in, 1, count, Dtype::f32, call_.dtype, Reduce::sum, 1.0);
}

void Exchange::encode(void* wire, const float* values, size_t count, float* residual) {
  std::vector<float> corrected;
  if (residual != nullptr) {
    corrected.assign(values, values + count);
    for (size_t i = 0; i < count; ++i) corrected[i] += residual[i];
    values = corrected.data();
  }
  if (wire_ == Wire::fp8) {
    float largest = 0.0f;
    bool finite = true;
    for (size_t i = 0; i < count; ++i) {
      finite = finite && std::isfinite(values[i]);
      largest = std::max(largest, std::abs(values[i]));
    }
    // A scale of NaN makes every number NaN at the other end, as an exact sum would show what is not finite.
    const float scale = !finite ? std::nanf("") : std::max(largest / kLargestFp8, FLT_MIN);  // its inverse is finite
    std::memcpy(wire, &scale, sizeof scale);
    auto* bytes = static_cast<uint8_t*>(wire) + sizeof scale;
    const float inverse = finite ? 1.0f / scale : 0.0f;
    for (size_t i = 0; i < count; ++i) bytes[i] = c10::detail::fp8e4m3fn_from_fp32_value(values[i] * inverse);
    if (!finite) ++*overflows_;
  } else {
    const void* in = values;
    kernels().reduce(wire, nullptr, &in, 1, count, Dtype::f32, wire_ == Wire::bf16 ? Dtype::bf16 : Dtype::f16,
                     Reduce::sum, 1.0);
    if (wire_ == Wire::f16) {  // what does not fit is infinite, so that a loss scaler sees it; here it is counted
      const auto* halves = static_cast<const uint16_t*>(wire);
      uint64_t found = 0;
      for (size_t i = 0; i < count; ++i) found += (halves[i] & 0x7c00) == 0x7c00;
      if (found != 0) *overflows_ += found;
    }
  }
  if (residual == nullptr) return;
  std::vector<float> arrived(count);
  decode_add(arrived.data(), wire, count, true);
  for (size_t i = 0; i < count; ++i) {
    const float lost = values[i] - arrived[i];
    residual[i] = std::isfinite(lost) ? lost : 0.0f;
  }
}

void Exchange::decode_add(float* sum, const void* wire, size_t count, bool first) const {
  if (wire_ == Wire::fp8) {
    float scale;
    std::memcpy(&scale, wire, sizeof scale);
    const auto* bytes = static_cast<const uint8_t*>(wire) + sizeof scale;
    for (size_t i = 0; i < count; ++i) {
      const float value = c10::detail::fp8e4m3fn_to_fp32_value(bytes[i]) * scale;
      sum[i] = first ? value : sum[i] + value;
    }
    return;
  }
  const Dtype dtype = wire_ == Wire::bf16 ? Dtype::bf16 : Dtype::f16;
  if (first) {
    kernels().reduce(sum, nullptr, &wire, 1, count, dtype, Dtype::f32, Reduce::sum, 1.0);
    return;
  }
  std::vector<float> value(count);
  kernels().reduce(value.data(), nullptr, &wire, 1, count, dtype, Dtype::f32, Reduce::sum, 1.0);
  const void* in[] = {sum, value.data()};
  kernels().reduce(sum, nullptr, in, 2, count, Dtype::f32, Dtype::f32, Reduce::sum, 1.0);
}

void Exchange::start(size_t chunk, void* data, size_t count) {
  agree_->wait();
  Flight& f = flight(chunk);
  f = Flight();
  f.data = data;
  f.count = count;
  const int parts = swaps() ? 1 : num_hosts_;
  f.part = (count + parts - 1) / parts;
  if (count == 0) return;
  floats_.assign(f.part * parts, 0.0f);
  to_floats(floats_.data(), data, count);
  const int64_t part_bytes = static_cast<int64_t>(wire_bytes(f.part));
  f.sent = at::empty({part_bytes * parts}, at::kByte);
  f.received = at::empty({part_bytes * num_hosts_}, at::kByte);
  float* residual = nullptr;
  if (residual_ != nullptr) {
    const size_t room = slice_capacity_ + num_hosts_;  // parts are rounded up
    if (residual_->room != room) *residual_ = {{}, {}, room, residual_->count};
    if (residual_->sent.size() < (chunk + 1) * room) residual_->sent.resize((chunk + 1) * room);
    if (!swaps() && residual_->summed.size() < (chunk + 1) * room) residual_->summed.resize((chunk + 1) * room);
    residual = residual_->sent.data() + chunk * room;
  }
  for (int part = 0; part < parts; ++part) {
    encode(static_cast<char*>(f.sent.data_ptr()) + part * part_bytes, floats_.data() + part * f.part, f.part,
           residual ? residual + part * f.part : nullptr);
  }
  if (swaps()) {
    gather(f, chunk, f.received, f.sent);
    return;
  }
  c10d::AllToAllOptions options;
  options.timeout = remaining(call_);
  std::vector<int64_t> even;
  f.work = streams_[chunk % streams_.size()]->alltoall_base(f.received, f.sent, even, even, options);
}

void Exchange::advance(size_t chunk) {
  Flight& f = flight(chunk);
  if (f.count == 0 || f.summed || swaps()) return;
  wait_for(f.work, call_, "between hosts,");
  const int64_t part_bytes = static_cast<int64_t>(wire_bytes(f.part));
  const std::vector<float> sum = sum_of(f);
  float* residual = nullptr;
  if (residual_ != nullptr) residual = residual_->summed.data() + chunk * (slice_capacity_ + num_hosts_);
  f.sum = at::empty({part_bytes}, at::kByte);
  f.gathered = at::empty({part_bytes * num_hosts_}, at::kByte);
  encode(f.sum.data_ptr(), sum.data(), f.part, residual);
  gather(f, chunk, f.gathered, f.sum);
  f.summed = true;
}

void Exchange::gather(Flight& f, size_t chunk, at::Tensor& gathered, at::Tensor& own) {
  c10d::AllgatherOptions options;
  options.timeout = remaining(call_);
  f.work = streams_[chunk % streams_.size()]->_allgather_base(gathered, own, options);
}

// The sum of what arrived from each host, in their order: the same on all of them.
std::vector<float> Exchange::sum_of(const Flight& f) const {
  std::vector<float> sum(f.part);
  for (int host = 0; host < num_hosts_; ++host) {
    decode_add(sum.data(), static_cast<char*>(f.received.data_ptr()) + host * wire_bytes(f.part), f.part, host == 0);
  }
  return sum;
}

void Exchange::finish(size_t chunk) {
  Flight& f = flight(chunk);
  if (f.count == 0) return;
  advance(chunk);
  wait_for(f.work, call_, "between hosts,");
  std::vector<float> values;
  if (swaps()) {
    values = sum_of(f);
  } else {
    values.resize(f.part * num_hosts_);
    for (int host = 0; host < num_hosts_; ++host) {
      const char* part = static_cast<char*>(f.gathered.data_ptr()) + host * wire_bytes(f.part);
      decode_add(values.data() + host * f.part, part, f.part, true);
    }
  }
  from_floats(f.data, values.data(), f.count);
  f = Flight();
}

}  // namespace deepytorch
