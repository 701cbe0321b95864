"""A script's uses of a packed model's outputs: profiled in the first step, and decisive for later outputs."""

from __future__ import annotations

import contextlib
import hashlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from deepytorch.compiler.report import RegionRecord
from deepytorch.compiler.step.events import RegionEvents
from deepytorch.compiler.step.kept_weights import listen_to_steps
from deepytorch.compiler.step.outputs.deferred import defer, see_autograd_functions
from deepytorch.compiler.step.outputs.pending import Family
from deepytorch.compiler.step.outputs.replay import Replay
from deepytorch.compiler.step.outputs.rules.operands import pads_of
from deepytorch.compiler.step.outputs.tokens import Memo, Pads, Tokens
from deepytorch.compiler.step.route import State, Uses
from deepytorch.errors import DeferredError
from deepytorch.integrations.packed_batch import Find, Show, Side
from deepytorch.parallel_modules import sharding_groups
from deepytorch.passes.samples import Sampler
from deepytorch.torch_internals import tree_leaves

KEPT = 3  # calls in a row of whose outputs a script holds some: it collects them


class Peers:
    """The ranks that run one model together: they hold shards of its weights, or divide its layers among them.

    Empty (false) if a rank runs the model alone. groups: the process groups of these ranks. device: of the tensors that
    they exchange.
    """

    def __init__(self, groups: Sequence[Any], device: torch.device) -> None:
        self._groups = groups
        self._device = device if device.type != "meta" else torch.device("cpu")

    @classmethod
    def of_shards(cls, model: nn.Module) -> Peers:
        """Return the ranks that hold shards of a model's weights."""
        device = next((each.device for each in model.parameters()), torch.device("cpu"))
        return cls(sharding_groups(model), device)

    def __bool__(self) -> bool:
        return bool(self._groups)

    def all_say(self, text: str, number: torch.Tensor | None = None) -> bool:
        """Return whether all ranks have called this with the same text, and the same number on their device (or 0)."""
        digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
        told = torch.tensor([digest, 0], device=self._device)
        if number is not None:
            told[1] = number
        largest = self._largest(torch.cat([told, -told]))
        return largest[:2] == [-each for each in largest[2:]]

    def highest(self, *numbers: int) -> list[int]:
        """Return the largest number that a rank has called this with, at each place."""
        return self._largest(torch.tensor(numbers, device=self._device))

    def _largest(self, told: torch.Tensor) -> list[int]:
        for group in self._groups:
            torch.distributed.all_reduce(told, torch.distributed.ReduceOp.MAX, group)
        return told.tolist()  # type: ignore[no-any-return]


class Buffers:
    """Copies of a model's buffers from the last `keep`, which copies anew only those that were written to."""

    def __init__(self, model: nn.Module) -> None:
        self._buffers = [each for each in model.buffers() if not each.is_inference()]
        self._copies: list[tuple[int, torch.Tensor]] = [(-1, each) for each in self._buffers]

    def keep(self) -> None:
        """Keep the buffers before a call that may have to be undone."""
        for place, (buffer, (version, _)) in enumerate(zip(self._buffers, self._copies, strict=True)):
            if buffer._version != version:
                self._copies[place] = (buffer._version, buffer.detach().clone())

    def put_back(self) -> None:
        """Undo all writes since the last `keep`."""
        with torch.no_grad():
            for buffer, (version, copy) in zip(self._buffers, self._copies, strict=True):
                if buffer._version != version:
                    buffer.copy_(copy)


@contextlib.contextmanager
def with_weights(model: nn.Module, others: Mapping[int, torch.Tensor]) -> Iterator[None]:
    """Put other tensors in the place of a model's parameters inside of the block. others: by the parameters' ids."""
    places = [
        (module._parameters, name, each)
        for module in model.modules()
        for name, each in module._parameters.items()
        if others and each is not None and id(each) in others
    ]
    try:
        for parameters, name, each in places:
            parameters[name] = others[id(each)]  # type: ignore[assignment]
        yield
    finally:
        for parameters, name, each in places:
            parameters[name] = each


