"""Detection of scripts that make a module draw the same random numbers again: gradient caching, two passes of one step.

Such a script keeps the state of a generator, calls the module, sets the state back, and calls the module once more, so
that both calls draw the same. A packed call does not draw the numbers of an eager one, so from then on each call runs
in eager.

The state of the generators is looked at when calls of armed modules begin and end, with gradients or without. A state
was set back if it was seen before an earlier call, and another state was seen since.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

import torch

from deepytorch.torch_internals import current_graph_task_id

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
        states = [_told_apart_by(torch.default_generator.get_state())]
        if self._device.type == "cuda" and torch.cuda.is_initialized():
            generator = torch.cuda.default_generators[self._device.index or 0]
            states.append(_told_apart_by(generator.get_state()))
        return hash(tuple(states))


def _told_apart_by(state: torch.Tensor) -> bytes:
    """Return the bytes by which states of a generator (uint8, on the CPU) are told apart.

    Of the Mersenne Twister's 5056 bytes these are the seed, the position, 61 of its 624 words, which all change at
    once, and the normal number that is kept for the next call. To hash the rest took half of the time of a call.
    """
    seen = state.numpy()
    return seen[:512].tobytes() + seen[-40:].tobytes()
