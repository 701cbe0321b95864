"""Writes that leave no version behind are found by samples."""

from __future__ import annotations

import gc

import torch
from torch import nn

from deepytorch.passes.samples import Sampler


def weights() -> list[torch.Tensor]:
    return [nn.Parameter(torch.randn(30, 20)), nn.Parameter(torch.randn(7, dtype=torch.float64)), torch.randn(5, 8).T]


def test_each_weight_that_was_written_is_named_and_no_other() -> None:
    for written in range(3):
        given, sampler = weights(), Sampler()
        before = sampler.take(given)
        assert not list(sampler.changed(given, before, ()))
        given[written].data.mul_(2)
        assert [id(each) for each in sampler.changed(given, before, ())] == [id(given[written])]
        assert not list(sampler.changed(given, before, {id(given[written])}))


def test_clipping_that_changes_one_value_in_a_hundred_is_noticed() -> None:
    torch.manual_seed(0)
    given, sampler = [nn.Parameter(torch.randn(64, 64)) for _ in range(40)], Sampler()
    before = sampler.take(given)
    for each in given:
        each.data.clamp_(-2.6, 2.6)
    assert list(sampler.changed(given, before, ()))


def test_memory_that_was_put_in_place_is_looked_at() -> None:
    given, sampler = weights(), Sampler()
    before = sampler.take(given)
    given[0].data = given[0].data.clone()
    assert not list(sampler.changed(given, before, ()))
    given[0].data = torch.zeros(30, 20)
    assert [id(each) for each in sampler.changed(given, before, ())] == [id(given[0])]
    given[0].data = torch.zeros(2, 2)
    assert id(given[0]) in {id(each) for each in sampler.changed(given, before, ())}


def test_it_keeps_no_memory_of_weights_that_are_gone() -> None:
    given, sampler = weights(), Sampler()
    sampler.take(given)
    assert sampler._views
    kept = given.pop(1)
    given.clear()
    gc.collect()
    assert not sampler._views
    assert kept.numel() == 7  # one that lives on keeps nothing of the others
