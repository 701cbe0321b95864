// Reductions and casts of host memory, in the widest form that this CPU has.
#pragma once

#include <cstddef>
#include <cstdint>

namespace deepytorch {

enum class Dtype : uint8_t { f32, f64, bf16, f16, i8, u8, i32, i64, bytes };
enum class Reduce : uint8_t { sum, min, max };

size_t element_size(Dtype dtype);
const char* name_of(Dtype dtype);

// out[i] = reduce(in[0][i], ..., in[num - 1][i]) / divisor, accumulated in fp32 for half types; the same into `also`
// unless that is null. The divisor is 1 unless the dtype is a float type. `out` may be one of `in`. NaN wins over
// numbers in min and max. Inputs and output may have different dtypes where one is f32 and the other bf16 or f16.
using ReduceFunction = void (*)(void* out, void* also, const void* const* in, int num, size_t count, Dtype from,
                                Dtype to, Reduce reduce, double divisor);

struct Kernels {
  const char* name;  // "avx512", "avx2" or "portable"
  ReduceFunction reduce;
  void (*stream)(void* target, const void* source, size_t bytes);  // a copy past the caches, where the CPU can do that
};

// The fastest that this CPU runs, or the named one; null where the CPU or the build lacks that one.
const Kernels& kernels();
const Kernels* kernels_named(const char* name);

namespace portable { extern const Kernels table; }
#if defined(__x86_64__)
namespace avx2 { extern const Kernels table; }
namespace avx512 { extern const Kernels table; }
#endif

}  // namespace deepytorch
