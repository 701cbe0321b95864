"""Every private name of torch that deepytorch uses: its purpose, its calls, and the name by which it is imported here.

No other module uses torch's private names: `from deepytorch.torch_internals import detect_fake_mode`. A name is looked
up when it is imported. So a name that a new torch lacks breaks only the features that need it, with an error that says
so. `python -m deepytorch.torch_internals` prints the table, and whether this torch has each name and accepts the calls
that are made. Tests compare the table with the sources, so that it is complete. Operators (`aten._softmax`) are no
names of Python: operators that graphs are searched for are not listed.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # names in annotations, in isinstance, and of base classes
    from torch._dynamo.eval_frame import OptimizedModule as OptimizedModule
    from torch._dynamo.exc import TensorifyScalarRestartAnalysis as TensorifyScalarRestartAnalysis
    from torch._dynamo.exc import UnspecializeRestartAnalysis as UnspecializeRestartAnalysis
    from torch._guards import CompileContext as CompileContext
    from torch._guards import TracingContext as TracingContext
    from torch._guards import detect_fake_mode as detect_fake_mode
    from torch._inductor.custom_graph_pass import CustomGraphPass as CustomGraphPass
    from torch._inductor.custom_graph_pass import CustomPartitionerFn as CustomPartitionerFn
    from torch._ops import HigherOrderOperator as HigherOrderOperator
    from torch._ops import OpOverload as OpOverload
    from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
    from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
    from torch.utils._device import DeviceContext as DeviceContext

from deepytorch.log import logger
from deepytorch.supported_versions import TORCH

Call = tuple[int, tuple[str, ...]]  # the number of arguments by place, and the names of those by name


@dataclass(frozen=True)
class Internal:
    """One private name: its purpose, and the calls that are made of it."""

    name: str
    why: str
    calls: tuple[Call, ...] = ()

    def trouble(self) -> str | None:
        """Return the fault of this name in this torch, None if there is none."""
        try:
            found = resolve(self.name)
        except (ImportError, AttributeError):
            return "is not there"
        for places, names in self.calls:
            if not callable(found):
                return f"is a {type(found).__name__}, and not to be called"
            if not _takes(found, places, names):
                return (
                    f"takes {inspect.signature(found)}, called with {places} by place and {', '.join(names) or 'none'}"
                )
        return None


INTERNALS = (
    Internal(
        "torch.Tensor._make_wrapper_subclass",
        "a deferred output is a tensor without memory",
        ((2, ("device", "dtype")),),
    ),
    Internal(
        "torch._C.DisableTorchFunctionSubclass",
        "look at a deferred output without its functions being taken",
        ((0, ()),),
    ),
    Internal(
        "torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode", "whether a transform of torch.func is around a call"
    ),
    Internal("torch._C.DispatchKeySet", "run kernels below autograd", ((1, ()),)),
    Internal("torch._C._ExcludeDispatchKeyGuard", "the same", ((1, ()),)),
    Internal("torch._C._autograd._get_current_graph_task_keep_graph", "whether a backward keeps its graph", ((0, ()),)),
    Internal(
        "torch._C._autograd._top_saved_tensors_default_hooks",
        "whether somebody looks at what is saved for a backward",
        ((1, ()),),
    ),
    Internal("torch._C._current_graph_task_id", "which backward is under way", ((0, ()),)),
    Internal(
        "torch._C._dispatch_tls_is_dispatch_key_included",
        "the same",
        ((1, ()),),
    ),
    Internal(
        "torch._C._distributed_c10d._SymmetricMemory.empty_strided_p2p",
        "all-reduce between GPUs through their own memory",
        ((5, ()),),
    ),
    Internal("torch._C._distributed_c10d._SymmetricMemory.rendezvous", "the same", ((1, ()),)),
    Internal("torch._C._get_function_stack_at", "which modes take calls of functions", ((1, ()),)),
    Internal("torch._C._get_sdp_priority_order", "another process traces attention as this one does", ((0, ()),)),
    Internal("torch._C._len_torch_dispatch_stack", "whether a mode takes calls of operators", ((0, ()),)),
    Internal("torch._C._len_torch_function_stack", "which modes take calls of functions", ((0, ()),)),
    Internal("torch._C._set_grad_enabled", "a trace meets it where a model switches gradients"),
    Internal("torch._C._storage_Use_Count", "whether somebody holds the memory of a bucket", ((1, ()),)),
    Internal("torch._C._set_sdp_priority_order", "another process traces attention as this one does", ((1, ()),)),
    Internal(
        "torch._C._will_engine_execute_node",
        "whether a backward adds to a parameter, or only hands its gradient out",
        ((1, ()),),
    ),
    Internal("torch._TorchCompileWrapper", "a backend with its options, alike for all modules of a class", ((4, ()),)),
    Internal("torch._disable_dynamo", "keep torch's own decorator on what stands in for its functions", ((1, ()),)),
    Internal(
        "torch._dynamo.backends.common.aot_autograd",
        "the lowering aot_eager",
        ((0, ("bw_compiler", "fw_compiler", "keep_inference_input_mutations", "partition_fn")),),
    ),
    Internal("torch._dynamo.config.assume_static_by_default", "whether the user asked for static sizes"),
    Internal("torch._dynamo.config.automatic_dynamic_shapes", "the same"),
    Internal(
        "torch._dynamo.config.compiled_autograd", "whether stock torch traces DDP's reducer, in `bench ddp` (set)"
    ),
    Internal("torch._dynamo.config.ignore_logging_functions", "calls that are left out of compiled code (patched)"),
    Internal("torch._dynamo.config.optimize_ddp", "whether Dynamo cuts data-parallel models (patched)"),
    Internal(
        "torch._dynamo.config.patch",
        "settings for one compile",
        (
            (0, ("capture_scalar_outputs",)),
            (0, ("skip_nnmodule_hook_guards", "use_numpy_random_stream")),
        ),
    ),
    Internal("torch._dynamo.eval_frame.OptimizedModule", "whether a module is compiled already"),
    Internal("torch._dynamo.exc.TensorifyScalarRestartAnalysis", "a restart that is not an error"),
    Internal("torch._dynamo.exc.UnspecializeRestartAnalysis", "have Dynamo trace once more"),
    Internal("torch._dynamo.lookup_backend", "load a backend before it is timed", ((1, ()),)),
    Internal("torch._dynamo.maybe_mark_dynamic", "sizes that vary from batch to batch", ((2, ()),)),
    Internal(
        "torch._dynamo.optimize",
        "decide for each frame whether it may be traced",
        ((0, ("backend",)), (0, ("backend", "nopython"))),
    ),
    Internal("torch._dynamo.reset", "begin a benchmark without compiled code", ((0, ()),)),
    Internal("torch._dynamo.source.ConstantSource", "where a size that a pass adds comes from", ((1, ()),)),
    Internal("torch._dynamo.symbolic_convert.InstructionTranslatorBase", "end a trace that takes too long (patched)"),
    Internal("torch._dynamo.symbolic_convert.get_funcname", "names the function around a line, for a log (patched)"),
    Internal("torch._dynamo.symbolic_convert.trace_call_log", "whether that log is on"),
    Internal("torch._dynamo.symbolic_convert.trace_source_log", "the same"),
    Internal(
        "torch._dynamo.types.ConvertFrameReturn",
        "have Dynamo run a frame in eager, this time",
        ((0, ()), (0, ("apply_to_code", "frame_exec_strategy"))),
    ),
    Internal("torch._dynamo.types.FrameAction.DEFAULT", "the same"),
    Internal("torch._dynamo.types.FrameAction.RUN_ONLY", "the same"),
    Internal("torch._dynamo.types.FrameExecStrategy", "the same", ((2, ()),)),
    Internal("torch._dynamo.utils._get_dynamo_config_for_logging", "settings, as Dynamo's metrics have them (patched)"),
    Internal("torch._dynamo.utils.compilation_time_metrics.values", "whether a step has compiled anything", ((0, ()),)),
    Internal("torch._dynamo.utils.counters", "whether compiled code came out of a cache"),
    Internal("torch._foreach_copy_", "copy gradients into their bucket at once", ((2, ()),)),
    Internal(
        "torch._functorch._aot_autograd.descriptors.GradAOTOutput", "which output of a backward is whose gradient"
    ),
    Internal("torch._functorch._aot_autograd.descriptors.PlainAOTInput", "the same"),
    Internal("torch._functorch.aot_autograd.make_boxed_func", "the lowering aot_eager", ((1, ()),)),
    Internal(
        "torch._functorch.config.patch",
        "settings for one compile",
        ((0, ("force_non_lazy_backward_lowering",)), (0, ("activation_memory_budget",))),
    ),
    Internal("torch._functorch.config.activation_memory_budget", "whether a script holds a share of activations"),
    Internal("torch._functorch.config.donated_buffer", "let a backward run twice"),
    Internal(
        "torch._functorch.utils.unwrap_dead_wrappers",
        "see an autograd function of a script that is applied to a deferred output",
    ),
    Internal(
        "torch._functorch.partitioners.min_cut_rematerialization_partition",
        "the lowering aot_eager, and the share of activations that a step holds",
    ),
    Internal(
        "torch._guards.CompileContext.current_compile_id",
        "the name of a region, and whether it is compiled again",
        ((0, ()),),
    ),
    Internal("torch._guards.TracingContext.try_get", "what Dynamo knows of the graph that it hands over", ((0, ()),)),
    Internal("torch._guards.detect_fake_mode", "the sizes of a graph, as symbols", ((1, ()),)),
    Internal("torch._inductor.compile_fx.compile_fx", "the lowering inductor", ((2, ("config_patches",)),)),
    Internal("torch._inductor.config.get_config_copy", "which options there are", ((0, ()),)),
    Internal("torch._inductor.config.load_config", "stock torch's overlap of collectives, in benchmarks", ((1, ()),)),
    Internal("torch._inductor.config.get_type", "what type an option has", ((1, ()),)),
    Internal("torch._inductor.config.triton.cudagraphs", "whether CUDA graphs are asked for"),
    Internal("torch._inductor.cpu_vec_isa.pick_vec_isa", "look at the CPU before compiled code is loaded", ((0, ()),)),
    Internal("torch._inductor.config.custom_partitioner_fn", "whether a script parts forward and backward itself"),
    Internal("torch._inductor.custom_graph_pass.CustomGraphPass", "passes in Inductor's slots, and in its cache keys"),
    Internal("torch._inductor.custom_graph_pass.CustomPartitionerFn", "the share of activations that a step holds"),
    Internal("torch._inductor.list_mode_options", "what mode= stands for", ((1, ()),)),
    Internal("torch._inductor.runtime.cache_dir_utils.cache_dir", "where compiled code is to lie", ((0, ()),)),
    Internal("torch._inductor.dependencies.StarDep", "keep the order of reads and writes of one buffer"),
    Internal("torch._inductor.dependencies.WeakDep", "keep the order of reads and writes of one buffer"),
    Internal(
        "torch._inductor.scheduler.SchedulerNode",
        "keep the order of reads and writes of one buffer",
    ),
    Internal("torch._inductor.utils.clear_caches", "begin a benchmark without compiled code", ((0, ()),)),
    Internal("torch._ops.HigherOrderOperator", "operators that hold graphs"),
    Internal("torch._ops.OpOverload", "which nodes of a graph are operators"),
    Internal("torch._subclasses.fake_tensor.FakeTensor", "values of a graph without memory"),
    Internal("torch._subclasses.fake_tensor.FakeTensorMode", "the same", ((0, ()),)),
    Internal("torch.amp.autocast_mode._enter_autocast", "autocast that a model enters itself"),
    Internal("torch.amp.autocast_mode._exit_autocast", "the same"),
    Internal("torch.autograd.Variable._execution_engine.queue_callback", "the end of a backward", ((1, ()),)),
    Internal("torch.autograd._engine_run_backward", "what calls a backward"),
    Internal("torch.autograd.forward_ad._current_level", "whether forward-mode differentiation is under way"),
    Internal("torch.distributed.distributed_c10d.Backend._plugins", "whether the process group is registered"),
    Internal(
        "torch.distributed.distributed_c10d._get_default_store",
        "re-form a group without the ranks that died",
        ((0, ()),),
    ),
    Internal(
        "torch.distributed.distributed_c10d._get_process_group_store",
        "what a group's ranks tell each other",
        ((1, ()),),
    ),
    Internal("torch.nn.modules.batchnorm._BatchNorm", "models with statistics over rows"),
    Internal(
        "torch.nn.parallel.DistributedDataParallel._get_active_ddp_module",
        "the data-parallel module in whose forward a region runs",
        ((0, ()),),
    ),
    Internal("torch.ops.aten._efficient_attention_backward", "attention in packed rows on GPUs, in float32 too"),
    Internal("torch.ops.aten._efficient_attention_forward", "the same"),
    Internal("torch.ops.aten._flash_attention_backward", "attention in packed rows on GPUs"),
    Internal("torch.ops.aten._flash_attention_forward", "the same"),
    Internal(
        "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default",
        "attention in packed rows on CPUs",
        ((5, ("scale",)),),
    ),
    Internal(
        "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default", "the same", ((8, ("scale",)),)
    ),
    Internal("torch.ops.aten._softmax_backward_data.default", "the backward of a softmax in packed rows", ((4, ()),)),
    Internal("torch.utils.data.dataloader._BaseDataLoaderIter", "time the wait for a batch (patched)"),
    Internal("torch.utils._device.DeviceContext", "torch.set_default_device, which is no mode of a user"),
    Internal("torch.utils._pytree.tree_flatten", "nested arguments and outputs", ((1, ()),)),
    Internal("torch.utils._pytree.tree_leaves", "the same", ((1, ()),)),
    Internal("torch.utils._pytree.tree_map_only", "the same", ((3, ()),)),
    Internal("torch.utils._triton.has_triton", "whether Triton compiles for a device", ((0, ()),)),
    Internal("torch.utils._triton.has_triton_package", "whether Triton is installed", ((0, ()),)),
)


@dataclass(frozen=True)
class Attribute:
    """One private attribute of torch's objects: the kind of object (a key of `_samples`), and its purpose."""

    of: str
    name: str
    why: str

    def trouble(self) -> str | None:
        """Return the fault of this attribute in this torch, None if there is none."""
        sample = _samples()[self.of]
        try:
            if hasattr(sample, self.name):
                return None
            # The sample of a data-parallel module is not set up, which needs a process group: its source is read.
            return None if f"self.{self.name} " in inspect.getsource(type(sample)) else "is not there"
        except RuntimeError as error:  # torch has the attribute, and refuses access
            return f"raises: {error}"
        except (OSError, TypeError):  # a class of C++ has no source
            return "is not there"


