"""Which gradients travel together, and as what: the plan against all other plans, and rows against whole gradients."""

from __future__ import annotations

import itertools
import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepytorch.comm.gradients import buckets
from deepytorch.comm.gradients.arrival_times import ArrivalTimes, fitted
from deepytorch.comm.gradients.buckets import Arrival, Member, expected_arrivals, plan_buckets
from deepytorch.comm.gradients.sparse_rows import saves, summed_rows
from deepytorch.comm.topology.cost import Link
from deepytorch.errors import ConfigError


def members(*sizes: int, dtype: str = "float32") -> list[Member]:
    return [Member(f"p{number}", dtype, size, 4) for number, size in enumerate(sizes)]


def end_us(parts: list[Arrival], ends: tuple[int, ...], given: list[Member], link: Link) -> float:
    free, start = 0.0, 0
    for end in ends:
        num_bytes = sum(given[member].num_bytes for part in parts[start:end] for member in part.members)
        free = max(free, parts[end - 1].at_us) + link.time_us(num_bytes)
        start = end
    return free


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 400_000), min_size=1, max_size=7),
    gaps=st.lists(st.integers(0, 900), min_size=7, max_size=7),
    latency=st.sampled_from([0.0, 20.0, 400.0]),
    rate=st.sampled_from([0.0005, 0.003]),
)
def test_no_other_cut_ends_earlier(sizes: list[int], gaps: list[int], latency: float, rate: float) -> None:
    given_members, link = members(*sizes), Link(latency, rate)
    times = itertools.accumulate(gaps[: len(sizes)])
    arrivals = [Arrival((number,), float(time)) for number, time in enumerate(times)]
    ends = tuple(sorted(buckets._cuts(given_members, arrivals, link)))
    found = end_us(arrivals, ends, given_members, link)
    best = math.inf
    for count in range(len(sizes)):
        for inner in itertools.combinations(range(1, len(sizes)), count):
            best = min(best, end_us(arrivals, (*inner, len(sizes)), given_members, link))
    whole = link.time_us(sum(each.num_bytes for each in given_members))
    assert best <= found <= best + buckets._TOLERANCE * whole + 1e-6


def test_every_gradient_is_in_one_bucket_of_its_type() -> None:
    mixed = [*members(1000, 5, 70_000), *members(3, 9_000, dtype="float64"), *members(64, 1 << 20)]
    link = Link(100.0, 0.01)
    plan = plan_buckets(mixed, expected_arrivals(mixed, 5e4), link, 5e4)
    assert sorted(member for bucket in plan.buckets for member in bucket.members) == list(range(len(mixed)))
    for number, bucket in enumerate(plan.buckets):
        [kind] = {(mixed[member].dtype, mixed[member].element_bytes) for member in bucket.members}
        assert all(plan.bucket_of()[member] == number for member in bucket.members)
        ends = [
            offset + mixed[member].num_elements for member, offset in zip(bucket.members, bucket.offsets, strict=True)
        ]
        num_elements = bucket.num_bytes // kind[1]
        assert all(end <= start for end, start in zip(ends, [*bucket.offsets[1:], num_elements], strict=True))
    assert plan.total_us >= plan.exposed_us > 0


def test_a_bucket_size_of_the_users_is_heeded_and_the_order_is_that_of_coming() -> None:
    given_members = members(*[1000] * 10)
    arrivals = [Arrival((number,), float(number)) for number in (3, 1, 4, 0, 5, 9, 2, 6, 8, 7)]
    plan = plan_buckets(given_members, arrivals, Link(1.0, 0.1), 10.0, bucket_bytes=12_000)
    assert [bucket.members for bucket in plan.buckets] == [(3, 1, 4), (0, 5, 9), (2, 6, 8), (7,)]


def test_a_plan_survives_being_told_and_has_its_digest() -> None:
    given_members = members(1 << 20, 300, 1 << 19)
    plan = plan_buckets(
        given_members,
        expected_arrivals(given_members, 1e4),
        Link(50.0, 0.01),
        1e4,
        measured=True,
        tables={0: True, 2: False},
    )
    assert [(bucket.members, bucket.as_rows) for bucket in plan.buckets][-1] == ((0,), True)
    assert plan.to_json()["as_rows"] == ["p0", "p2"]
    first = plan_buckets(given_members, expected_arrivals(given_members, 2e4), Link(9.0, 0.1), 2e4)
    told = first.with_choices(json.loads(json.dumps(plan.choices())))
    assert told == plan
    assert told.digest() == plan.digest() != first.digest()


def test_arrivals_hold_every_gradient_once() -> None:
    with pytest.raises(ConfigError, match="1 gradients for 2 parameters"):
        plan_buckets(members(1, 2), [Arrival((0,), 1.0)], Link(1.0, 1.0), 1.0)


def test_a_watch_says_when_each_gradient_came() -> None:
    watch = ArrivalTimes(torch.device("cpu"))
    watch.arrived([2, 0])
    watch.arrived([])
    watch.arrived_but_for_rows(1)
    watch.arrived([3])
    watch.arrived([1])
    watch.ended()
    whole = watch.arrivals(5)
    assert [each.members for each in whole] == [(0, 2), (3,), (1,), (4,)]
    assert [each.members for each in watch.arrivals(5, without_rows=[1])] == [(0, 2), (1,), (3,), (4,)]
    assert 0 <= whole[0].at_us <= whole[-1].at_us == watch.backward_us()


def test_a_link_is_fitted_to_what_was_seen() -> None:
    link = fitted(Link(100.0, 1.0), num_bytes=1_000_000, num_transfers=10, seconds=0.011)
    assert link == Link(100.0, pytest.approx(0.01))
    assert fitted(Link(100.0, 1.0), 1_000_000, 10, 0.0005).us_per_byte > 0  # faster than its latencies


@pytest.mark.parametrize("padding", [None, 3])
def test_rows_add_up_to_the_gradient_of_the_table(padding: int | None) -> None:
    torch.manual_seed(0)
    ids, values = torch.randint(0, 20, (4, 9)), torch.randn(4, 9, 6)
    kept = None if padding is None else ids != padding
    wanted = torch.ops.aten.embedding_dense_backward(values, ids, 20, -1 if padding is None else padding, False)
    for mask in {id(kept): kept, 1: None if kept is None else kept.unsqueeze(-1)}.values():
        rows = summed_rows(ids.int() if mask is None else ids, values, mask)
        assert rows.ids.dtype == torch.int64
        assert len(rows.ids.unique()) == len(rows.ids) == int((wanted.abs().sum(1) > 0).sum())
        table = torch.ones(20, 6)
        rows.add_to(table, 0.5)
        torch.testing.assert_close(table, 1 + 0.5 * wanted)
        assert rows.num_bytes == len(rows.ids) * (8 + 6 * 4)


def test_rows_that_do_not_count_are_none() -> None:
    rows = summed_rows(torch.tensor([[3, 3]]), torch.ones(1, 2, 4), torch.tensor([[False, False]]))
    assert rows.ids.numel() == 0
    table = torch.zeros(5, 4)
    rows.add_to(table)
    assert not table.any()


def test_rows_are_worth_it_on_slow_links_and_few_ranks() -> None:
    slow, fast = Link(200.0, 0.01), Link(20.0, 0.00002)
    assert saves(100_000, 8_000_000, slow, 2)
    assert not saves(100_000, 8_000_000, slow, 256)
    assert not saves(100_000, 8_000_000, fast, 2)
    assert not saves(7_900_000, 8_000_000, slow, 2)