class OutputUses:
    """The script's uses of the outputs of one kind of calls.

    Ranks that hold shards of one model have to agree: they profile their calls until each has had a backward, whatever
    its batches are, and exchange the uses before each call until then. For such ranks a new use in a later call is an
    error.

    can_replay: whether this rank alone can run a call once more.
    """

    def __init__(self, record: RegionRecord, model: nn.Module, peers: Peers | None, *, can_replay: bool) -> None:
        self.events = RegionEvents(record, State(packs=True, defers=True), can_replay=can_replay)
        self.parameters, self.buffers, self._parts = list(model.parameters()), Buffers(model), list(model.modules())
        self.sampler = Sampler()
        listen_to_steps()
        self._peers, self._calls = peers, 0
        self._given: deque[Family] = deque(maxlen=KEPT)  # the outputs of the last calls

    def begin(self) -> None:
        """Count a call that begins.

        An evaluation that keeps logits puts them together in the end, and would need the pads of every call then, when
        the weights may be others. So its first calls are profiled until this would have shown.
        """
        self._calls += 1
        if not torch.is_grad_enabled() and len(self._given) == KEPT and all(each.is_held() for each in self._given):
            self.events.keeps_outputs()
            for family in self._given:
                family.compute()

    @property
    def is_profiling(self) -> bool:
        """Return whether a call was profiled, and none has had its backward."""
        return self.events.state.profiled > 0 and not self.events.state.knows_uses

    def profiled(self, outputs: Any = None) -> None:
        """Note a call that was profiled. A rank alone can replay later calls, so it profiles one.

        outputs: of ranks that share weights, whose backward tells that the script has used them.
        """
        if self._peers:
            self.events.profiled(tree_leaves(outputs))
        elif torch.is_grad_enabled() or self._calls > KEPT:
            self.end_profiling()

    def end_profiling(self) -> None:
        """Profile no later call."""
        self.events.state = self.events.state.profiled_call(trains=False)

    def raise_to(self, uses: Uses) -> None:
        """Take over the uses of another rank."""
        self.events.state = self.events.state.used(uses, "another rank looks at padded positions")

    def modes(self) -> list[bool]:
        """Return which of the model's modules are in training mode."""
        return [each.training for each in self._parts]

    @contextlib.contextmanager
    def in_modes(self, modes: Sequence[bool]) -> Iterator[None]:
        """Put the model's modules in the modes of an earlier call, as `modes` gave them, inside of the block."""
        now = self.modes()
        try:
            for module, mode in zip(self._parts, modes, strict=True):
                module.training = mode
            yield
        finally:
            for module, mode in zip(self._parts, now, strict=True):
                module.training = mode

    def profiling(self) -> Show:
        """Return a function that makes the profiled output of a first call from a padded tensor."""
        see_autograd_functions()
        family = Family()
        self._given.append(family)

        def show(value: torch.Tensor, side: Side, dim: int, name: str, find: Find) -> torch.Tensor:
            finite = Pads(finite=pads_of(value, side.place).finite)  # the same is assumed of later calls
            tokens = Memo(lambda: Tokens.of(side.place, side.place.take(value), finite)) if dim == 1 else None
            return defer(
                value.shape,
                lambda: value,
                dtype=value.dtype,
                device=value.device,
                requires_grad=value.requires_grad,
                name=name,
                tokens=tokens,
                events=self.events,
                family=family,
                profiled=True,
            )

        return show

    def showing(self, again: Replay | None, record: RegionRecord) -> Show:
        """Return a function that makes a deferred output from a packed tensor. again: the padded replay, if any."""
        see_autograd_functions()
        family = Family()
        self._given.append(family)

        def show(packed: torch.Tensor, side: Side, dim: int, name: str, find: Find) -> torch.Tensor:
            shape = list(packed.shape)
            shape[0], shape[dim] = side.num_rows, side.num_positions

            def padded() -> torch.Tensor:
                if again is None:
                    raise DeferredError(
                        f"padded positions of {name!r} are looked at, and this rank alone cannot compute them, as "
                        "other ranks hold a part of the model; expected them to be looked at in the first step of "
                        "training, after which all ranks compute them. Do so, look at real positions only, or pass "
                        "deepytorch.configure(options={'unpad': False})"
                    )
                known, seconds = again.has_run, again.seconds
                found = find(again.outputs(name)[0])
                record.steps_replayed += not known
                record.replay_seconds += again.seconds - seconds
                return found

            return defer(
                shape,
                padded,
                dtype=packed.dtype,
                device=packed.device,
                requires_grad=packed.requires_grad,
                name=name,
                tokens=Memo(lambda: side.tokens(packed)) if dim == 1 else None,
                events=self.events,
                family=family,
            )

        return show
