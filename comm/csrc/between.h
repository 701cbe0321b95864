// The step between hosts of the hierarchical and the multi-stream algorithm: one rank's slice of each chunk is summed
// with those of the same local rank on the other hosts, over one or several inner backends (one connection each).
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <map>
#include <string>
#include <vector>

#include "segment.h"
#include "shared_memory.h"

namespace deepytorch {

using Backends = std::vector<c10::intrusive_ptr<c10d::Backend>>;

at::ScalarType scalar_type(Dtype dtype);

std::chrono::milliseconds remaining(const Call& call);  // until its deadline, 1 at least
// Waits for an inner backend's work, looking at the deadline, at the poison and at `stopped` now and then.
void wait_for(const c10::intrusive_ptr<c10d::Work>& work, const Call& call, const char* where);

// Exchanges the fingerprint of a call with the same local rank of every other host; throws on all if they differ.
class HostsAgree {
 public:
  HostsAgree(const Call& call, c10d::Backend& backend, const Fingerprint& mine);
  void wait();

 private:
  const Call& call_;
  Fingerprint mine_;
  at::Tensor own_, all_;
  c10::intrusive_ptr<c10d::Work> work_;
};

// Ring all-reduces of the inner backends, chunk k over backend k % streams.
class Ring final : public Between {
 public:
  Ring(const Call& call, Backends streams, int depth, HostsAgree* agree);
  int depth() const override { return depth_; }
  void start(size_t chunk, void* data, size_t count) override;
  void advance(size_t) override {}
  void finish(size_t chunk) override;

 private:
  const Call& call_;
  Backends streams_;
  int depth_;
  HostsAgree* agree_;
  std::vector<c10::intrusive_ptr<c10d::Work>> works_;
};

// What a cast to fewer bits lost, added to the next payload of the same key (error feedback: Seide et al. 2014,
// Karimireddy et al. 2019).
struct Residual {
  std::vector<float> sent, summed;
  size_t room = 0;   // of each chunk
  size_t count = 0;  // of the whole payload
};

// Direct reduce-scatter and all-gather between hosts in fewer bits: each payload is rounded once before it is sent, sums
// are made in fp32, and their result is rounded once. Sends 2 (H - 1) / H of the cast payload, as a ring does. Two hosts
// send each other the whole payload instead, which is as many bytes: one round trip fewer, and their sums stay in fp32.
class Exchange final : public Between {
 public:
  Exchange(const Call& call, Backends streams, int num_hosts, int host, Wire wire, HostsAgree* agree, Residual* residual,
           size_t slice_capacity, std::atomic<uint64_t>* overflows);
  int depth() const override { return 3; }
  void start(size_t chunk, void* data, size_t count) override;
  void advance(size_t chunk) override;
  void finish(size_t chunk) override;

 private:
  struct Flight {
    void* data = nullptr;
    size_t count = 0, part = 0;
    bool summed = false;
    at::Tensor sent, received, sum, gathered;
    c10::intrusive_ptr<c10d::Work> work;
  };
  Flight& flight(size_t chunk) { return flights_[chunk % 3]; }
  bool swaps() const { return num_hosts_ == 2; }
  size_t wire_bytes(size_t count) const;
  void encode(void* wire, const float* values, size_t count, float* residual);
  void decode_add(float* sum, const void* wire, size_t count, bool first) const;
  void to_floats(float* target, const void* data, size_t count) const;
  void from_floats(void* data, const float* source, size_t count) const;
  void gather(Flight& flight, size_t chunk, at::Tensor& gathered, at::Tensor& own);
  std::vector<float> sum_of(const Flight& flight) const;

  const Call& call_;
  Backends streams_;
  int num_hosts_, host_;
  Wire wire_;
  HostsAgree* agree_;
  Residual* residual_;
  size_t slice_capacity_;
  std::atomic<uint64_t>* overflows_;
  Flight flights_[3];
  std::vector<float> floats_;
};

}  // namespace deepytorch
