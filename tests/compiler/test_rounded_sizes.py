"""Dummy tokens: few sizes, little waste, the same numbers."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from deepytorch.compiler.step.batch_facts import Facts
from deepytorch.compiler.step.rounding.sizes import (
    MAX_SIZES,
    RoundedIndices,
    SizeLadder,
    dummy_rows,
    round_up,
    spread,
    why_not_rounded,
)
from deepytorch.passes.unpad.program import IndexInput, IndexSet, LossFacts, Program

TOKENS, LABELLED = IndexSet(0), IndexSet(0, loss=0)


def program(**changed: Any) -> Program:
    """A program that asks for the tokens of one space and the labelled ones of one loss."""
    given: dict[str, Any] = {
        "facts": None,
        "facts_inputs": (),
        "spaces": (None,),
        "losses": (LossFacts(0, 0, -100, 0, 0),),
        "picks": (),
        "assumptions": (),
        "indices": (
            IndexInput("flat", TOKENS),
            IndexInput("cu_seqlens", TOKENS),
            IndexInput("longest", TOKENS),
            IndexInput("rank", LABELLED, TOKENS),
            IndexInput("flat", LABELLED),
        ),
        "outputs": (),
        "epilogues": (),
        "sizes": ((0, 0, 1),),
    }
    return Program(**{**given, **changed})


def facts_of(mask: torch.Tensor, labelled: torch.Tensor) -> Facts:
    lengths, labels = [mask.sum(1).tolist()], [int(labelled.sum())]
    return Facts([tuple(mask.shape)], [mask], [labelled], lengths, labels, [], mask.device, {}, waited=False)


def facts_of_lengths(lengths: list[int], labels: int) -> Facts:
    """Facts whose sizes alone are looked at."""
    size = (len(lengths), max(lengths) + 1)
    return Facts([size], [], [], [lengths], [labels], [], torch.device("cpu"), {}, waited=False)


def test_rounding_is_monotone_and_wastes_less_than_an_eighth() -> None:
    rounded = [round_up(count) for count in range(1, 1 << 14)]
    assert rounded == sorted(rounded)
    assert all(count <= found < count * 1.125 for count, found in enumerate(rounded, 1))
    assert len(set(rounded)) <= 16 + 8 * 10  # each count up to 16, and eight to each power of two


def test_no_row_of_dummies_is_longer_than_the_batchs_longest_row() -> None:
    generator = random.Random(0)
    for _ in range(2000):
        lengths = [generator.randint(1, generator.choice([3, 20, 700])) for _ in range(generator.randint(1, 40))]
        dummies = round_up(sum(lengths)) - sum(lengths)
        rows = spread(dummies, dummy_rows(len(lengths)))
        assert sum(rows) == dummies
        assert max(rows) <= max(lengths)


@pytest.mark.parametrize(("rows", "labels_too"), [(8, False), (16, False), (16, True)])
def test_random_mixtures_have_few_sizes(rows: int, labels_too: bool) -> None:
    generator, ladder, refused = random.Random(1), SizeLadder(program()), 0
    rungs: set[int] = set()  # of token counts since the longest row has last grown
    before = 0  # combinations until then
    for _ in range(500):
        lengths = [max(8, min(1024, int(generator.lognormvariate(4.6, 0.7)))) for _ in range(rows)]
        labels = sum(int(1 + length * generator.uniform(0.2, 0.8)) if labels_too else length - 1 for length in lengths)
        known, longest = len(ladder.known), max((each.longest for each in ladder.known), default=(0,))
        sizes = ladder.fit(facts_of_lengths(lengths, labels))
        if isinstance(sizes, str):
            assert "combinations" in sizes
            refused += 1
            continue
        assert sum(lengths) <= sizes.tokens[0] < 1.125 * sum(lengths)
        assert labels <= dict(sizes.labels)[0] <= min(1.125 * labels, sizes.tokens[0])
        assert max(lengths) <= sizes.longest[0]
        if sizes.longest > longest:
            rungs, before = set(), known
        rungs.add(sizes.tokens[0])
    if labels_too:
        assert len(ladder.known) <= MAX_SIZES
        assert refused <= 50  # none would be, with sizes without end
    else:  # one label less for each row: on the rung of the tokens, or on the one below
        assert refused == 0
        assert len(ladder.known) <= before + 2 * len(rungs) < MAX_SIZES


def test_the_number_of_sizes_has_an_end() -> None:
    ladder = SizeLadder(program(), max_sizes=2)
    found = [ladder.fit(facts_of_lengths([count, 9], count)) for count in (20, 40, 80, 20)]
    assert [isinstance(each, str) for each in found] == [False, False, True, True]  # the longest row came to be 64
    assert len(ladder.known) == 2


def test_a_batch_without_pads_has_its_own_sizes() -> None:
    whole = Facts([(3, 11)], [], [], [[11] * 3], [30], [], torch.device("cpu"), {}, waited=False)
    assert "without a pad" in str(SizeLadder(program()).fit(whole))


def test_a_batch_with_fewer_pads_than_it_is_rounded_by_has_its_own_sizes() -> None:
    nearly = Facts([(5, 7)], [], [], [[7, 7, 7, 7, 5]], [20], [], torch.device("cpu"), {}, waited=False)
    assert "rounding adds more" in str(SizeLadder(program(costs=((TOKENS, 1.0),))).fit(nearly))


@pytest.mark.parametrize("seed", range(20))
def test_dummies_are_pads_in_rows_of_their_own(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows, positions = int(torch.randint(1, 12, (), generator=generator)), 37
    mask = torch.rand(rows, positions, generator=generator) < 0.6
    mask[:, :2] = True
    labelled = mask & (torch.rand(rows, positions, generator=generator) < 0.7)
    labelled[0, :2] = True
    asked, facts = program(), facts_of(mask, labelled)
    sizes = SizeLadder(asked).fit(facts)
    assert not isinstance(sizes, str)
    flat, rows_at, longest, rank, flat_labelled = (RoundedIndices(facts, sizes).get(each) for each in asked.indices)
    tokens, labels = int(mask.sum()), int(labelled.sum())
    assert len(flat) == sizes.tokens[0]
    assert flat[:tokens].tolist() == mask.reshape(-1).nonzero().squeeze(1).tolist()
    assert not mask.reshape(-1)[flat[tokens:]].any()
    assert rows_at.tolist()[: rows + 1] == [0, *mask.sum(1).cumsum(0).tolist()]
    assert len(rows_at) == rows + dummy_rows(rows) + 1
    assert rows_at[-1] == sizes.tokens[0]
    assert rows_at.diff().max() <= longest.shape[0]
    assert len(rank) == len(flat_labelled) == sizes.labels[0][1]
    assert len(set(rank.tolist())) == len(rank)
    assert torch.equal(flat[rank], flat_labelled)
    assert flat_labelled[:labels].tolist() == labelled.reshape(-1).nonzero().squeeze(1).tolist()
    assert not labelled.reshape(-1)[flat_labelled[labels:]].any()


def test_pads_stand_in_more_than_once_where_there_are_few() -> None:
    mask = torch.ones(5, 7, dtype=torch.bool)
    mask[0, 6] = mask[1, 6] = False
    labelled = torch.zeros_like(mask)
    labelled[:, 0] = True
    facts = facts_of(mask, labelled)
    sizes = SizeLadder(program(costs=((LABELLED, 1.0),))).fit(facts)
    assert not isinstance(sizes, str)
    flat = RoundedIndices(facts, sizes).get(IndexInput("flat", TOKENS))
    assert flat[33:].tolist() == [6, 13, 6]


def test_what_dummies_would_be_seen_in_declines() -> None:
    part = (IndexInput("flat", IndexSet(0, offset=1, cut=1)),)
    sliced = (LossFacts(0, 0, -100, 0, 1),)
    assert why_not_rounded(program(), has_bias=False) is None
    assert "bias" in str(why_not_rounded(program(), has_bias=True))
    assert "parts of the positions" in str(why_not_rounded(program(indices=part), has_bias=False))
    for changed in (
        {"reference_indices": part},
        {"indices": (IndexInput("rank", LABELLED, IndexSet(0, offset=1, cut=1)),)},
        {"values": (IndexSet(0, offset=1, cut=1),)},
    ):
        said = why_not_rounded(program(**changed), has_bias=False)
        assert "parts of the positions" in str(said)
    assert "slicing" in str(why_not_rounded(program(losses=sliced), has_bias=False))
