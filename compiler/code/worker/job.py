"""The job for another process: everything it needs to compile a graph as this one would, under the same cache keys."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import fx

from deepytorch.compiler.code import inductor_faults
from deepytorch.compiler.code.data_parallel import Members, layout
from deepytorch.compiler.code.lower_region import RegionLowering
from deepytorch.compiler.code.nested import prepare_nested
from deepytorch.compiler.code.worker.gpu import Gpu
from deepytorch.compiler.code.worker.graph_data import CannotSend, GraphData
from deepytorch.passes.ops import reduce
from deepytorch.torch_internals import FakeTensor, FakeTensorMode, dynamo_config, functorch_config, inductor_config
from deepytorch.version import __version__

_LARGEST_CONSTANT = 1 << 20  # values of a tensor that a graph holds, and that is sent
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_CPU = torch.device("cpu")
_STATIC = "_dynamo_static_input_type"
_CONFIGS = {"dynamo": dynamo_config, "functorch": functorch_config, "inductor": inductor_config}


@dataclass(frozen=True)
class Argument:
    """The description of a graph's argument for a compiler: everything but a tensor's values.

    value: of an argument that is not a tensor.
    """

    value: Any = None
    is_parameter: bool = False
    is_leaf: bool = True
    dtype: torch.dtype | None = None
    size: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    offset: int = 0
    storage_bytes: int = 0
    requires_grad: bool = False
    static: str | None = None  # Dynamo's mark on buffers, whose memory stays where it is
    device: torch.device = field(default=_CPU, repr=False)

    @classmethod
    def of(cls, value: Any, kinds: Sequence[str] = ("cpu",)) -> Argument:
        """Return the description of a value. Raises `CannotSend` for a tensor that another process cannot make up.

        kinds: of devices for which another process may compile.
        """
        if not isinstance(value, torch.Tensor):
            if not isinstance(value, (int, float, bool, str, type(None))):
                raise CannotSend(f"an argument is a {type(value).__name__}")
            return cls(value)
        is_parameter = isinstance(value, torch.nn.Parameter)
        if type(value) is not torch.Tensor and type(value) is not torch.nn.Parameter:
            raise CannotSend(f"an argument is a {type(value).__name__}")
        if value.device.type not in kinds:
            raise CannotSend(f"an argument is on {value.device.type}, which another process would take memory of")
        if value.layout is not torch.strided or value.is_quantized or value.is_conj() or value.is_neg():
            raise CannotSend("an argument is no plain dense tensor")
        return cls(
            is_parameter=is_parameter,
            is_leaf=value.is_leaf,
            dtype=value.dtype,
            size=tuple(value.shape),
            stride=value.stride(),
            offset=int(value.storage_offset()),
            storage_bytes=value.untyped_storage().nbytes(),
            requires_grad=value.requires_grad,
            static=getattr(value, _STATIC, None),
            device=value.device,
        )

    def known_by(self, varying: tuple[int, ...]) -> str:
        """Return as text everything that compiled code depends on, without the sizes that vary from call to call."""
        if not varying:
            return repr(self)
        size = ["*" if dim in varying else length for dim, length in enumerate(self.size)]
        dense, length = True, 1
        for dim in reversed(range(len(self.size))):
            dense = dense and self.stride[dim] == length
            length *= self.size[dim]
        stride = "dense" if dense else repr(self.stride)
        return repr((size, stride, self.is_parameter, self.is_leaf, self.dtype, self.requires_grad, self.static))

    def make(self, is_fake: bool = False) -> Any:
        """Return an argument of this description. Its memory is allocated and not touched, so that it costs none.

        is_fake: in a mode of fake tensors, in which it has none; needed for devices other than the CPU.
        """
        if self.dtype is None:
            return self.value
        if is_fake:
            storage = torch.empty(self.storage_bytes, dtype=torch.uint8, device=self.device).untyped_storage()
        else:
            storage = torch.UntypedStorage(self.storage_bytes)
        empty = torch.empty(0, dtype=self.dtype, device=self.device)
        tensor = empty.set_(storage, self.offset, self.size, self.stride)
        if self.static is not None:
            setattr(tensor, _STATIC, self.static)
        if self.is_parameter:
            return torch.nn.Parameter(tensor, requires_grad=self.requires_grad)
        if self.requires_grad and not self.is_leaf:
            leaf = torch.empty(0, dtype=self.dtype, device=self.device, requires_grad=True)
            computed = leaf.clone()  # not a view of a leaf, into which a graph could not write
            computed.data = tensor
            return computed
        return tensor.requires_grad_(self.requires_grad)


@dataclass(frozen=True)
class Settings:
    """The state of this process that compiled code depends on."""

    threads: int
    default_dtype: torch.dtype
    grad: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    autocast_cache: bool
    deterministic: tuple[bool, bool, bool]
    matmul_precision: str
    configs: Mapping[str, Mapping[str, Any]]

    @classmethod
    def here(cls) -> Settings:
        """Return the present settings of this process."""
        return cls(
            torch.get_num_threads(),
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
            tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")),
            torch.is_autocast_cache_enabled(),
            (
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
                torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
            ),
            torch.get_float32_matmul_precision(),
            {name: dict(config.save_config_portable()) for name, config in _CONFIGS.items()},
        )

    def apply(self) -> None:
        """Make these settings the process's own."""
        torch.set_num_threads(self.threads)
        torch.set_default_dtype(self.default_dtype)
        torch.set_grad_enabled(self.grad)
        for kind, on, dtype in self.autocast:
            torch.set_autocast_enabled(kind, on)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(self.autocast_cache)
        enabled, warn_only, fill = self.deterministic
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
        if torch.get_float32_matmul_precision() != self.matmul_precision:  # setting it has effects beyond its value
            torch.set_float32_matmul_precision(self.matmul_precision)
        for name, config in _CONFIGS.items():
            now = config.save_config_portable()
            config.load_config({key: value for key, value in self.configs[name].items() if now.get(key) != value})


