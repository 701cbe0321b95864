"""deepytorch: a training accelerator for PyTorch.

Use it by name, `torch.compile(model, backend="deepytorch")`; this import is needed for
`init_process_group("deepytorch")` and for what `__all__` lists.
It is light on purpose: `torch` and the compiler are loaded when `explain` or `report` is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from wrapt import when_imported

from deepytorch.errors import DeepytorchError
from deepytorch.version import __version__

if TYPE_CHECKING:
    from deepytorch.api import explain, report

__all__ = ["DeepytorchError", "__version__", "explain", "report"]

# `init_process_group("deepytorch")` works after this import, whichever of torch and deepytorch comes first.
when_imported("torch.distributed.distributed_c10d")(lambda _: import_module("deepytorch.comm.register").register())

_FROM_API = frozenset({"explain", "report"})


def __getattr__(name: str) -> object:
    if name not in _FROM_API:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module("deepytorch.api"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