ATTRIBUTES = (
    Attribute("module", "_backward_hooks", "whether somebody looks at a module"),
    Attribute("module", "_backward_pre_hooks", "the same"),
    Attribute("module", "_call_impl", "call a module as if it were not compiled"),
    Attribute("module", "_compiled_call_impl", "what `Module.compile` sets: how a module is compiled in place"),
    Attribute("module", "_forward_hooks", "whether somebody looks at a module"),
    Attribute("module", "_forward_pre_hooks", "the same"),
    Attribute("module", "_modules", "the parts of a module, without a generator's cost"),
    Attribute("compiled module", "_orig_mod", "the module that `torch.compile` was given"),
    Attribute("tensor", "_backward_hooks", "whether somebody looks at a parameter's gradient"),
    Attribute("tensor", "_base", "which tensor a view is of"),
    Attribute("storage", "_cdata", "whether somebody holds the memory of a bucket"),
    Attribute("backward node", "_forward_cls", "what AOTAutograd knows of a compiled backward"),
    Attribute("backward node", "_input_metadata", "the shapes of the gradients that a backward is given"),
    Attribute("backward node", "_raw_saved_tensors", "whether a forward saves anything for its backward"),
    Attribute("operator", "_overloadname", "tell another process which operator a graph calls"),
    Attribute("operator", "_schema", "the arguments of an operator, and whether it writes to them"),
    Attribute("process group", "_device_types", "which backends a group has"),
    Attribute("process group", "_get_backend", "the same"),
    Attribute("process group", "_register_backend", "a stock group inside of ours"),
    Attribute("process group", "_set_default_backend", "the same"),
    Attribute("gloo", "_set_sequence_number_for_group", "the same"),
    Attribute("gloo", "_Options", "the same"),
    Attribute("gloo's options", "_devices", "a stock group inside of ours"),
    Attribute("gloo's options", "_threads", "the same"),
    Attribute("distributed_c10d", "_get_default_group", "whether the default group is bound to a device"),
    Attribute("distributed_c10d", "_world", "let a group answer with the name that it was asked for by"),
    Attribute("data-parallel module", "_get_ddp_logging_data", "whether a communication hook was registered"),
    Attribute("data-parallel module", "_module_parameters", "the parameters that it may reduce, frozen ones too"),
    Attribute("data-parallel module", "_join_config", "whether ranks may run out of batches"),
    Attribute("DDP's reducer", "_get_zeros_like_grad_buckets", "which parameters it reduces"),
    Attribute("data-parallel module", "_static_graph_delay_allreduce_enqueued", "keep DDP's reducer from reducing too"),
)


