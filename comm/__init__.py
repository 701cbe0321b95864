"""Collectives on torch.distributed: a process group that chooses its own algorithm.

Most programs only need `init_process_group("deepytorch")`. The names in `__all__` are for programs that allocate shared
buffers, compress, or inspect a group. A name is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if __name__ != "deepytorch.comm":
    raise ImportError(
        f"this folder was imported as {__name__!r}, which would load it twice and register its operators twice: "
        "import `deepytorch.comm` instead (`pip install -e .` makes it importable)"
    )

if TYPE_CHECKING:
    from deepytorch.comm.group.bf16_wire import all_reduce_bf16, reduce_scatter_bf16, send_bf16
    from deepytorch.comm.group.buffers import allocate
    from deepytorch.comm.group.compress import all_reduce, overflows
    from deepytorch.comm.group.measuring import measure
    from deepytorch.comm.group.options import Options
    from deepytorch.comm.group.quantized import quantize
    from deepytorch.comm.group.registration import register
    from deepytorch.comm.group.survivors import shrink
    from deepytorch.comm.group.tables import chosen

__all__ = [
    "Options", "all_reduce", "all_reduce_bf16", "allocate", "chosen", "measure", "overflows", "quantize",
    "reduce_scatter_bf16", "register", "send_bf16", "shrink",
]  # fmt: skip

# No module has the name of the object that it holds: importing the module would put it in the object's place.
_HOMES = {
    "Options": "group.options",
    "chosen": "group.tables",
    "register": "group.registration",
    "allocate": "group.buffers",
    "all_reduce": "group.compress",
    "all_reduce_bf16": "group.bf16_wire",
    "reduce_scatter_bf16": "group.bf16_wire",
    "send_bf16": "group.bf16_wire",
    "overflows": "group.compress",
    "measure": "group.measuring",
    "quantize": "group.quantized",
    "shrink": "group.survivors",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
