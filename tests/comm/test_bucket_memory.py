"""Whether the memory of a bucket may be written to again: only where it is known that nobody else looks into it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from deepytorch.comm.gradients import bucket_memory
from deepytorch.comm.gradients.bucket_memory import BucketMemory
from deepytorch.comm.gradients.buckets import Bucket


@pytest.fixture(autouse=True)
def counted_anew() -> Iterator[None]:
    bucket_memory._owners_are_counted.cache_clear()
    yield
    bucket_memory._owners_are_counted.cache_clear()


def memory() -> BucketMemory:
    parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))]
    return BucketMemory(Bucket((0, 1), (0, 2), 20), parameters, torch.zeros(20, dtype=torch.uint8))


def test_a_gradient_that_somebody_kept_is_seen() -> None:
    bucket = memory()
    assert not bucket.is_held()
    for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
        parameter.grad = view.detach()
    assert not bucket.is_held()
    kept = bucket.parameters[0].grad
    bucket.parameters[0].grad = None
    assert bucket.is_held()
    del kept
    assert not bucket.is_held()


@pytest.mark.parametrize("off_by", [-1, 1])
def test_where_a_torch_counts_otherwise_memory_is_taken_to_be_held(
    off_by: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = bucket_memory.storage_use_count
    monkeypatch.setattr(bucket_memory, "storage_use_count", lambda storage: counts(storage) + off_by)
    assert memory().is_held()


def test_where_a_torch_counts_nothing_memory_is_taken_to_be_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_memory, "storage_use_count", lambda storage: 1)
    assert memory().is_held()
