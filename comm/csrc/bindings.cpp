#include <torch/csrc/utils/pybind.h>

#include "backend.h"

namespace py = pybind11;
using namespace deepytorch;

namespace {

Kind kind_of(const std::string& name) {
  for (const Kind kind : {Kind::all_reduce, Kind::reduce_scatter, Kind::all_gather, Kind::broadcast}) {
    if (name == name_of(kind)) return kind;
  }
  throw py::value_error("kind " + name + " is not accelerated; expected all_reduce, reduce_scatter, all_gather or broadcast");
}

// A Python function that C++ may call and drop on any thread.
std::shared_ptr<py::function> held(py::function call) {
  return std::shared_ptr<py::function>(new py::function(std::move(call)), [](py::function* function) {
    if (!Py_IsInitialized()) return;
    const py::gil_scoped_acquire locked;
    delete function;
  });
}

std::function<void()> callable(py::function call) {
  return [function = held(std::move(call))] {
    if (!Py_IsInitialized()) return;
    const py::gil_scoped_acquire locked;
    (*function)();
  };
}

template <size_t n>
int index_of(const char* const (&names)[n], const std::string& name) {
  for (size_t index = 0; index < n; ++index) if (name == names[index]) return static_cast<int>(index);
  throw py::value_error("unknown name " + name);
}

using PyRow = std::tuple<uint64_t, std::string, uint64_t, int, std::string>;

Row row_of(const PyRow& row) {
  return {std::get<0>(row), algorithm_of(std::get<1>(row)), std::get<2>(row),
          std::get<3>(row), static_cast<Wire>(index_of(kWires, std::get<4>(row)))};
}

std::vector<Row> rows_of(const std::vector<PyRow>& rows) {
  std::vector<Row> made;
  for (const auto& row : rows) made.push_back(row_of(row));
  return made;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  py::register_exception<CommError>(module, "CommError", PyExc_RuntimeError);

  py::class_<Segment, std::shared_ptr<Segment>>(module, "Segment")
      .def_static("create", &Segment::create, py::arg("num_ranks"), py::arg("areas"), py::arg("area_bytes"),
                  py::arg("room_bytes") = 0, py::arg("node") = -1)
      .def_static("attach", &Segment::attach, py::arg("pid"), py::arg("descriptor"), py::arg("token"), py::arg("rank"),
                  py::arg("node") = -1)
      .def_static("look", &Segment::look, py::arg("pid"), py::arg("descriptor"))
      .def("recorder", &Segment::recorder, py::arg("last") = kRing)
      .def("join", &Segment::join)
      .def("set_unpin", [](Segment& self, py::function call) { self.set_unpin(callable(std::move(call))); })
      .def("is_alive", &Segment::is_alive)
      .def("address", [](const Segment& self) { return reinterpret_cast<uintptr_t>(self.area(0, 0)); })
      .def_property_readonly("num_bytes", [](const Segment& self) {
        return static_cast<size_t>(self.num_ranks()) * self.areas() * self.room_bytes();
      })
      .def_property_readonly("descriptor", &Segment::descriptor)
      .def_property_readonly("token", &Segment::token);

  py::class_<Backend, c10::intrusive_ptr<Backend>, c10d::Backend>(module, "Backend")
      .def(py::init([](int rank, int size, int64_t timeout_ms, std::optional<c10::intrusive_ptr<c10d::Backend>> cpu,
                       std::optional<c10::intrusive_ptr<c10d::Backend>> cuda, std::shared_ptr<Segment> segment,
                       std::vector<c10::intrusive_ptr<c10d::Backend>> between, int num_hosts, int host,
                       std::vector<int> ranks, std::optional<c10::intrusive_ptr<c10d::Store>> store, bool exchanges) {
             return c10::make_intrusive<Backend>(Setup{rank, size, timeout_ms, cpu.value_or(nullptr), cuda.value_or(nullptr),
                                                       std::move(segment), std::move(between), num_hosts, host, std::move(ranks),
                                                       store.value_or(nullptr), exchanges});
           }),
           py::arg("rank"), py::arg("size"), py::arg("timeout_ms"), py::arg("cpu"), py::arg("cuda"), py::arg("segment"),
           py::arg("between"), py::arg("num_hosts"), py::arg("host"), py::arg("ranks"), py::arg("store") = py::none(),
           py::arg("exchanges") = false, py::call_guard<py::gil_scoped_release>())
      .def("set_table",
           [](Backend& self, const std::string& kind, bool on_cuda, const std::vector<PyRow>& rows, bool fixed) {
             self.set_table(kind_of(kind), on_cuda, fixed, rows_of(rows));
           },
           py::arg("kind"), py::arg("on_cuda"), py::arg("rows"), py::arg("fixed"))
      .def("set_trials",
           [](Backend& self, const std::vector<PyRow>& rows, const std::vector<double>& expected_us, uint64_t copy_bytes,
              uint64_t first, int number, double share, py::function tried) {
             self.set_trials(rows_of(rows), expected_us, copy_bytes, first, number, share,
                             [function = held(std::move(tried))](Backend& backend, double copy_us, const std::vector<double>& times_us) {
                               const py::gil_scoped_acquire locked;
                               (*function)(c10::intrusive_ptr<Backend>::reclaim_copy(&backend), copy_us, times_us);
                             });
           },
           py::arg("rows"), py::arg("expected_us"), py::arg("copy_bytes"), py::arg("first"), py::arg("number"),
           py::arg("share"), py::arg("tried"))
      .def("end_trials", &Backend::end_trials)
      .def("set_one_shot_bytes", &Backend::set_one_shot_bytes)
      .def("chosen", [](const Backend& self, const std::string& kind, bool on_cuda, uint64_t bytes) {
        const Row row = self.row(kind_of(kind), on_cuda, bytes);
        return PyRow{row.max_bytes, name_of(row.algorithm), row.chunk_bytes, row.streams,
                     kWires[static_cast<int>(row.wire)]};
      })
      .def("engine", &Backend::engine_of, py::arg("on_cuda"))
      .def("__getattr__",  // what nccl alone has, such as register_mem_pool
           [](const Backend& self, const std::string& name) -> py::object {
             const auto cuda = self.engine_of(true);
             if (!cuda || name.rfind("__", 0) == 0) throw py::attribute_error("'Backend' object has no attribute '" + name + "'");
             return py::cast(cuda).attr(name.c_str());
           })
      .def("set_symmetric",
           [](Backend& self, py::function call) {
             self.set_symmetric([function = held(std::move(call))](const std::string& algorithm, const std::string& kind,
                                                                  at::Tensor& output, at::Tensor& input, bool average) {
               const py::gil_scoped_acquire locked;
               return (*function)(algorithm, kind, output, input, average).template cast<std::optional<c10::Stream>>();
             });
           })
      .def("set_pin", [](Backend& self, py::function call) { self.set_pin(callable(std::move(call))); })
      .def("adopt", &Backend::adopt)
      .def("allreduce_compressed",
           [](Backend& self, at::Tensor tensor, const c10d::ReduceOp& reduce, const std::string& wire, const std::string& key,
              bool async) {
             return self.allreduce_compressed(tensor, reduce.op_, static_cast<Wire>(index_of(kWires, wire)), key, async);
           },
           py::call_guard<py::gil_scoped_release>())
      .def("set_quantize", [](Backend& self, const std::string& wire) { self.set_quantize(static_cast<Wire>(index_of(kWires, wire))); })
      .def("step_marker",  // to be called after each step; False once the group is gone, which it does not hold
           [](const c10::intrusive_ptr<Backend>& self) {
             return py::cpp_function([weak = c10::weak_intrusive_ptr<Backend>(self)] {
               const auto backend = weak.lock();
               if (backend) backend->mark_step();
               return static_cast<bool>(backend);
             });
           })
      .def("reduce_scatter_quantized",
           [](Backend& self, at::Tensor output, at::Tensor input, const c10d::ReduceOp& reduce, const std::string& wire,
              const std::string& key, bool async) {
             return self.reduce_scatter_quantized(output, input, reduce.op_, static_cast<Wire>(index_of(kWires, wire)), key, async);
           },
           py::call_guard<py::gil_scoped_release>())
      .def("all_gather_quantized",
           [](Backend& self, at::Tensor output, at::Tensor input, const std::string& wire, bool async) {
             return self.all_gather_quantized(output, input, static_cast<Wire>(index_of(kWires, wire)), async);
           },
           py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("segment", &Backend::segment)
      .def("show_as_gloo", &Backend::show_as_gloo)
      .def_property_readonly("on_one_host", &Backend::on_one_host)
      .def_property_readonly("inner_cpu", [](const Backend& self) { return self.engine_of(false); })
      .def_property_readonly("overflows", &Backend::overflows)
      .def_property_readonly("poisoned", &Backend::poisoned)
      .def_property_readonly("poison_message", &Backend::poison_message);

  module.def("kernel_name", [] { return kernels().name; });
  // For tests and calibration: the kernel called `kernel` on CPU tensors.
  module.def("reduce", [](const std::string& kernel, at::Tensor out, const std::vector<at::Tensor>& inputs, int reduce, double divisor) {
    const Kernels* table = kernels_named(kernel.c_str());
    if (table == nullptr) throw py::value_error("this CPU has no " + kernel + " kernels");
    std::vector<const void*> in;
    for (const at::Tensor& input : inputs) in.push_back(input.const_data_ptr());
    table->reduce(out.data_ptr(), nullptr, in.data(), static_cast<int>(in.size()), out.numel(), dtype_of(inputs[0].scalar_type()), dtype_of(out.scalar_type()),
                  static_cast<Reduce>(reduce), divisor);
  });
}
