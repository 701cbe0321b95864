// For every CPU: arrays of 16 numbers, which compilers turn into whatever vectors there are.
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "halves.h"

namespace deepytorch::portable {

struct Lanes {
  static constexpr size_t width = 16;
  struct Reg { float v[width]; };

  template <class F>
  static Reg each(F f) {
    Reg out;
    for (size_t i = 0; i < width; ++i) out.v[i] = f(i);
    return out;
  }
  static Reg load(const float* p) { return each([&](size_t i) { return p[i]; }); }
  static Reg load(const Bf16* p) { return each([&](size_t i) { return c10::detail::f32_from_bits(p[i].bits); }); }
  static Reg load(const F16* p) { return each([&](size_t i) { return c10::detail::fp16_ieee_to_fp32_value(p[i].bits); }); }
  static void store(float* p, const Reg& r) { std::memcpy(p, r.v, sizeof(r.v)); }
  static void store(Bf16* p, const Reg& r) {
    for (size_t i = 0; i < width; ++i) p[i].bits = c10::detail::round_to_nearest_even(r.v[i]);
  }
  static void store(F16* p, const Reg& r) {
    for (size_t i = 0; i < width; ++i) p[i].bits = c10::detail::fp16_ieee_from_fp32_value(r.v[i]);
  }
  static Reg add(const Reg& a, const Reg& b) { return each([&](size_t i) { return a.v[i] + b.v[i]; }); }
  static Reg min(const Reg& a, const Reg& b) {
    return each([&](size_t i) { return a.v[i] < b.v[i] || a.v[i] != a.v[i] ? a.v[i] : b.v[i]; });
  }
  static Reg max(const Reg& a, const Reg& b) {
    return each([&](size_t i) { return a.v[i] > b.v[i] || a.v[i] != a.v[i] ? a.v[i] : b.v[i]; });
  }
  static Reg mul(const Reg& a, const Reg& b) { return each([&](size_t i) { return a.v[i] * b.v[i]; }); }
  static Reg div(const Reg& a, const Reg& b) { return each([&](size_t i) { return a.v[i] / b.v[i]; }); }
  static Reg set(float x) { return each([&](size_t) { return x; }); }
  static void stream_register(char* to, const char* from) { std::memcpy(to, from, sizeof(Reg)); }
  static void end_stream() {}
};

#include "kernels_body.h"

const Kernels table{"portable", &reduce, &stream};

}  // namespace deepytorch::portable
