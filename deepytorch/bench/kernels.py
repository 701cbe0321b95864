"""`deepytorch bench kernels`: the compiled form of each Triton kernel, also for GPUs that are not present."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any

from deepytorch.errors import ConfigError
from deepytorch.machine_code import CAPABILITIES, Variant, compile_for, troubles

MODULES = (
    "deepytorch.comm.kernels.buckets_triton",
    "deepytorch.comm.kernels.symmetric_triton",
    "deepytorch.passes.ops.linear_cross_entropy_kernels",
    "deepytorch.passes.ops.pack_facts_triton",
    "deepytorch.passes.ops.pack_triton",
    "deepytorch.passes.ops.varlen_attention_triton",
)


@dataclass(frozen=True)
class KernelRow:
    """One way to launch a kernel, compiled for one compute capability; `troubles` is empty if all is well."""

    kernel: str
    variant: str
    capability: int
    registers: int
    spilled_bytes: int
    shared_bytes: int
    instructions: tuple[str, ...]
    compile_seconds: float
    troubles: tuple[str, ...]


def variants(named: str = "") -> Iterator[Variant]:
    """Yield every kernel as real models launch it; only those with `named` in their names.

    Raises `ConfigError` if Triton is not installed, or no kernel has that name.
    """
    try:
        import_module("triton")
    except ImportError:
        raise ConfigError("Triton is not installed: `pip install 'deepytorch[interpreter]'`.") from None
    found = [each for module in MODULES for each in import_module(module).VARIANTS if named in each.kernel]
    if not found:
        raise ConfigError(f"No kernel has {named!r} in its name; expected a part of one of {', '.join(MODULES)}.")
    yield from found


def run_kernels(
    capabilities: Sequence[int] = CAPABILITIES, named: str = "", notify: Callable[[str], None] = lambda text: None
) -> list[KernelRow]:
    """Compile every variant for each capability (80 for sm_80). Triton's errors are passed on."""
    unknown = [each for each in capabilities if each not in CAPABILITIES]
    if unknown:
        raise ConfigError(f"capability {unknown[0]}; expected some of {', '.join(map(str, CAPABILITIES))}.")
    rows = []
    for variant in variants(named):
        name = variant.kernel.rpartition(":")[2].lstrip("_")
        for capability in capabilities:
            notify(f"{name}, {variant.label}, sm_{capability}")
            begin = time.perf_counter()
            code = compile_for(variant, capability)
            rows.append(
                KernelRow(
                    name,
                    variant.label,
                    capability,
                    code.registers,
                    code.spilled_bytes,
                    code.shared_bytes,
                    code.instructions,
                    round(time.perf_counter() - begin, 2),
                    tuple(troubles(variant, code)),
                )
            )
    return rows


def to_json(rows: Sequence[KernelRow]) -> dict[str, Any]:
    """Return the table as JSON values, with the versions that compiled it."""
    import torch
    import triton

    return {"triton": triton.__version__, "torch": torch.__version__, "kernels": [asdict(row) for row in rows]}
