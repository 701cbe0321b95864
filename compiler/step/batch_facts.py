"""Batch facts, read once a step: which entries are tokens, which have a label, and whether the plan's assumptions hold.

A batch that is known on the host (`host_copies`) is read there, and its index tensors are sent to the device without a
synchronisation. Elsewhere one pass over masks and labels and one synchronisation give every number that the host needs.
Index tensors need no further synchronisation; on CUDA a kernel has written them already (`device_facts`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from deepytorch.compiler.host_copies import KNOWN
from deepytorch.compiler.step.device_facts import OnDevice, pack_on_device
from deepytorch.compiler.step.host_facts import HostFacts
from deepytorch.device_reads import read_would_sync, send
from deepytorch.passes.ops.pack_facts import HOLES, LABELS, LATE, ODD, STRAY, TOKENS
from deepytorch.passes.samples import sample
from deepytorch.passes.unpad.attentions import MASKED
from deepytorch.passes.unpad.masks import READINGS
from deepytorch.passes.unpad.program import IndexInput, IndexSet, LossFacts, Program

_BUFFER_CHANGED = "a buffer that the mask is made from has changed"


@dataclass(frozen=True)
class Refusal:
    """The reason for which a batch runs padded."""

    reason: str


@dataclass
class Facts:
    """The facts of one batch.

    Sizes are Python integers and masks are (rows, positions) bool. Tensors are on the batch's device, or on the host if
    the batch was read there.
    """

    sizes: list[tuple[int, int]]  # rows and positions of each space
    masks: list[torch.Tensor]  # of each space
    labelled: list[torch.Tensor]  # of each loss, on its space's grid
    lengths: list[list[int]]  # of each space's rows, in tokens
    labels: list[int]  # of each loss
    picks: list[torch.Tensor]  # row * positions + position, (rows,) of each pick
    device: torch.device  # the batch's
    narrowed: dict[IndexSet, int]  # how many tokens stand in a part of the positions, where it was counted
    waited: bool  # whether the device was waited for
    packed: OnDevice | None = None  # index tensors that are there already

    @property
    def tokens(self) -> list[int]:
        """Return the number of tokens of each space."""
        return list(map(sum, self.lengths))

    @property
    def num_positions(self) -> int:
        """Return the number of positions of all spaces together, pads among them."""
        return sum(map(math.prod, self.sizes))


def read_facts(program: Program, inputs: Sequence[Any]) -> Facts | Refusal:
    """Return the facts of a batch, or a `Refusal` if one of the plan's assumptions does not hold for it."""
    for buffer in program.buffers:
        if inputs[buffer.input] is not buffer.tensor or buffer.tensor._version != buffer.version:
            return Refusal(_BUFFER_CHANGED)
    sizes = []
    for space, (place, rows, positions) in zip(program.spaces, program.sizes, strict=True):
        shape = inputs[place].shape
        sizes.append((shape[rows], shape[positions]))
        if space.max_positions is not None and shape[positions] > space.max_positions:
            return Refusal(f"more than {space.max_positions} positions: the mask's meaning is not proved for them")
    given = list(map(inputs.__getitem__, program.facts_inputs))
    values = _values_on_host(program, inputs) if KNOWN else None
    if isinstance(values, Refusal):
        return values
    if values is None:  # calling it as a module would cost some 20 us more
        values = program.facts.forward(*given)
    would_sync = read_would_sync(*values)
    masks, labelled, packed = _grids(program, values, sizes, would_sync)
    picks = [_pick(pick, values, sizes[pick.space]) for pick in program.picks] if program.picks else []
    waited = would_sync and read_would_sync(masks[0])
    violations = _violations(program, values, masks, labelled, picks, packed, waited)
    parts = _narrowed(program) if waited else []  # else counted when they are asked for
    grids = [*masks, *labelled]
    if packed is not None:
        grids = [each.counts[TOKENS] for each in packed.spaces] + [each.counts[LABELS] for each in packed.losses]
    grids += [violated for _, violated in violations]
    for each in parts:
        grids.append(_part(masks[each.space], each))
    found = count_true(grids)
    lengths, found = found[: len(masks)], found[len(masks) :]
    labels, found = list(map(sum, found[: len(labelled)])), found[len(labelled) :]
    for (reason, _), violated in zip(violations, found, strict=False):
        if any(violated):
            return Refusal(reason)
    if min(map(min, lengths)) < 1:
        return Refusal("a row without a token")
    fewest = min(map(max, lengths))
    for loss, count in zip(program.losses, labels, strict=True):
        fewest = min(fewest, count) if loss.ignores_pads else fewest
    if fewest < 2:
        return Refusal("fewer than two tokens or labels")  # a size of one would be compiled for itself
    device = next((each.device for each in given if isinstance(each, torch.Tensor)), masks[0].device)
    narrowed = dict(zip(parts, map(sum, found[len(violations) :]), strict=True))
    return Facts(sizes, masks, labelled, lengths, labels, picks, device, narrowed, waited, packed)