@dataclass(frozen=True)
class Job:
    """One graph to compile. gradients: the reducer's name, and (argument, member) for each gradient it reduces."""

    graph: GraphData
    code: str
    arguments: tuple[Argument, ...]
    varying: tuple[tuple[int, ...], ...]
    lowering: RegionLowering  # without the gradients of this process
    gradients: tuple[str, tuple[tuple[int, int], ...]] | None
    settings: Settings
    gpu: Gpu | None = None

    @classmethod
    def of(
        cls,
        module: fx.GraphModule,
        arguments: Sequence[Any],
        varying: Sequence[tuple[int, ...]],
        lowering: RegionLowering,
    ) -> Job:
        """Return the job for a graph. Raises `CannotSend` if another process could not compile the same."""
        kinds = ("cpu", "cuda") if lowering.config.compiles_from_sizes else ("cpu",)
        given = tuple(Argument.of(value, kinds) for value in arguments)
        gpu = Gpu.of([each.device for each in given], lowering.config.inductor_options())
        storages = [value.untyped_storage() for value in arguments if isinstance(value, torch.Tensor)]
        memory = [each.data_ptr() for each in storages if each.nbytes()]  # those of size 0 all stand at 0
        if len(set(memory)) != len(memory):
            raise CannotSend("arguments share memory")
        graph = GraphData(module)
        if any(value.numel() > _LARGEST_CONSTANT for value in graph.constants()):
            raise CannotSend("a large tensor is part of the graph")
        gradients = lowering.gradients
        named = None if gradients is None else (gradients.name, gradients.members(arguments))
        code = module.graph.python_code("self").src
        return cls(graph, code, given, tuple(varying), lowering.with_gradients(None), named, Settings.here(), gpu)

    def digest(self) -> str:
        """Return a digest that is equal for jobs that compile to the same code, in any process of this machine."""
        parts = [
            __version__, inductor_faults.digest(), torch.__version__, sys.version, platform.machine(), _cpu(),
            self.code,
            repr([each.known_by(dims) for each, dims in zip(self.arguments, self.varying, strict=True)]),
            repr(self.varying), self.lowering.plan.digest(), repr(self.gradients), repr(self.graph.constants()),
            json.dumps(_plain(asdict(self.settings)), sort_keys=True),
        ]  # fmt: skip
        if self.gpu is not None:
            parts += [repr(self.gpu), repr([each.device for each in self.arguments])]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def compile(self) -> None:
        """Compile the graph, which fills the caches. To be called in a process that does not train."""
        self.settings.apply()
        if self.gpu is not None:
            self.gpu.enter()
        is_fake = self.lowering.config.compiles_from_sizes
        with FakeTensorMode() if is_fake else contextlib.nullcontext():
            arguments = [each.make(is_fake) for each in self.arguments]
        gradients = None
        if self.gradients is not None:
            name, members = self.gradients
            gradients = Members(name, {id(arguments[place]): member for place, member in members})
            reduce.EXPECTED[name] = {member: layout(arguments[place]) for place, member in members}
        lowering = self.lowering.with_gradients(gradients)

        def lower(traced: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
            if is_fake:
                _name_types(traced, example_inputs)
            return lowering.lower(traced, example_inputs)

        prepare_nested(self.graph.module(), lower, arguments, self.varying)


def _name_types(traced: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
    """Call fake inputs of Dynamo's graph what they stand for: their classes are in the code, which is in the key."""
    for node, value in zip(traced.graph.find_nodes(op="placeholder"), example_inputs, strict=True):
        if node.type is FakeTensor:
            node.type = torch.nn.Parameter if isinstance(value, torch.nn.Parameter) else torch.Tensor
    traced.recompile()


@functools.cache
def _cpu() -> str:
    """Return the names of the CPU's instruction sets, on which compiled code depends."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        return next((line for line in file if line.startswith(("flags", "Features"))), "")
    return platform.processor()


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(repr(_plain(each)) for each in value)
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else _ADDRESS.sub("", repr(value))
