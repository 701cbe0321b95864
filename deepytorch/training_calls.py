"""The choice of a module's calls that may be compiled: training steps into which nobody looks, with draws of their own.

[Note: Repeated draws]
Gradient caching and two passes of one step make a module draw the same random numbers again. Such a script keeps the
state of a generator, calls the module, sets the state back, and calls the module once more, so that both calls draw the
same. A packed call does not draw the numbers of an eager one, so from then on each call runs in eager.

The state of the generators is looked at when calls of armed modules begin and end, with gradients or without. A state
was set back if it was seen before an earlier call, and another state was seen since.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_modules

from deepytorch.switch import SWITCH
from deepytorch.torch_internals import (
    DeviceContext,
    DispatchKey,
    current_graph_task_id,
    dispatch_tls_is_dispatch_key_included,
    forward_ad_level,
    get_function_stack_at,
    len_torch_dispatch_stack,
    len_torch_function_stack,
    top_saved_tensors_default_hooks,
)

# Hooks on every module of the process, which Dynamo does not look for.
_HOOKS_ON_ALL = (
    "_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks", "_global_backward_pre_hooks",
)  # fmt: skip


def trains(module: nn.Module) -> bool:
    """Return whether a call of `module` that begins now may be compiled."""
    return module.training and torch.is_grad_enabled() and not is_traced() and not is_transformed() and is_ours_to_run()


def is_ours_to_run() -> bool:
    """Return whether armed modules are not paused, and no hook is on every module of the process."""
    return not SWITCH.paused and not any(map(vars(torch_modules).get, _HOOKS_ON_ALL))


def is_traced() -> bool:
    """Return whether this code is being traced, and does not run."""
    return torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting() or torch.jit.is_tracing()


def is_transformed() -> bool:
    """Return whether something intercepts this call that could not intercept compiled code.

    That is a transform of `torch.func`, forward mode, a mode that takes calls of operators or functions, or hooks on
    tensors saved for the backward; but not a checkpoint's hooks, since the code it runs again is compiled as well.
    """
    # The dispatcher is asked: a call of functorch's own would make state that each backward node then copies, for good.
    if dispatch_tls_is_dispatch_key_included(DispatchKey.FuncTorchDynamicLayerFrontMode) or forward_ad_level() >= 0:
        return True
    if len_torch_dispatch_stack():
        return True
    for place in range(len_torch_function_stack()):
        if not isinstance(get_function_stack_at(place), DeviceContext):  # of `torch.set_default_device`
            return True
    hooks = top_saved_tensors_default_hooks(False)
    return hooks is not None and getattr(hooks[0], "__module__", "") != "torch.utils.checkpoint"


def of_subclasses(args: Iterable[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the tensors among a call's arguments whose class is derived from `torch.Tensor`.

    These are deferred outputs, parameters, or of a script's own class: see `is_of_the_scripts`.
    """
    found = []
    for value in (*args, *kwargs.values()):
        if type(value) is not torch.Tensor and isinstance(value, torch.Tensor):
            found.append(value)
    return found


def is_of_the_scripts(tensor: torch.Tensor) -> bool:
    """Return whether a subclass's tensor is of a script's own class, which may treat functions as it likes."""
    return not type(tensor).__module__.startswith(("torch.", "deepytorch."))


# ---------------------------------------------------------------------- calls that are to draw the same numbers again

_MOST_STATES = 4096  # the most calls that may come once more: the chunks of a large batch


class SeenStates:
    """The states of this process's generators, as calls of armed modules began and ended."""

    def __init__(self) -> None:
        self._seen: OrderedDict[int, bool] = OrderedDict()  # whether the call had gradients
        self._current: int | None = None
        self._lock = threading.Lock()

    def set_back_to(self, state: int, has_gradients: bool) -> bool | None:
        """Note the state at the begin of a call; if it was set back, return whether the earlier call had gradients.

        The earlier call is the one that began with this state. None if the state was not set back.
        """
        with self._lock:
            found = self._seen.get(state) if state != self._current else None
            self._current = state
            self._seen[state] = has_gradients
            self._seen.move_to_end(state)
            if len(self._seen) > _MOST_STATES:
                self._seen.popitem(last=False)
            return found

    def ended(self, state: int) -> None:
        """Note the state at the end of a call."""
        with self._lock:
            self._current = state


SEEN = SeenStates()


class RepeatedDraws:
    """The detector of repeated draws of one module; a context around each of its calls.

    found: whether a call was to draw the numbers that an earlier one has drawn.
    """

    def __init__(self, device: torch.device) -> None:
        """Watch the generators of the CPU and of `device`, on which the module's parameters are."""
        self._device = device
        self._draws = self._was_set_back = False
        self._began: list[int] = []
        self.found = False

    def __enter__(self) -> None:
        state = self._state()
        self._began.append(state)
        trained = SEEN.set_back_to(state, torch.is_grad_enabled())
        # A checkpoint around the module computes a call again in the backward, in the same way as the first time.
        is_recomputed = bool(trained) and current_graph_task_id() != -1
        self._was_set_back |= trained is not None and not is_recomputed
        self.found = self._was_set_back and self._draws

    def __exit__(self, *error: object) -> None:
        state = self._state()
        self._draws |= state != self._began.pop()
        SEEN.ended(state)

    def _state(self) -> int:
        """Return a hash of the generators' states.

        Of the Mersenne Twister's 5056 bytes it takes the seed, the position, 61 of its 624 words, which all change at
        once, and the normal number that is kept for the next call. To hash the rest took half of the time of a call.
        """
        generators = [torch.default_generator]
        if self._device.type == "cuda" and torch.cuda.is_initialized():
            generators.append(torch.cuda.default_generators[self._device.index or 0])
        told_apart_by = b""
        for generator in generators:
            state = generator.get_state().numpy()  # uint8, on the CPU
            told_apart_by += state[:512].tobytes() + state[-40:].tobytes()
        return hash(told_apart_by)
