"""A device that is not there: tensors on the CPU are marked as its own, and whatever would wait for it is counted.

What is made of marked tensors is marked, by its memory. Counted are operators that hand values or a number of values to
the host: `.item()`, `.tolist()`, `bool()`, `nonzero`, `unique`, masks as indices, blocking copies to memory that is not
the device's. Operators of deepytorch count as one kernel each, but those that only hand gradients on.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

aten = torch.ops.aten

WAITING = {
    aten._local_scalar_dense.default, aten.item.default, aten.is_nonzero.default, aten.equal.default,
    aten.nonzero.default, aten.nonzero_numpy.default, aten.masked_select.default, aten._unique.default,
    aten._unique2.default, aten.unique_dim.default, aten.unique_consecutive.default, aten.repeat_interleave.Tensor,
    aten.bincount.default,
}  # fmt: skip
READING = ("tolist", "cpu", "numpy")  # no operators on the CPU
INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
SEEN_THROUGH = {f"deepytorch::reduce_{name}" for name in ("start", "part", "rows", "wait")}


class StandIn(TorchDispatchMode):
    """Counts what would wait for the device while it is entered. found: where from, one text each."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._marks: dict[int, StorageWeakRef] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code runs as it does without."""
        return True

    def mark(self, tensor: Tensor) -> Tensor:
        """Let a tensor be the device's; what shares its memory is, too."""
        storage = tensor.untyped_storage()
        self._marks[storage._cdata] = StorageWeakRef(storage)
        return tensor

    def move(self, batch: Any) -> Any:
        """A batch of tensors on the host, copied to the device without waiting for it."""
        return tree_map_only(Tensor, lambda each: self.mark(each.clone()), batch)

    def is_marked(self, tensor: Tensor) -> bool:
        """Whether a tensor is on the device."""
        if type(tensor) is not Tensor and not isinstance(tensor, torch.nn.Parameter):
            return False
        with contextlib.suppress(RuntimeError, NotImplementedError):
            known = self._marks.get(tensor.untyped_storage()._cdata)
            return known is not None and not known.expired()
        return False

    @property
    def count(self) -> int:
        """How often the host would have waited."""
        return len(self.found)

    def note(self, what: str) -> None:
        """The host waits."""
        self.found.append(f"{what}\n{''.join(traceback.format_stack(limit=24)[:-2])}")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        marked = any(self.is_marked(each) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor))
        if marked and self._waits(func, args, kwargs):
            self.note(str(func))
        if func.name() in SEEN_THROUGH:
            with self:
                made = func(*args, **kwargs)
        else:
            made = func(*args, **kwargs)
        if marked and func is not aten.copy_.default:
            for each in tree_leaves(made):
                if isinstance(each, Tensor):
                    self.mark(each)
        return made

    def _waits(self, func: Any, args: Any, kwargs: Any) -> bool:
        if func in WAITING:
            return True
        if func in INDEXED:
            return any(isinstance(each, Tensor) and each.dtype in (torch.bool, torch.uint8) for each in args[1])
        if func is aten.copy_.default:
            blocking = not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
            return blocking and self.is_marked(args[1]) and not self.is_marked(args[0])
        return False


def patch_reads(monkeypatch: pytest.MonkeyPatch, would_sync: Callable[[Any], bool]) -> None:
    """Say for which tensors a read of the host's waits for a device."""
    for module in ("compiler.step.batch_facts", "compiler.step.host_facts", "comm.gradients.sparse_rows"):
        monkeypatch.setattr(f"deepytorch.{module}.read_would_sync", lambda *tensors: any(map(would_sync, tensors)))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """A device that deepytorch takes for one."""
    found = StandIn()
    patch_reads(monkeypatch, found.is_marked)
    # compiled although a mode is entered: a user's would be seen, and would look into the step
    monkeypatch.setattr("deepytorch.training_calls.len_torch_dispatch_stack", lambda: 0)
    return found


@contextlib.contextmanager
def counted(device: StandIn) -> Iterator[StandIn]:
    """Inside, what waits for the device is counted, from nothing."""
    device.found.clear()
    with pytest.MonkeyPatch.context() as patch, device:
        for name in READING:
            patch.setattr(torch.Tensor, name, _noted(device, name), raising=False)
        yield device


def _noted(device: StandIn, name: str) -> Any:
    original = getattr(torch.Tensor, name)

    def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if device.is_marked(tensor):
            device.note(name)
        return original(tensor, *args, **kwargs)

    return read
