#include "quantized.h"

#include <c10/util/Float8_e4m3fn.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>

namespace deepytorch {

namespace {

constexpr size_t kBlock = 256;
constexpr size_t kChunk = 1 << 18;  // values of one host with one rank that travel together
constexpr int kDepth = 3;

size_t blocks(size_t count) { return (count + kBlock - 1) / kBlock; }

void cast(const void* from, Dtype from_dtype, void* to, Dtype to_dtype, size_t count, double divisor = 1.0) {
  kernels().reduce(to, nullptr, &from, 1, count, from_dtype, to_dtype, Reduce::sum, divisor);
}

float largest_of(Wire wire) { return wire == Wire::int8 ? 127.0f : 448.0f; }

}  // namespace

size_t Codec::bytes(size_t count) { return blocks(count) * sizeof(float) + count; }

uint64_t Codec::encode(char* wire, const float* values, size_t count, float* residual) const {
  auto* bytes = reinterpret_cast<uint8_t*>(wire) + blocks(count) * sizeof(float);
  uint64_t overflows = 0;
  float corrected[kBlock];
  for (size_t block = 0; block < blocks(count); ++block) {
    const size_t begin = block * kBlock, size = std::min(kBlock, count - begin);
    float largest = 0.0f;
    for (size_t i = 0; i < size; ++i) corrected[i] = values[begin + i] + (residual != nullptr ? residual[begin + i] : 0.0f);
    bool finite = true;
    for (size_t i = 0; i < size; ++i) {
      finite = finite && std::isfinite(corrected[i]);
      largest = std::max(largest, std::abs(corrected[i]));
    }
    // A scale of NaN makes every value NaN at the other end, as an exact sum would show what is not finite.
    const float scale = finite ? std::max(largest / largest_of(wire_), FLT_MIN) : std::nanf("");
    const float inverse = finite ? 1.0f / scale : 0.0f;
    std::memcpy(wire + block * sizeof(float), &scale, sizeof scale);
    overflows += !finite;
    for (size_t i = 0; i < size; ++i) {
      const float scaled = finite ? corrected[i] * inverse : 0.0f;
      float arrived;
      if (wire_ == Wire::int8) {
        arrived = std::nearbyint(scaled);
        bytes[begin + i] = static_cast<uint8_t>(static_cast<int8_t>(arrived));
      } else {
        bytes[begin + i] = c10::detail::fp8e4m3fn_from_fp32_value(scaled);
        arrived = c10::detail::fp8e4m3fn_to_fp32_value(bytes[begin + i]);
      }
      if (residual != nullptr) residual[begin + i] = finite ? corrected[i] - arrived * scale : 0.0f;
    }
  }
  return overflows;
}

void Codec::decode(float* values, const char* wire, size_t count, bool add) const {
  const auto* bytes = reinterpret_cast<const uint8_t*>(wire) + blocks(count) * sizeof(float);
  for (size_t block = 0; block < blocks(count); ++block) {
    const size_t begin = block * kBlock, size = std::min(kBlock, count - begin);
    float scale;
    std::memcpy(&scale, wire + block * sizeof(float), sizeof scale);
    for (size_t i = begin; i < begin + size; ++i) {
      const float value = wire_ == Wire::int8 ? static_cast<float>(static_cast<int8_t>(bytes[i]))
                                              : c10::detail::fp8e4m3fn_to_fp32_value(bytes[i]);
      values[i] = add ? values[i] + value * scale : value * scale;
    }
  }
}

void reduce_scatter_quantized(Call& call, const Hosts& hosts, int host, const Codec& codec, std::vector<float>* residual,
                              std::atomic<uint64_t>* overflows, const void* input, void* output, size_t output_count) {
  const size_t element = element_size(call.dtype), parts = hosts.ranks.size();
  size_t room = kChunk;
  if (call.segment) room = std::max<size_t>(call.segment->area_bytes() / parts / kLine * kLine, kLine) / element;
  const size_t chunks = (output_count + room - 1) / room;
  HostSums sums(call, hosts, room, input, output_count);
  std::vector<Flight> flights(kDepth);
  std::vector<std::vector<float>> own(kDepth);  // what this host adds to this rank's part
  std::vector<float> sum(std::min(room, output_count));
  const auto start = [&](size_t chunk) {
    Flight& flight = flights[chunk % kDepth];
    const size_t size = sums.size_of(chunk), wire_bytes = Codec::bytes(size);
    sums.bring(chunk);
    flight.prepare(hosts, wire_bytes);
    for (int to = 0; to < hosts.num_hosts; ++to) {
      sums.sum_for(to, sum.data(), Dtype::f32);
      char* wire = flight.part_for(to, wire_bytes);
      if (to == host) {
        own[chunk % kDepth].assign(sum.begin(), sum.begin() + static_cast<int64_t>(size));
        std::memset(wire, 0, wire_bytes);
      } else {
        *overflows += codec.encode(wire, sum.data(), size, residual ? residual->data() + to * output_count + chunk * room : nullptr);
      }
    }
    flight.start(call, hosts, chunk);
  };
  const auto finish = [&](size_t chunk) {
    Flight& flight = flights[chunk % kDepth];
    float* const values = own[chunk % kDepth].data();
    wait_for(flight.work, call, "between hosts,");
    const size_t size = sums.size_of(chunk);
    for (int from = 0; from < hosts.num_hosts; ++from) {
      if (from != host) codec.decode(values, flight.part_from(from, Codec::bytes(size)), size, true);
    }
    cast(values, Dtype::f32, static_cast<char*>(output) + chunk * room * element, call.dtype, size, call.divisor);
    flight = Flight();
  };
  if (chunks == 0) hosts.agree.wait();
  for (size_t turn = 0; turn < chunks + kDepth - 1; ++turn) {
    if (turn < chunks) start(turn);
    if (turn + 1 >= kDepth && turn + 1 - kDepth < chunks) finish(turn + 1 - kDepth);
  }
}

void all_gather_quantized(Call& call, const Hosts& hosts, const Codec& codec, std::atomic<uint64_t>* overflows,
                          const void* input, void* output, size_t input_count) {
  const size_t bytes = Codec::bytes(input_count), num_ranks = hosts.ranks.size(), element = element_size(call.dtype);
  std::vector<float> values(input_count);
  cast(input, call.dtype, values.data(), Dtype::f32, input_count);
  at::Tensor own = at::empty({static_cast<int64_t>(bytes)}, at::kByte);
  at::Tensor all = at::empty({static_cast<int64_t>(bytes * num_ranks)}, at::kByte);
  call.keep({own, all});
  *overflows += codec.encode(static_cast<char*>(own.data_ptr()), values.data(), input_count, nullptr);
  if (call.segment != nullptr) {
    all_gather_between(call, hosts, std::min(call.segment->areas() - 1, kDepth), own.data_ptr(), all.data_ptr(), bytes);
  } else {
    hosts.agree.wait();
    c10d::AllgatherOptions options;
    options.timeout = remaining(call);
    wait_for(hosts.streams[0]->_allgather_base(all, own, options), call, "between hosts,");
  }
  for (size_t place = 0; place < num_ranks; ++place) {  // with a segment by rank, else by host
    const size_t rank = call.segment != nullptr ? place : hosts.ranks[place];
    codec.decode(values.data(), static_cast<char*>(all.data_ptr()) + place * bytes, input_count, false);
    cast(values.data(), Dtype::f32, static_cast<char*>(output) + rank * input_count * element, call.dtype, input_count);
  }
}

}  // namespace deepytorch
