#include <torch/csrc/utils/pybind.h>

#include "varlen_attention.h"

namespace py = pybind11;

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using Unlocked = py::call_guard<py::gil_scoped_release>;
  module.def("varlen_attention_is_supported", &deepytorch::is_supported, Unlocked());
  module.def("varlen_attention", &deepytorch::forward, Unlocked());
  module.def("varlen_attention_backward", &deepytorch::backward, Unlocked());
}
