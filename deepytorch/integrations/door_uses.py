"""What a script does with the outputs of a packed model: seen in the first step, and what it is handed after that."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import nn

from deepytorch.compiler.report import RegionRecord
from deepytorch.compiler.step.events import RegionEvents
from deepytorch.compiler.step.outputs.deferred import defer
from deepytorch.compiler.step.outputs.pending import Family
from deepytorch.compiler.step.outputs.replay import Replay
from deepytorch.compiler.step.outputs.rules.operands import pads_of
from deepytorch.compiler.step.outputs.tokens import Memo, Pads, Tokens
from deepytorch.compiler.step.route import State, Uses
from deepytorch.errors import DeferredError
from deepytorch.integrations.door_proof import sharding_groups
from deepytorch.integrations.packed_batch import Find, Show, Side
from deepytorch.passes.samples import Sampler


class Peers:
    """The ranks that hold parts of one model, and gather its weights in every call of it together. Empty (false) where
    weights are not sharded.
    """

    def __init__(self, model: nn.Module) -> None:
        self._groups = sharding_groups(model)
        device = next((each.device for each in model.parameters()), torch.device("cpu"))
        self._device = device if device.type != "meta" else torch.device("cpu")

    def __bool__(self) -> bool:
        return bool(self._groups)

    def all_say(self, text: str) -> bool:
        """Whether all ranks are here with the same text."""
        number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
        largest, smallest = self._largest([number, -number])
        return largest == -smallest

    def highest(self, number: int) -> int:
        """The largest number that a rank is here with."""
        return self._largest([number])[0]

    def _largest(self, numbers: list[int]) -> list[int]:
        told = torch.tensor(numbers, device=self._device)
        for group in self._groups:
            torch.distributed.all_reduce(told, torch.distributed.ReduceOp.MAX, group)
        return told.tolist()  # type: ignore[no-any-return]


class Buffers:
    """Buffers of a model as they were when `keep` was called: copied anew where they have been written to."""

    def __init__(self, model: nn.Module) -> None:
        self._buffers = [each for each in model.buffers() if not each.is_inference()]
        self._copies: list[tuple[int, torch.Tensor]] = [(-1, each) for each in self._buffers]

    def keep(self) -> None:
        """A call begins, which may have to be undone."""
        for place, (buffer, (version, _)) in enumerate(zip(self._buffers, self._copies, strict=True)):
            if buffer._version != version:
                self._copies[place] = (buffer._version, buffer.detach().clone())

    def put_back(self) -> None:
        """Undo what was written since."""
        with torch.no_grad():
            for buffer, (version, copy) in zip(self._buffers, self._copies, strict=True):
                if buffer._version != version:
                    buffer.copy_(copy)


class OutputUses:
    """What a script does with the outputs of one kind of calls.

    Ranks that hold parts of one model have to find the same: the first call of each is profiled, whatever its batch is,
    and before the second one they tell each other what they saw. A use that comes up later is an error there.
    """

    def __init__(self, record: RegionRecord, model: nn.Module, peers: Peers | None) -> None:
        self.events = RegionEvents(record, State(packs=True, defers=True, profiles=True))
        self.parameters, self.buffers = list(model.parameters()), Buffers(model)
        self.sampler = Sampler()
        self._peers, self._calls = peers, 0

    def begin(self) -> None:
        """Count a call that begins: ranks that share weights profile their first one alone, whatever its batch is."""
        self._calls += 1
        if self._peers and self._calls == 2 and not self.events.state.is_profiled:
            self.end_profiling()

    def end_profiling(self) -> None:
        """Profile no later call."""
        self.events.state = self.events.state.profiled_call(trains=False)

    def raise_to(self, uses: Uses) -> None:
        """Take over how much of its outputs another rank uses."""
        self.events.state = self.events.state.used(uses, "another rank looks at padded positions")

    def profiling(self) -> Show:
        """Makes of a padded tensor what a script gets at the first call."""
        family = Family()

        def show(value: torch.Tensor, side: Side, dim: int, name: str, find: Find) -> torch.Tensor:
            finite = Pads(finite=pads_of(value, side.place).finite)  # as later calls will be taken to be
            tokens = Memo(lambda: Tokens.of(side.place, side.place.take(value), finite)) if dim == 1 else None
            return defer(
                value.shape,
                lambda _: value,
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
        """Makes of a packed tensor what a script gets. again: the padded call, if it can be had."""
        family = Family()

        def show(packed: torch.Tensor, side: Side, dim: int, name: str, find: Find) -> torch.Tensor:
            shape = list(packed.shape)
            shape[0], shape[dim] = side.num_rows, side.num_positions

            def padded(_: Any) -> torch.Tensor:
                if again is None:
                    raise DeferredError(
                        f"padded positions of {name!r} are looked at, and this rank alone cannot compute them, as "
                        "weights are sharded; expected them to be looked at in the first step of training, after "
                        "which all ranks compute them. Do so, look at real positions only, or pass "
                        "deepytorch.configure(options={'unpad': False})"
                    )
                known = again.seconds
                found = find(again.outputs(name)[0])
                if not known:
                    record.steps_replayed += 1
                    record.replay_seconds += again.seconds
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
