#include "kernels.h"

#include <cstring>
#include <initializer_list>

namespace deepytorch {

size_t element_size(Dtype dtype) {
  switch (dtype) {
    case Dtype::f64: case Dtype::i64: return 8;
    case Dtype::f32: case Dtype::i32: return 4;
    case Dtype::bf16: case Dtype::f16: return 2;
    default: return 1;
  }
}

const char* name_of(Dtype dtype) {
  static const char* const names[] = {"float32", "float64", "bfloat16", "float16", "int8", "uint8", "int32", "int64", "bytes"};
  return names[static_cast<int>(dtype)];
}

const Kernels* kernels_named(const char* name) {
  if (std::strcmp(name, "portable") == 0) return &portable::table;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (std::strcmp(name, "avx2") == 0 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) {
    return &avx2::table;
  }
  if (std::strcmp(name, "avx512") == 0 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")) {
    return &avx512::table;
  }
#endif
  return nullptr;
}

const Kernels& kernels() {
  static const Kernels& best = []() -> const Kernels& {
    for (const char* name : {"avx512", "avx2"}) {
      if (const Kernels* found = kernels_named(name)) return *found;
    }
    return portable::table;
  }();
  return best;
}

}  // namespace deepytorch
