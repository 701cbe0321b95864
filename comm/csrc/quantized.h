// reduce_scatter and all_gather with a byte for each value between hosts, on request. Inside a host values stay exact.
//
// Values go in blocks of 256 with one fp32 scale each, as int8 or fp8 e4m3, so that one large value spoils few others
// (block-wise quantisation: Dettmers et al. 2022; for sharded training ZeRO++, Wang et al. 2023). What rounding loses of a
// sum is added to the next payload of the same key (error feedback: Seide et al. 2014, Karimireddy et al. 2019).
#pragma once

#include <atomic>
#include <vector>

#include "hierarchical.h"

namespace deepytorch {

class Codec {
 public:
  explicit Codec(Wire wire) : wire_(wire) {}
  static size_t bytes(size_t count);  // of `count` values: the scales, then the values
  // residual: added to the values, and what was lost is left in it; or null. Returns how many values were not finite.
  uint64_t encode(char* wire, const float* values, size_t count, float* residual) const;
  void decode(float* values, const char* wire, size_t count, bool add) const;

 private:
  Wire wire_;
};

// `segment` may be null in both: one rank on each host. residual: of (hosts * output_count) values, or null.
void reduce_scatter_quantized(Call& call, const Hosts& hosts, int host, const Codec& codec, std::vector<float>* residual,
                              std::atomic<uint64_t>* overflows, const void* input, void* output, size_t output_count);
// Every rank gets the same values, its own included: those that come out of the codec.
void all_gather_quantized(Call& call, const Hosts& hosts, const Codec& codec, std::atomic<uint64_t>* overflows,
                          const void* input, void* output, size_t input_count);

}  // namespace deepytorch
