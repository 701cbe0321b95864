"""Adam and AdamW of a model that we compile: torch's fused form on a CPU, where the script leaves the choice to torch.

Without `foreach` and `fused` torch loops over parameters and operators on a CPU, four times as long. Its fused form
computes the same in another order of rounding, in one pass. Trainer takes it by itself; a plain loop seldom does.

Only for parameters that go into a step that we compile, so that what we leave alone stays as it was to the last bit;
and not beside other ranks, whose replicas have to stay alike while one of them may go over sooner than the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import adam as adam_module
from torch.utils.weak import WeakIdKeyDictionary

from deepytorch.patches import replace
from deepytorch.switch import SWITCH

_COMPILED = WeakIdKeyDictionary()  # parameters
_LISTS = 5  # of tensors like the parameters: themselves, gradients, averages, those of squares, their maxima
_PLAIN = (torch.Tensor, torch.nn.Parameter)  # and no other class of tensors


def fuse_for(tensors: Iterable[Any]) -> None:
    """Fuse the optimizer's step for the parameters among `tensors` from now on.

    To be called in every step, as models of one kind share a graph: all are known where the first one is.
    """
    found = (each for each in tensors if type(each) is torch.nn.Parameter and each.device.type == "cpu")
    first = next(found, None)
    if first is None or first in _COMPILED:
        return
    for each in (first, *found):
        _COMPILED[each] = True
    replace(adam_module, "adam", _choosing, "take Adam's fused form on a CPU", always=True)


def _choosing(original: Callable[..., Any]) -> Callable[..., Any]:
    def adam(*lists: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling() or not _is_fused(lists, options):
            return original(*lists, **options)
        done = original(*lists, **{**options, "fused": True})
        # The fused form tells autograd nothing: a backward of what was computed before would take the new weights.
        torch.autograd.graph.increment_version(lists[0])
        return done

    return adam


def _is_fused(lists: tuple[Any, ...], options: dict[str, Any]) -> bool:
    """Whether torch's fused form can stand for the one that it would take by itself."""
    if SWITCH.paused or len(lists) != _LISTS + 1 or _other_ranks():  # the last list counts steps
        return False
    if not all(options.get(name) in (None, False) for name in ("capturable", "differentiable", "has_complex")):
        return False
    if options.get("foreach") is not None or options.get("fused") is not None:
        return False
    if any(isinstance(options.get(name), torch.Tensor) for name in ("lr", "beta1", "beta2")):
        return False
    parameters, *_ = lists
    return all(each in _COMPILED for each in parameters) and all(
        type(each) in _PLAIN and each.dtype == torch.float32 and each.device.type == "cpu" and each.is_contiguous()
        for tensors in lists[:_LISTS]
        for each in tensors
    )


def _other_ranks() -> bool:
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