def _values_on_host(program: Program, inputs: Sequence[Any]) -> Sequence[torch.Tensor] | Refusal | None:
    """Return the outputs of `Program.facts`, computed on the host; None if the host does not know all their inputs."""
    if program.on_host is None:
        program.on_host = HostFacts(program)
    values = program.on_host.values(inputs)
    if values is not None and program.on_host.buffer_changed():
        return Refusal(_BUFFER_CHANGED)
    return values


def _narrowed(program: Program) -> list[IndexSet]:
    """Return the parts of spaces whose tokens a step asks for."""
    asked = [
        *program.indices,
        *program.reference_indices,
        *(index for epilogue in program.epilogues for index in epilogue.indices),
    ]
    sets = dict.fromkeys(index.entries for index in asked)
    return [each for each in sets if each.loss is None and not each.is_tokens]


def _part(mask: torch.Tensor, entries: IndexSet) -> torch.Tensor:
    """Return a space's mask, on its whole grid, with tokens outside of the part `entries` of its positions left out."""
    part = torch.zeros_like(mask)
    stop = mask.shape[1] - entries.cut + entries.offset
    part[:, entries.offset : stop] = mask[:, entries.offset : stop]
    return part


def count_true(grids: Sequence[torch.Tensor]) -> list[list[int]]:
    """Count true entries, with one synchronisation: of a grid (rows, positions) bool by row, of others as a whole.

    Tensors int32 (rows,) are counts already.
    """
    shape = grids[0].shape
    if len(shape) == 2 and {each.shape for each in grids} == {shape}:
        return torch.stack(list(grids)).sum(2).tolist()
    numbers = [_counts(each) for each in grids]
    found = iter(torch.cat(numbers).tolist())
    return [list(itertools.islice(found, each.shape[0])) for each in numbers]


def _counts(flags: torch.Tensor) -> torch.Tensor:
    if flags.dtype == torch.int32:
        return flags
    return flags.sum(1) if flags.dim() == 2 else flags.sum().view(1)


def _grids(
    program: Program, values: Sequence[torch.Tensor], sizes: Sequence[tuple[int, int]], would_sync: bool
) -> tuple[list[torch.Tensor], list[torch.Tensor], OnDevice | None]:
    """Return tokens of each space and labelled entries of each loss, (rows, positions) bool, and a kernel's results.

    would_sync: whether the host would wait for a device to read the values.
    """
    trimming: set[int] = set()
    for space in program.spaces:
        trimming.update(space.trimmed_by)
    labelled: list[Any] = [None] * len(program.losses)
    for number, loss in enumerate(program.losses):
        if number in trimming or not would_sync:
            labelled[number] = _labelled(loss, values[loss.target], sizes[loss.space])
    masks = []
    for number, size in enumerate(sizes):
        masks.append(_mask(program, number, values, labelled, size))
    packed = pack_on_device(program, values, masks) if would_sync else None
    if packed is not None:
        return [each.mask for each in packed.spaces], [_there(each.labelled) for each in packed.losses], packed
    for number, loss in enumerate(program.losses):
        if labelled[number] is None:
            labelled[number] = _labelled(loss, values[loss.target], sizes[loss.space])
    return [READINGS[reading](value) for value, reading in masks], labelled, None


def _there(grid: torch.Tensor | None) -> torch.Tensor:
    assert grid is not None
    return grid


