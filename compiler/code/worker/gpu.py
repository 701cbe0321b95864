"""The GPU that a graph is compiled for by another process, and what may be asked of that process there."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from deepytorch.compiler.code.worker.graph_data import CannotSend
from deepytorch.torch_internals import inductor_config, sdp_priority_order, set_sdp_priority_order

_CONTEXT_BYTES = 1 << 30  # free on the device, or no process is sent there; a context takes 300 to 500 MB (as reported)
_MOST_BYTES = 64 << 20  # of tensors in that process: constants of graphs, and torch's own of one element
# Options with which Inductor runs kernels while it compiles, to time them.
_TIMES = (
    "max_autotune", "max_autotune_gemm", "benchmark_fusion", "benchmark_combo_kernel", "cpp_wrapper",
    "triton.autotune_at_compile_time",
)  # fmt: skip
# What decides how an operator is traced, beyond what the key of compiled code covers: kinds of attention, and settings.
_ATTENTION = ("flash", "mem_efficient", "math", "cudnn")
_SETTINGS = (
    (torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction"),
    (torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction"),
    (torch.backends.cudnn, "enabled"),
)


@dataclass(frozen=True)
class Gpu:
    """One CUDA device. properties: its name and all else that code depends on.

    attention, settings: what this process allows. order: in which kinds of attention are tried.
    """

    index: int
    properties: str
    attention: tuple[bool, ...]
    settings: tuple[Any, ...]
    order: tuple[int, ...] = ()

    @classmethod
    def of(cls, devices: Sequence[torch.device], options: Mapping[str, Any]) -> Gpu | None:
        """Return the GPU of a graph's arguments, None if they are on the CPU. options: for Inductor.

        Raises `CannotSend` for several devices, and for options with which Inductor would run kernels while it
        compiles.
        """
        found = sorted({each.index or 0 for each in devices if each.type == "cuda"})
        if not found:
            return None
        if len(found) > 1 or torch.cuda.current_device() != found[0]:
            raise CannotSend("arguments are on another device than the current one")
        chosen = {**inductor_config.get_config_copy(), **options}
        for name in _TIMES:
            if chosen.get(name):
                raise CannotSend(f"with {name} kernels are timed while it is compiled")
        about = torch.cuda.get_device_properties(found[0])
        properties = f"{about.name} {about.major}.{about.minor} {about.multi_processor_count}, {_versions()}"
        attention = tuple(getattr(torch.backends.cuda, f"{kind}_sdp_enabled")() for kind in _ATTENTION)
        settings = tuple(getattr(owner, name) for owner, name in _SETTINGS)
        return cls(found[0], properties, attention, settings, tuple(sdp_priority_order()))

    def expect_memory(self) -> None:
        """Raise `CannotSend` where the device has no memory left for the context of another process."""
        free, _ = torch.cuda.mem_get_info(self.index)
        if free < _CONTEXT_BYTES:
            raise CannotSend(f"the device has {free >> 20} MB left, and another context needs {_CONTEXT_BYTES >> 20}")

    def enter(self) -> None:
        """Have this process compile for the device, which makes a context there, and hold next to nothing on it."""
        for kind, is_on in zip(_ATTENTION, self.attention, strict=True):
            getattr(torch.backends.cuda, f"enable_{kind}_sdp")(is_on)
        for (owner, name), value in zip(_SETTINGS, self.settings, strict=True):
            setattr(owner, name, value)
        set_sdp_priority_order(list(self.order))
        torch.cuda.set_device(self.index)
        whole = torch.cuda.get_device_properties(self.index).total_memory
        torch.cuda.set_per_process_memory_fraction(_MOST_BYTES / whole, self.index)


def _versions() -> str:
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = "none"
    return f"CUDA {torch.version.cuda}, Triton {triton}"