def _gloo_options(dist: Any) -> Any:
    return dist.ProcessGroupGloo._Options() if dist.is_gloo_available() else None


@functools.cache
def _samples() -> dict[str, Any]:
    """Return an object, or a class, for each kind in `ATTRIBUTES`."""
    import torch
    import torch.distributed as dist
    from torch.distributed.algorithms.join import Joinable
    from torch.nn.parallel import DistributedDataParallel

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return 2 * x

    module, tensor = torch.nn.Linear(1, 1), torch.ones(1, requires_grad=True)
    output = Twice.apply(tensor)
    made = {
        "module": module,
        "compiled module": torch.compile(module, backend="eager"),
        "tensor": tensor,
        "storage": tensor.untyped_storage(),
        "backward node": output.grad_fn,
        "its output": output,  # without a reference to it, the node of torch 2.11 and 2.12 is emptied
        "operator": torch.ops.aten.add.Tensor,
        "library": torch.library.Library,
    }
    if dist.is_available():
        parallel = DistributedDataParallel.__new__(DistributedDataParallel)
        Joinable.__init__(parallel)
        made |= {
            "process group": dist.ProcessGroup,
            "gloo": getattr(dist, "ProcessGroupGloo", None),
            "gloo's options": _gloo_options(dist),
            "distributed_c10d": dist.distributed_c10d,
            "data-parallel module": parallel,
            "DDP's reducer": dist.Reducer,
        }
    return made


