#if defined(__x86_64__)
#include <immintrin.h>

#include "halves.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw")
#endif

namespace deepytorch::avx512 {

struct Lanes {
  static constexpr size_t width = 16;
  using Reg = __m512;

  static Reg load(const float* p) { return _mm512_loadu_ps(p); }
  static Reg load(const Bf16* p) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  }
  static Reg load(const F16* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
  static void store(float* p, Reg r) { _mm512_storeu_ps(p, r); }
  static void store(Bf16* p, Reg r) {  // to nearest, ties to even; every NaN becomes the quiet one
    const __m512i bits = _mm512_castps_si512(r);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd), 16);
    rounded = _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(r, r, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc0));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(rounded));
  }
  static void store(F16* p, Reg r) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(r, _MM_FROUND_TO_NEAREST_INT));
  }
  static Reg add(Reg a, Reg b) { return _mm512_add_ps(a, b); }
  // The instructions give the second operand where either is NaN, so only a first one that is NaN has to be put back.
  static Reg min(Reg a, Reg b) { return _mm512_mask_mov_ps(_mm512_min_ps(a, b), _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), a); }
  static Reg max(Reg a, Reg b) { return _mm512_mask_mov_ps(_mm512_max_ps(a, b), _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), a); }
  static Reg mul(Reg a, Reg b) { return _mm512_mul_ps(a, b); }
  static Reg div(Reg a, Reg b) { return _mm512_div_ps(a, b); }
  static Reg set(float x) { return _mm512_set1_ps(x); }
  static void stream_register(char* to, const char* from) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to), _mm512_loadu_si512(reinterpret_cast<const __m512i*>(from)));
  }
  static void end_stream() { _mm_sfence(); }
};

#include "kernels_body.h"

const Kernels table{"avx512", &reduce, &stream};

}  // namespace deepytorch::avx512

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
