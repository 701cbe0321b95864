"""What a script does with the outputs of a packed model: seen in the first step, and what it is handed after that."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from deepytorch.compiler.outputs.deferred import defer
from deepytorch.compiler.outputs.pending import Family
from deepytorch.compiler.outputs.replay import Replay
from deepytorch.compiler.outputs.tokens import Memo, Tokens
from deepytorch.compiler.outputs.usage import Level, Usage
from deepytorch.compiler.report import RegionRecord
from deepytorch.errors import DeferredError
from deepytorch.integrations.door_proof import sharding_groups
from deepytorch.integrations.packed_batch import Find, Show, Side
from deepytorch.passes.samples import Sampler


class Uses:
    """What a script does with the outputs of one kind of calls.

    Ranks that hold parts of one model have to find the same: the first call of each is watched, whatever its batch is,
    and before the second one they tell each other what they saw. A use that comes up later is an error there.
    """

    def __init__(self, record: RegionRecord, model: nn.Module) -> None:
        self.usage = Usage(record.name)
        record.outputs = self.usage.outputs
        self.parameters = list(model.parameters())
        self.sampler = Sampler()
        self._shards = sharding_groups(model)
        self._calls, self.watched = 0, False

    def begins(self) -> bool:
        """Whether a call that begins now is to be watched."""
        self._calls += 1
        if not self._shards:
            return not self.watched
        if self._calls == 2:
            self._agree()
        return self._calls == 1

    def _agree(self) -> None:
        level = torch.tensor(int(self.usage.level), dtype=torch.int32, device=self._device())
        for group in self._shards:
            torch.distributed.all_reduce(level, torch.distributed.ReduceOp.MAX, group)
        if int(level) > self.usage.level:
            self.usage.level = Level(int(level))
            self.usage.reason = "another rank looks at padded positions"

    def _device(self) -> torch.device:
        device = self.parameters[0].device
        return device if device.type != "meta" else torch.device("cpu")

    def watching(self) -> Show:
        """Makes of a padded tensor what a script gets at the first call."""
        family = Family()

        def show(value: torch.Tensor, side: Side, dim: int, name: str, find: Find) -> torch.Tensor:
            tokens = Memo(lambda: Tokens.of(side.place, side.place.take(value))) if dim == 1 else None
            return defer(
                value.shape,
                lambda _: value,
                dtype=value.dtype,
                device=value.device,
                requires_grad=value.requires_grad,
                name=name,
                tokens=tokens,
                usage=self.usage,
                family=family,
                watched=True,
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
                usage=self.usage,
                family=family,
            )

        return show