# The names by which they are imported from here; a module or a class covers its names in the list above.
ALIASES = {
    "BatchNorm": "torch.nn.modules.batchnorm._BatchNorm",
    "ConvertFrameReturn": "torch._dynamo.types.ConvertFrameReturn",
    "CompileContext": "torch._guards.CompileContext",
    "ConstantSource": "torch._dynamo.source.ConstantSource",
    "CustomGraphPass": "torch._inductor.custom_graph_pass.CustomGraphPass",
    "CustomPartitionerFn": "torch._inductor.custom_graph_pass.CustomPartitionerFn",
    "DataLoaderIterator": "torch.utils.data.dataloader._BaseDataLoaderIter",
    "DeviceContext": "torch.utils._device.DeviceContext",
    "DisableTorchFunctionSubclass": "torch._C.DisableTorchFunctionSubclass",
    "DispatchKey": "torch._C.DispatchKey",
    "DispatchKeySet": "torch._C.DispatchKeySet",
    "ExcludeDispatchKeyGuard": "torch._C._ExcludeDispatchKeyGuard",
    "FakeTensor": "torch._subclasses.fake_tensor.FakeTensor",
    "FakeTensorMode": "torch._subclasses.fake_tensor.FakeTensorMode",
    "FrameAction": "torch._dynamo.types.FrameAction",
    "FrameExecStrategy": "torch._dynamo.types.FrameExecStrategy",
    "GradAOTOutput": "torch._functorch._aot_autograd.descriptors.GradAOTOutput",
    "HigherOrderOperator": "torch._ops.HigherOrderOperator",
    "OpOverload": "torch._ops.OpOverload",
    "OptimizedModule": "torch._dynamo.eval_frame.OptimizedModule",
    "PlainAOTInput": "torch._functorch._aot_autograd.descriptors.PlainAOTInput",
    "SymmetricMemory": "torch._C._distributed_c10d._SymmetricMemory",
    "TensorifyScalarRestartAnalysis": "torch._dynamo.exc.TensorifyScalarRestartAnalysis",
    "TorchCompileWrapper": "torch._TorchCompileWrapper",
    "TracingContext": "torch._guards.TracingContext",
    "UnspecializeRestartAnalysis": "torch._dynamo.exc.UnspecializeRestartAnalysis",
    "aot_autograd": "torch._dynamo.backends.common.aot_autograd",
    "backend_plugins": "torch.distributed.distributed_c10d.Backend._plugins",
    "clear_inductor_caches": "torch._inductor.utils.clear_caches",
    "compilation_time_metrics": "torch._dynamo.utils.compilation_time_metrics",
    "compile_fx": "torch._inductor.compile_fx.compile_fx",
    "compiler_counters": "torch._dynamo.utils.counters",
    "cpu_flash_attention": "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default",
    "cpu_flash_attention_backward": "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default",
    "current_graph_task_id": "torch._C._current_graph_task_id",
    "custom_graph_pass": "torch._inductor.custom_graph_pass",
    "detect_fake_mode": "torch._guards.detect_fake_mode",
    "compile_by_frames": "torch._dynamo.optimize",
    "disable_dynamo": "torch._disable_dynamo",
    "dispatch_tls_is_dispatch_key_included": "torch._C._dispatch_tls_is_dispatch_key_included",
    "dynamo_config": "torch._dynamo.config",
    "dynamo_metrics": "torch._dynamo.utils",
    "dynamo_tracer": "torch._dynamo.symbolic_convert",
    "efficient_attention_backward": "torch.ops.aten._efficient_attention_backward",
    "efficient_attention_forward": "torch.ops.aten._efficient_attention_forward",
    "enter_autocast": "torch.amp.autocast_mode._enter_autocast",
    "exit_autocast": "torch.amp.autocast_mode._exit_autocast",
    "flash_attention_backward": "torch.ops.aten._flash_attention_backward",
    "flash_attention_forward": "torch.ops.aten._flash_attention_forward",
    "foreach_copy": "torch._foreach_copy_",
    "functorch_config": "torch._functorch.config",
    "functorch_utils": "torch._functorch.utils",
    "get_active_ddp_module": "torch.nn.parallel.DistributedDataParallel._get_active_ddp_module",
    "get_default_store": "torch.distributed.distributed_c10d._get_default_store",
    "get_function_stack_at": "torch._C._get_function_stack_at",
    "get_process_group_store": "torch.distributed.distributed_c10d._get_process_group_store",
    "has_triton": "torch.utils._triton.has_triton",
    "has_triton_package": "torch.utils._triton.has_triton_package",
    "inductor_cache_dir": "torch._inductor.runtime.cache_dir_utils.cache_dir",
    "inductor_config": "torch._inductor.config",
    "keeps_graph_of_this_backward": "torch._C._autograd._get_current_graph_task_keep_graph",
    "len_torch_dispatch_stack": "torch._C._len_torch_dispatch_stack",
    "len_torch_function_stack": "torch._C._len_torch_function_stack",
    "inductor_dependencies": "torch._inductor.dependencies",
    "inductor_scheduler": "torch._inductor.scheduler",
    "list_mode_options": "torch._inductor.list_mode_options",
    "lookup_backend": "torch._dynamo.lookup_backend",
    "make_boxed_func": "torch._functorch.aot_autograd.make_boxed_func",
    "make_wrapper_subclass": "torch.Tensor._make_wrapper_subclass",
    "maybe_mark_dynamic": "torch._dynamo.maybe_mark_dynamic",
    "min_cut_rematerialization_partition": "torch._functorch.partitioners.min_cut_rematerialization_partition",
    "pick_vec_isa": "torch._inductor.cpu_vec_isa.pick_vec_isa",
    "queue_callback": "torch.autograd.Variable._execution_engine.queue_callback",
    "reset_dynamo": "torch._dynamo.reset",
    "sdp_priority_order": "torch._C._get_sdp_priority_order",
    "set_grad_enabled_in_graphs": "torch._C._set_grad_enabled",
    "set_sdp_priority_order": "torch._C._set_sdp_priority_order",
    "softmax_backward_data": "torch.ops.aten._softmax_backward_data.default",
    "storage_use_count": "torch._C._storage_Use_Count",
    "top_saved_tensors_default_hooks": "torch._C._autograd._top_saved_tensors_default_hooks",
    "tree_flatten": "torch.utils._pytree.tree_flatten",
    "tree_leaves": "torch.utils._pytree.tree_leaves",
    "tree_map_only": "torch.utils._pytree.tree_map_only",
    "will_engine_execute_node": "torch._C._will_engine_execute_node",
}


