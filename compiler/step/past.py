"""The state in which a call began, from which it can be run again as eager would have run it.

[Note: Past]
Deferred outputs, second backwards and packing at model entry run a call once more, long after it. A `Past` is made
before each such call, so it holds little: references to the inputs, counts of the writes into them, and the states of
random generators. Tensors are copied in two cases only. Whoever makes the past copies tensors that the call itself
writes into; weights are copied right before an optimizer changes them (`kept_weights`).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from typing import Any

import torch

# Whether only the values of a call are wanted, without gradients: a padded replay then keeps nothing for a backward.
VALUES_ALONE: ContextVar[bool] = ContextVar("VALUES_ALONE", default=False)


class Modes:
    """Grad mode, inference mode and autocast as they are now, to be entered later."""

    __slots__ = ("_autocasts", "_grad", "_inference")

    def __init__(self, grad: bool | None = None) -> None:
        """Record the modes. grad: the grad mode to enter later; None for the present one."""
        self._grad = torch.is_grad_enabled() if grad is None else grad
        self._inference = torch.is_inference_mode_enabled()
        self._autocasts = (
            ("cpu", torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
            ("cuda", torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")),
        )

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Set the modes inside of the block; blocks may be nested, and run in several threads."""
        with ExitStack() as modes:
            modes.enter_context(torch.inference_mode(self._inference))
            modes.enter_context(torch.set_grad_enabled(self._grad))
            for kind, enabled, dtype in self._autocasts:
                if enabled or torch.is_autocast_enabled(kind):
                    # without autocast's cache: it may hold a cast of a weight that was made without gradients
                    modes.enter_context(torch.autocast(kind, dtype, enabled, cache_enabled=False))
            yield


class Past:
    """The state in which a call began.

    Attributes:
        eager: Runs the call on its inputs, operator by operator.
        inputs: The inputs of the call; after `let_go`, weak references to tensors.
        versions: Counts of writes into inputs, by place.
        copies: Copies of inputs, by place: those that the call writes to, made before it, and weights, made by
            `copy_inputs` before an optimizer changes them.
        random: The generators that the call may draw from, with their states.
        modes: Grad mode, inference mode and autocast.
    """

    __slots__ = (
        "__weakref__", "copied_bytes", "copies", "eager", "inputs", "kept_places", "modes", "random", "trained",
        "versions",
    )  # fmt: skip

    def __init__(
        self,
        eager: Callable[..., Any],
        inputs: Sequence[Any],
        versions: dict[int, int],
        copies: dict[int, torch.Tensor],
        generators: Iterable[torch.Generator] = (),
    ) -> None:
        self.eager, self.inputs, self.versions, self.copies = eager, inputs, versions, copies
        self.random: list[tuple[torch.Generator, torch.Tensor]] = []
        for generator in generators:
            self.random.append((generator, generator.get_state()))
        self.modes = Modes()
        self.trained: Sequence[bool] = ()  # of the inputs, which required gradients: set by who computes outputs later
        self.kept_places: set[int] = set()  # of the copies, those that `copy_inputs` has made
        self.copied_bytes = 0  # by `kept_weights`, for a look at pads

    def let_go(self) -> None:
        """Hold the input tensors weakly, so that they live no longer than others keep them."""
        self.inputs = [weakref.ref(each) if isinstance(each, torch.Tensor) else each for each in self.inputs]

    def living_inputs(self) -> Sequence[Any] | None:
        """Return the inputs, or None if one is gone."""
        found = [each() if isinstance(each, weakref.ref) else each for each in self.inputs]
        gone = [isinstance(one, weakref.ref) and other is None for one, other in zip(self.inputs, found, strict=True)]
        return None if any(gone) else found

    def changed(self) -> list[int]:
        """Return the places of inputs that were written to since the call began; none if an input is gone."""
        inputs = self.living_inputs()
        return [] if inputs is None else [place for place, at in self.versions.items() if inputs[place]._version != at]

    def rewind(self) -> None:
        """Set the random generators to their states at the begin of the call."""
        for generator, state in self.random:
            generator.set_state(state)

    @contextlib.contextmanager
    def as_it_was(self, others: Sequence[torch.Generator] = ()) -> Iterator[None]:
        """Set modes and generators as they were at the call, and restore them behind the block.

        others: further generators from which the code in the block may draw; they are restored too.
        """
        generators = {id(each): each for each in (*(generator for generator, _ in self.random), *others)}
        now = [(generator, generator.get_state()) for generator in generators.values()]
        with self.modes.entered():
            try:
                self.rewind()
                yield
            finally:
                for generator, state in now:
                    generator.set_state(state)

    @contextlib.contextmanager
    def trained_as_it_was(self) -> Iterator[None]:
        """Give weights that a script has frozen or thawed since the call the `requires_grad` of then, in the block."""
        pairs = [(each, flag) for each, flag in zip(self.inputs, self.trained, strict=False) if _is_leaf(each)]
        changed = [each for each, flag in pairs if each.requires_grad != flag]
        for each in changed:
            each.requires_grad_(not each.requires_grad)
        try:
            yield
        finally:
            for each in changed:
                each.requires_grad_(not each.requires_grad)

    # ------------------------------------------------------------------ weights that an optimizer changes

    def bytes_of(self, places: Iterable[int], copies: Mapping[int, torch.Tensor]) -> int:
        """Return the bytes that copies of the inputs at `places` would take. copies: existing ones, by id."""
        due = [self.inputs[place] for place in places if place not in self.copies]
        return sum(each.nbytes for each in due if id(each) not in copies)

    def copy_inputs(self, places: Iterable[int], copies: dict[int, torch.Tensor]) -> None:
        """Copy the inputs at `places`, which are about to change. copies: existing ones, by id; new ones are added."""
        for place in places:
            given = self.inputs[place]
            if place in self.copies or version_of(given) != self.versions.get(place, -1):
                continue  # changed already: it is too late, and a use of the old value will raise
            if id(given) not in copies:
                copies[id(given)] = given.detach().clone()
            self.copies[place] = copies[id(given)]
            self.kept_places.add(place)


def _is_leaf(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_leaf


def version_of(tensor: torch.Tensor) -> int:
    """Return the count of writes into `tensor`; -1 where none is kept."""
    return -1 if tensor.is_inference() else tensor._version


def generators_of(devices: Iterable[torch.device]) -> list[torch.Generator]:
    """Return the default generators of the CPU and of these devices."""
    indices = sorted({device.index for device in devices if device.type == "cuda"})
    return [torch.default_generator, *(torch.cuda.default_generators[index] for index in indices)]
