"""What a piece of host code costs, as a count: the same on every machine, however busy it is."""

from __future__ import annotations

import sys
from types import FrameType, TracebackType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Calls:
    """Counts the calls of functions, Python's and C's, that this thread makes inside the `with` statement."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Calls:
        sys.setprofile(self._seen)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        sys.setprofile(None)

    def _seen(self, frame: FrameType, event: str, argument: Any) -> None:
        self.count += event in ("call", "c_call")


class Elements(TorchDispatchMode):
    """Counts the elements that operators read inside the `with` statement; views read none."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.count += sum(each.numel() for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor))
        return func(*args, **(kwargs or {}))