def __getattr__(alias: str) -> Any:
    if alias not in ALIASES:
        raise AttributeError(f"module {__name__} has no attribute {alias!r}")
    try:
        return globals().setdefault(alias, resolve(ALIASES[alias]))
    except (ImportError, AttributeError) as error:
        import torch

        raise ImportError(
            f"torch {torch.__version__} has no {ALIASES[alias]}, which deepytorch needs. What is missing: "
            "`python -m deepytorch.torch_internals`; which versions were tried: `deepytorch doctor`"
        ) from error


# Methods of a process group that start a collective (`deepytorch profile` times them); one that is missing is left out.
COLLECTIVES = (
    "allgather", "_allgather_base", "allgather_coalesced", "allgather_into_tensor_coalesced",
    "allreduce", "allreduce_coalesced", "alltoall", "alltoall_base", "barrier", "broadcast", "gather", "recv", "reduce",
    "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced", "scatter", "send",
)  # fmt: skip
BUFFERS_OF_DDP = "_distributed_broadcast_coalesced"  # a method of DistributedDataParallel that calls C++; the same


def forward_ad_level() -> int:
    """Return the level of forward-mode differentiation under way, counted from 0; -1 outside."""
    from torch.autograd import forward_ad

    return forward_ad._current_level


def wrap_engine_run_backward(make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Wrap, by `make`, the function that `Tensor.backward`, `torch.autograd.backward` and `grad` call once each."""
    import torch

    torch.autograd._engine_run_backward = make(torch.autograd._engine_run_backward)


def resolve(name: str) -> Any:
    """Return the object of a dotted name. Raises `ImportError` or `AttributeError` if there is none."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = import_module(".".join(parts[:length]))
        except ModuleNotFoundError as error:
            if error.name is None or not name.startswith(error.name):
                raise  # something else is missing
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        return found
    raise ImportError(f"no module {parts[0]}")


def troubles() -> dict[str, str]:
    """Return the names that are not as expected in this torch, with the fault of each."""
    found = {each.name: each.trouble() for each in INTERNALS}
    found |= {f"{each.of}: {each.name}": each.trouble() for each in ATTRIBUTES}
    return {name: trouble for name, trouble in found.items() if trouble is not None}


@functools.cache
def is_usable() -> bool:
    """Return whether this torch is a tested version, or has every name all the same; warn if not.

    The names of a tested version are not looked up: those of Inductor alone take seconds to load.
    """
    import torch

    if not (TORCH.is_older(torch.__version__) or TORCH.is_newer(torch.__version__)):
        return True
    lacks = sorted(troubles())
    if lacks:
        logger.warning(
            "deepytorch is off: torch %s differs from %s, which it is tested with, in %s. Install one of these, or see "
            "`python -m deepytorch.torch_internals`.",
            torch.__version__, TORCH, ", ".join(lacks),
        )  # fmt: skip
    return not lacks


def _takes(function: Any, places: int, names: tuple[str, ...]) -> bool:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a function of C++ shows its signature only when it is called
        return True
    try:
        signature.bind(*range(places), **dict.fromkeys(names))
    except TypeError:
        return False
    return True


def main() -> int:
    """Print the table; return 1 if something is not as expected."""
    import torch
    from rich.console import Console
    from rich.table import Table

    wrong = troubles()
    table = Table(box=None, padding=(0, 2, 0, 0), title=f"torch {torch.__version__}", title_justify="left")
    for heading in ("name", "used for", "as expected"):
        table.add_column(heading, overflow="fold")
    names = {each.name: each.why for each in INTERNALS}
    names |= {f"{each.of}: {each.name}": each.why for each in ATTRIBUTES}
    for name, why in names.items():
        table.add_row(name, why, wrong.get(name, "yes"))
    console = Console()
    console.print(table)
    console.print(f"{len(names) - len(wrong)} of {len(names)} are as expected.")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
