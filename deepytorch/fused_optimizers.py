"""Torch's fused forms of Adam, AdamW and SGD on a CPU, for models that we compile, if the script lets torch choose.

Without `foreach` and `fused` torch loops over parameters and operators on a CPU, which takes two to four times as long.
A fused form computes the same in one pass, in another order of rounding. The Trainer uses it by itself; a plain loop
seldom does.

A fused form is used only for parameters of a step that we compile, so that models that we leave alone are the same to
the last bit. It is not used with several ranks, whose replicas have to stay alike while one rank may switch sooner than
the others.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import adam as adam_module
from torch.optim import sgd as sgd_module
from torch.utils.weak import WeakIdKeyDictionary

from deepytorch.patches import replace
from deepytorch.switch import SWITCH

_COMPILED = WeakIdKeyDictionary()  # parameters
_PLAIN = (torch.Tensor, torch.nn.Parameter)  # the only classes of tensors that are accepted
_ADAM_NUMBERS = ("lr", "beta1", "beta2", "eps", "weight_decay")
_SGD_NUMBERS = ("lr", "momentum", "dampening", "weight_decay")
_CHOSEN = ("foreach", "fused", "grad_scale", "found_inf")  # by the script
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
    replace(adam_module, "adam", _choosing_adam, "take Adam's fused form on a CPU", always=True)
    replace(sgd_module, "sgd", _choosing_sgd, "take SGD's fused form on a CPU", always=True)


def _choosing_adam(original: Callable[..., Any]) -> Callable[..., Any]:
    def adam(*lists: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling() or not _fuses_adam(lists, options):
            return original(*lists, **options)
        done = original(*lists, **{**options, "fused": True})
        # The fused form does not bump versions: a backward of earlier results would silently use the new values.
        parameters, _, averages, squares, *_ = lists
        torch.autograd.graph.increment_version([*parameters, *averages, *squares])
        return done

    return adam


def _choosing_sgd(original: Callable[..., Any]) -> Callable[..., Any]:
    def sgd(*lists: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling() or not _fuses_sgd(lists, options):
            return original(*lists, **options)
        done = original(*lists, **{**options, "fused": True})
        parameters, _, buffers = lists
        torch.autograd.graph.increment_version([*parameters, *[each for each in buffers if each is not None]])
        return done

    return sgd


def _fuses_adam(lists: tuple[Any, ...], options: dict[str, Any]) -> bool:
    """Return whether torch's fused form can replace the one that torch would choose.

    The fused form goes through memory without a check of shapes and layouts, and accepts few types of numbers.
    Arguments that differ from those of nearly all scripts stay with the loop, which is right or raises.
    """
    if len(lists) != 6 or not _is_plain(options, _ADAM_NUMBERS, ("maximize", "decoupled_weight_decay")):
        return False
    if any(options.get(name, False) is not False for name in _OFF):
        return False
    parameters, gradients, averages, squares, _, steps = lists
    return (
        _are_ours(parameters, gradients)
        and len({id(each) for each in steps}) == len(parameters) == len(averages) == len(squares)
        and _are_like(averages, parameters)
        and _are_like(squares, parameters)
        and all(each.device.type == "cpu" and each.dtype == torch.float32 for each in steps)
    )


def _fuses_sgd(lists: tuple[Any, ...], options: dict[str, Any]) -> bool:
    """Return whether torch's fused form of SGD can be taken, see `_fuses_adam`.

    It makes the buffers of the first step for all parameters at once, so that some cannot begin later than others.
    """
    if len(lists) != 3 or not _is_plain(options, _SGD_NUMBERS, ("maximize", "nesterov")):
        return False
    if options.get("has_sparse_grad", False):
        return False
    parameters, gradients, buffers = lists
    if len(buffers) != (len(parameters) if options["momentum"] else 0):
        return False
    begun = [each for each in buffers if each is not None]
    return _are_ours(parameters, gradients) and (
        not begun or (len(begun) == len(buffers) and _are_like(buffers, parameters))
    )


def _is_plain(options: dict[str, Any], numbers: tuple[str, ...], switches: tuple[str, ...]) -> bool:
    """Return whether the script lets torch choose, in a process alone, and numbers and switches are of their types."""
    if SWITCH.paused or _other_ranks():
        return False
    for name in _CHOSEN:
        if options.get(name) is not None:
            return False
    for name in switches:
        if type(options.get(name, False)) is not bool:
            return False
    return {type(options.get(name)) for name in numbers} <= {int, float}


def _are_ours(parameters: list[Any], gradients: list[Any]) -> bool:
    """Return whether all parameters are of compiled steps, and both lists are as the fused forms take them."""
    if len(parameters) != len(gradients):
        return False
    for each in parameters:
        if each not in _COMPILED:
            return False
    return _are_like(gradients, parameters) and _are_like(parameters, parameters)


def _are_like(tensors: list[Any], parameters: list[Any]) -> bool:
    """Return whether tensors are float32 ones on a CPU, in one piece, each of the shape of its parameter."""
    for tensor, parameter in zip(tensors, parameters, strict=True):
        if not (
            type(tensor) in _PLAIN
            and tensor.dtype == torch.float32
            and tensor.device.type == "cpu"
            and tensor.shape == parameter.shape
            and tensor.is_contiguous()
        ):
            return False
    return True


def _other_ranks() -> bool:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_world_size() > 1
    return {os.environ.get(name, "1") for name in _RANKS} != {"1"}
