"""Torch's fused form of Adam and AdamW on a CPU, for models that we compile, if the script leaves the choice to torch.

Without `foreach` and `fused` torch loops over parameters and operators on a CPU, which takes four times as long. The
fused form computes the same in one pass, in another order of rounding. The Trainer uses it by itself; a plain loop
seldom does.

The fused form is used only for parameters of a step that we compile, so that models that we leave alone are the same to
the last bit. It is not used with several ranks, whose replicas have to stay alike while one rank may switch sooner than
the others.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import adam as adam_module
from torch.utils.weak import WeakIdKeyDictionary

from deepytorch.patches import replace
from deepytorch.switch import SWITCH

_COMPILED = WeakIdKeyDictionary()  # parameters
_PLAIN = (torch.Tensor, torch.nn.Parameter)  # the only classes of tensors that are accepted
_NUMBERS = ("lr", "beta1", "beta2", "eps", "weight_decay")
_OFF = ("capturable", "differentiable", "has_complex", "amsgrad")
_RANKS = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")  # the number of ranks, by torchrun and by MPI


def fuse_for(tensors: Iterable[Any]) -> None:
    """Fuse the optimizer's step for the parameters among `tensors` from now on.

    To be called in every step, since models of one class share a graph. If the first parameter is known, all are.
    """
    found: list[torch.nn.Parameter] = []
    for each in tensors:
        if type(each) is torch.nn.Parameter and each.device.type == "cpu":
            if not found and each in _COMPILED:
                return
            found.append(each)
    if not found:
        return
    for each in found:
        _COMPILED[each] = True
    replace(adam_module, "adam", _choosing, "take Adam's fused form on a CPU", always=True)


def _choosing(original: Callable[..., Any]) -> Callable[..., Any]:
    def adam(*lists: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling() or not _is_fused(lists, options):
            return original(*lists, **options)
        done = original(*lists, **{**options, "fused": True})
        # The fused form does not bump versions: a backward of earlier results would silently use the new values.
        parameters, _, averages, squares, *_ = lists
        torch.autograd.graph.increment_version([*parameters, *averages, *squares])
        return done

    return adam


def _is_fused(lists: tuple[Any, ...], options: dict[str, Any]) -> bool:
    """Return whether torch's fused form can replace the one that torch would choose.

    The fused form goes through memory without a check of shapes and layouts, and accepts few types of numbers.
    Arguments that differ from those of nearly all scripts stay with the loop, which is right or raises.
    """
    if SWITCH.paused or len(lists) != 6 or _other_ranks():
        return False
    if any(options.get(name) is not None for name in ("foreach", "fused", "grad_scale", "found_inf")):
        return False
    if any(options.get(name, False) is not False for name in _OFF):
        return False
    if any(type(options.get(name, False)) is not bool for name in ("maximize", "decoupled_weight_decay")):
        return False
    if any(type(options.get(name)) not in (int, float) for name in _NUMBERS):
        return False
    parameters, gradients, averages, squares, _, steps = lists
    return (
        all(each in _COMPILED for each in parameters)
        and all(map(_is_like, gradients, parameters))
        and all(map(_is_like, averages, parameters))
        and all(map(_is_like, squares, parameters))
        and all(map(_is_like, parameters, parameters))
        and all(each.device.type == "cpu" and each.dtype == torch.float32 for each in steps)
        and len({id(each) for each in steps}) == len(parameters) == len(gradients) == len(averages) == len(squares)
    )


def _is_like(tensor: torch.Tensor, parameter: torch.Tensor) -> bool:
    return (
        type(tensor) in _PLAIN
        and tensor.dtype == torch.float32
        and tensor.device.type == "cpu"
        and tensor.shape == parameter.shape
        and tensor.is_contiguous()
    )


def _other_ranks() -> bool:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_world_size() > 1
    return any(os.environ.get(name, "1") != "1" for name in _RANKS)
