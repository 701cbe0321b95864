// Storage of the half types; arithmetic is done in fp32.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels.h"

namespace deepytorch {

struct Bf16 { uint16_t bits; };
struct F16 { uint16_t bits; };

}  // namespace deepytorch