def _labelled(loss: LossFacts, target: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """Return the positions with a label that counts, as a mask on the space's whole grid."""
    counts = target != loss.ignore_index
    if loss.cut == 0:
        return counts
    whole = counts.new_zeros(size)
    whole[:, loss.offset : loss.offset + counts.shape[1]] = counts
    return whole


def _mask(
    program: Program, number: int, values: Sequence[torch.Tensor], labelled: list[Any], size: tuple[int, int]
) -> tuple[torch.Tensor, str]:
    """Return values (rows, positions) of a space, and the name in `READINGS` of the rule that finds tokens in them."""
    space = program.spaces[number]
    if space.mask is not None:
        assert space.reading is not None
        return values[space.mask].reshape(size), space.reading
    if space.trimmed_by:
        seen = labelled[space.trimmed_by[0]]
        for other in space.trimmed_by[1:]:
            seen = seen | labelled[other]
        return seen.flip(1).cumsum(1).flip(1) > 0, "nonzero"
    loss = next(iter(program.losses), None)
    device = values[0 if loss is None else loss.target].device
    return torch.ones(size, dtype=torch.bool, device=device), "nonzero"


def _pick(pick: Any, values: Sequence[torch.Tensor], size: tuple[int, int]) -> torch.Tensor:
    if pick.output is not None:
        return values[pick.output]
    rows, positions = size
    device = values[0].device
    return torch.arange(rows, device=device) * positions + pick.position % positions


def _violations(
    program: Program,
    values: Sequence[torch.Tensor],
    masks: list[torch.Tensor],
    labelled: list[torch.Tensor],
    picks: list[torch.Tensor],
    packed: OnDevice | None,
    waited: bool,
) -> list[tuple[str, torch.Tensor]]:
    """Return each assumption's message with a tensor that is true, or a count (`count_true`), where it is violated.

    waited: whether the host waits for the device in this step; else buffers there are looked at later: `HostFacts`.
    """
    found = []
    for buffer in program.buffers:
        if buffer.sample is not None and (waited or not read_would_sync(buffer.tensor)):
            now = sample(buffer.tensor)
            assert now is not None
            found.append((_BUFFER_CHANGED, now.view(torch.uint8) != buffer.sample.view(torch.uint8)))
    for number, space in enumerate(program.spaces):
        if space.contiguous or space.prefix:
            late, holes = _late_and_holes(masks[number], None if packed is None else packed.spaces[number].counts)
            if space.prefix:
                found.append(("tokens after pads under a causal attention without a key mask", late))
            if space.contiguous:
                found.append(("holes between the tokens of a row under a sliding window", holes))
        if space.begins:
            found.append(("pads before the first token of a row, which see no key and are NaN", ~masks[number][:, 0]))
    for number, loss in enumerate(program.losses):
        if loss.ignores_pads and not program.spaces[loss.space].trimmed_by:
            stray = packed.losses[number].counts[STRAY] if packed else labelled[number] > masks[loss.space]
            found.append(("a label at a padded position is not ignored", stray))
    for pick, flat in zip(program.picks, picks, strict=True):
        found.append(("a position that is read from every row is a pad in one", ~masks[pick.space].reshape(-1)[flat]))
    for assumption in program.assumptions:
        value = values[assumption.output]
        if assumption.kind == "zero at pads":
            mask = masks[assumption.space]
            own = mask[:, assumption.offset : mask.shape[1] - assumption.cut + assumption.offset]
            found.append(("a factor is not zero at padded positions", (value != 0) & ~own))
        elif assumption.kind == "mask as meant":
            found.append(("a mask that says more about this batch than which keys are tokens", value))
        elif assumption.kind == "same tokens":
            found.append(("attentions that disagree on which keys are tokens", value))
        elif assumption.kind == "binary":
            odd = None if packed is None else _odd(program, packed, assumption.output)
            found.append(("a mask holds numbers besides 0 and 1", (value != 0) & (value != 1) if odd is None else odd))
        else:
            found.append(
                ("an additive mask holds numbers that neither hide nor keep", (value != 0) & ~(value <= MASKED))
            )
    return found


def _odd(program: Program, packed: OnDevice, output: int) -> torch.Tensor | None:
    """Return a kernel's counts of numbers besides 0 and 1 in an output of `Program.facts`; None if there are none."""
    spaces = zip(program.spaces, packed.spaces, strict=True)
    return next((packing.counts[ODD] for space, packing in spaces if space.mask == output), None)


def _late_and_holes(mask: torch.Tensor, counts: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a space's tokens that follow a pad of their row, and its rows whose tokens are not all neighbours."""
    if counts is not None:
        return counts[LATE], counts[HOLES]
    starts = mask[:, 1:] & ~mask[:, :-1]
    return starts, starts.sum(1) + mask[:, 0] > 1


class Indices:
    """The index tensors of one batch, each made at its first use."""

    def __init__(self, facts: Facts) -> None:
        self._facts, self._device = facts, facts.device
        self._made: dict[IndexInput, torch.Tensor] = {}
        self._flat: dict[IndexSet, torch.Tensor] = {}
        self._ranks: dict[IndexSet, torch.Tensor] = {}

    def get(self, index: IndexInput) -> torch.Tensor:
        """Return the tensor of one index input."""
        return self.all_of((index,))[0]

    def all_of(self, asked: Sequence[IndexInput]) -> list[torch.Tensor]:
        """Return the tensors of index inputs."""
        found = []
        for index in asked:
            made = self._made.get(index)
            if made is None:
                made = self._make(index)
                made = self._made[index] = made if made.device == self._device else send(made, self._device)
            found.append(made)
        return found

    def _make(self, index: IndexInput) -> torch.Tensor:
        facts, entries = self._facts, index.entries
        if index.kind == "flat":
            return self._entries(entries)
        if index.kind == "rank":
            assert index.among is not None
            if entries.loss is not None and index.among.is_tokens:  # labels stand at tokens, in their order
                if facts.packed is not None:
                    return facts.packed.losses[entries.loss].labelled_ranks[: facts.labels[entries.loss]]
                chosen = facts.labelled[entries.loss].reshape(-1)[self._entries(index.among)]
                return places_of(chosen, facts.labels[entries.loss] if facts.waited else None)
            return self._rank(index.among)[self._entries(entries)]
        if index.kind == "cu_seqlens":
            if facts.packed is not None:
                return facts.packed.spaces[entries.space].cu_seqlens
            return cumulative(facts.lengths[entries.space])
        if index.kind == "longest":
            return torch.empty((max(facts.lengths[entries.space]), 0), device=facts.device)
        assert index.kind == "picked"
        assert index.pick is not None
        return self._rank(IndexSet(entries.space))[facts.picks[index.pick]]

    def _entries(self, entries: IndexSet) -> torch.Tensor:
        if entries not in self._flat:
            (mask, count), facts = self._mask(entries), self._facts
            if facts.packed is not None and (entries.is_tokens or entries.loss is not None):
                packing = facts.packed.spaces[entries.space]
                written = packing.flat if entries.loss is None else facts.packed.losses[entries.loss].labelled_flat
                self._flat[entries] = written[:count]  # undefined values stand behind the kernel's list
            else:
                self._flat[entries] = places_of(mask.reshape(-1), count if facts.waited else None)
        return self._flat[entries]

    def _rank(self, entries: IndexSet) -> torch.Tensor:
        """Return the place of each position of the grid among the entries."""
        if entries.is_tokens and self._facts.packed is not None:
            return self._facts.packed.spaces[entries.space].ranks
        if entries not in self._ranks:
            self._ranks[entries] = self._mask(entries)[0].reshape(-1).cumsum(0) - 1
        return self._ranks[entries]

    def _mask(self, entries: IndexSet) -> tuple[torch.Tensor, int | None]:
        facts = self._facts
        if entries.loss is not None:
            return facts.labelled[entries.loss], facts.labels[entries.loss]
        mask = facts.masks[entries.space]
        if not (entries.offset or entries.cut):
            return mask, sum(facts.lengths[entries.space])
        return _part(mask, entries), facts.narrowed.get(entries)


def cumulative(lengths: Sequence[int]) -> torch.Tensor:
    """Return the begin of each row, and the end of the last one: (rows + 1,) int32, on the host."""
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def places_of(flags: torch.Tensor, count: int | None) -> torch.Tensor:
    """Return the places at which `flags` (entries,) are true; `count` is their number, if it is known."""
    if count is not None and read_would_sync(flags):  # with a known size the call does not wait for the device
        return torch.nonzero_static(flags, size=count).squeeze(1)
    return flags.nonzero().squeeze(1)
