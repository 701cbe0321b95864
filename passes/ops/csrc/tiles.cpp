#include "tiles.h"

#include <algorithm>
#include <bit>

#include <xmmintrin.h>

// Compiled for each of these instruction sets; the loader takes the best that the CPU has. Loops are written so that
// compilers turn them into vector instructions: no branches, no calls, adjacent elements.
#define FOR_EACH_CPU __attribute__((target_clones("avx512f", "avx2", "default")))

namespace deepytorch {

FOR_EACH_CPU void raise_to_largest(Tile tile, const float* scores, float* largest) {
  for (int64_t query = 0; query < tile.queries; query += kStep) {
    float now[kStep];
    std::copy_n(largest + query, kStep, now);
    for (int64_t key = 0; key < tile.keys; ++key) {
      const float* const line = scores + key * tile.queries + query;
      for (int64_t lane = 0; lane < kStep; ++lane) now[lane] = now[lane] < line[lane] ? line[lane] : now[lane];
    }
    std::copy_n(now, kStep, largest + query);
  }
}

// exp(x) = 2^n * exp(rest): n is the integer nearest to x / log(2), rest within half of log(2), where a polynomial of
// degree 7 (Cephes, expf) is accurate to one or two roundings.
FOR_EACH_CPU void exponentials(Tile tile, float* scores, const float* from) {
  for (int64_t key = 0; key < tile.keys; ++key) {
    float* const line = scores + key * tile.queries;
    for (int64_t query = 0; query < tile.queries; ++query) {
      float x = line[query] - from[query];
      const bool hidden = x < -87.0f;
      x = hidden ? -87.0f : x;
      constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23: a sum with it is rounded to a whole number
      const float sum = x * 1.44269504088896341f + kRounder;
      const float n = sum - kRounder;
      const float rest = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // log(2) in two parts
      float power = 1.9875691500e-4f;
      power = power * rest + 1.3981999507e-3f;
      power = power * rest + 8.3334519073e-3f;
      power = power * rest + 4.1665795894e-2f;
      power = power * rest + 1.6666665459e-1f;
      power = power * rest + 5.0000001201e-1f;
      power = power * rest * rest + rest + 1.0f;
      const uint32_t exponent = (std::bit_cast<uint32_t>(sum) << 23) + 0x3f800000u;  // the low bits of the sum are n
      const float result = power * std::bit_cast<float>(exponent);
      line[query] = hidden ? 0.0f : result;
    }
  }
}

FOR_EACH_CPU void add_sums(Tile tile, const float* probabilities, float* sums) {
  for (int64_t query = 0; query < tile.queries; query += kStep) {
    float now[kStep] = {};  // sums of this tile alone: long rows lose less accuracy
    for (int64_t key = 0; key < tile.keys; ++key) {
      const float* const line = probabilities + key * tile.queries + query;
      for (int64_t lane = 0; lane < kStep; ++lane) now[lane] += line[lane];
    }
    for (int64_t lane = 0; lane < kStep; ++lane) sums[query + lane] += now[lane];
  }
}

FOR_EACH_CPU void through_softmax(Tile tile, const float* probabilities, const float* delta, float* gradients) {
  for (int64_t key = 0; key < tile.keys; ++key) {
    const float* const p = probabilities + key * tile.queries;
    float* const g = gradients + key * tile.queries;
    for (int64_t query = 0; query < tile.queries; ++query) g[query] = p[query] * (g[query] - delta[query]);
  }
}

FOR_EACH_CPU void products_of_rows(const float* a, int64_t stride_a, const float* b, int64_t stride_b, int64_t rows,
                                   int64_t columns, float* products) {
  for (int64_t row = 0; row < rows; ++row) {
    const float *const x = a + row * stride_a, *const y = b + row * stride_b;
    float lanes[kStep] = {};
    int64_t column = 0;
    for (; column + kStep <= columns; column += kStep) {
      for (int64_t lane = 0; lane < kStep; ++lane) lanes[lane] += x[column + lane] * y[column + lane];
    }
    for (; column < columns; ++column) lanes[0] += x[column] * y[column];
    for (int64_t half = kStep / 2; half > 0; half /= 2) {
      for (int64_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
    }
    products[row] = lanes[0];
  }
}

void transpose_in(const float* from, int64_t stride, int64_t rows, int64_t columns, float factor, float* to, int64_t width) {
  const __m128 factors = _mm_set1_ps(factor);
  for (int64_t row = 0; row < width; row += 4) {
    int64_t column = 0;
    for (; column + 4 <= columns; column += 4) {
      __m128 square[4];
      for (int64_t at = 0; at < 4; ++at) {
        square[at] = row + at < rows ? _mm_loadu_ps(from + (row + at) * stride + column) : _mm_setzero_ps();
      }
      _MM_TRANSPOSE4_PS(square[0], square[1], square[2], square[3]);
      for (int64_t at = 0; at < 4; ++at) _mm_storeu_ps(to + (column + at) * width + row, _mm_mul_ps(square[at], factors));
    }
    for (; column < columns; ++column) {
      for (int64_t at = row; at < row + 4; ++at) {
        to[column * width + at] = at < rows ? factor * from[at * stride + column] : 0.0f;
      }
    }
  }
}

void transpose_out(const float* from, int64_t width, const float* factors, int64_t rows, int64_t columns, float* to,
                   int64_t stride) {
  for (int64_t row = 0; row < rows; row += 4) {
    const int64_t here = std::min<int64_t>(4, rows - row);
    int64_t column = 0;
    for (; column + 4 <= columns; column += 4) {
      __m128 square[4];
      for (int64_t at = 0; at < 4; ++at) square[at] = _mm_loadu_ps(from + (column + at) * width + row);
      _MM_TRANSPOSE4_PS(square[0], square[1], square[2], square[3]);
      for (int64_t at = 0; at < here; ++at) {
        _mm_storeu_ps(to + (row + at) * stride + column, _mm_mul_ps(square[at], _mm_set1_ps(factors[row + at])));
      }
    }
    for (; column < columns; ++column) {
      for (int64_t at = row; at < row + here; ++at) to[at * stride + column] = factors[at] * from[column * width + at];
    }
  }
}

}  // namespace deepytorch
