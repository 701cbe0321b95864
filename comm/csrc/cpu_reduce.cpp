#include "cpu_reduce.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace deepytorch {

namespace {

at::Tensor host_bytes(const void* data, size_t size) {
  return at::from_blob(const_cast<void*>(data), {static_cast<int64_t>(size)}, at::TensorOptions().dtype(at::kByte));
}

}  // namespace

DeviceCopies::DeviceCopies(const at::Tensor& payload) : bytes_(payload.reshape({-1}).view(at::kByte)) {
  const c10::Device device = bytes_.device();
  if (device.is_cpu()) return;
  const c10::impl::VirtualGuardImpl guard(device.type());
  in_ = guard.getStreamFromGlobalPool(device, /*isHighPriority=*/true);
  out_ = guard.getStreamFromGlobalPool(device, /*isHighPriority=*/true);
  made_.emplace(device.type());
  made_->record(guard.getStream(device));
  made_->block(*in_);
  made_->block(*out_);
  bytes_.record_stream(*in_);
  bytes_.record_stream(*out_);
}

void DeviceCopies::read(void* target, size_t offset, size_t size) {
  const c10::OptionalStreamGuard guard(in_);
  host_bytes(target, size).copy_(bytes_.narrow(0, offset, size), /*non_blocking=*/true);
}

void DeviceCopies::asked() {
  if (in_) asked_.emplace_back(in_->device_type()).record(*in_);
}

void DeviceCopies::arrived() {
  if (!in_) return;
  asked_.front().synchronize();
  asked_.pop_front();
}

void DeviceCopies::write(size_t offset, const void* source, size_t size) {
  const c10::OptionalStreamGuard guard(out_);
  bytes_.narrow(0, offset, size).copy_(host_bytes(source, size), /*non_blocking=*/true);
}

void DeviceCopies::left() {
  if (!out_) return;
  if (left_) left_->synchronize();  // of the chunk before: this one's copies go on
  left_.emplace(out_->device_type());
  left_->record(*out_);
}

void DeviceCopies::finish() {
  if (left_) left_->synchronize();
}

void DeviceCopies::block_current_stream() {
  if (!left_) return;
  const c10::impl::VirtualGuardImpl guard(out_->device_type());
  left_->block(guard.getStream(bytes_.device()));
}

}  // namespace deepytorch
