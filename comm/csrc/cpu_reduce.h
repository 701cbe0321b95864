// Copies between a device's tensor and host memory, for reductions on the CPU (DeepNCCL calls it CPU-Reduce): on PCIe
// boxes without peer access, host memory is where GPUs meet anyway. Device-agnostic through c10's streams and events, so
// that the same code runs on CPU tensors, without streams.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <deque>
#include <optional>

#include "shared_memory.h"

namespace deepytorch {

class DeviceCopies final : public Copies {
 public:
  // `payload` is contiguous. Called where the caller's current stream is the one that made it.
  explicit DeviceCopies(const at::Tensor& payload);
  void read(void* target, size_t offset, size_t size) override;
  void asked() override;
  void arrived() override;
  void write(size_t offset, const void* source, size_t size) override;
  void left() override;
  void finish() override;
  char* direct() override { return nullptr; }
  // Make the caller's current stream wait for all copies.
  void block_current_stream();

 private:
  at::Tensor bytes_;
  std::optional<c10::Stream> in_, out_;
  std::deque<c10::Event> asked_;  // of chunks that have not come, the first one first
  std::optional<c10::Event> made_, left_;
};

}  // namespace deepytorch
