"""`deepytorch.prefetch`: what comes out of a loader, moved. The device is `meta`, whose tensors have no values."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import deepytorch

Pair = collections.namedtuple("Pair", ["ids", "name"])


@dataclasses.dataclass
class Batch:
    ids: torch.Tensor
    step: int


class Encoding(collections.UserDict[str, Any]):
    """As the batches of tokenizers: a mapping with something beside."""

    def __init__(self, data: dict[str, Any], kind: str) -> None:
        super().__init__(data)
        self.kind = kind


def ids(length: int = 3) -> torch.Tensor:
    return torch.arange(2 * length).reshape(2, length)


def moved(batch: Any) -> Any:
    [found] = deepytorch.prefetch([batch], "meta")
    return found


def test_tensors_are_moved_wherever_they_stand_and_nothing_else_is_changed() -> None:
    found = moved({"ids": ids(), "inside": [ids(4), ("text", ids(5))], "step": 7, "none": None})
    assert list(found) == ["ids", "inside", "step", "none"]
    first, (text, second) = found["inside"]
    assert [each.device.type for each in (found["ids"], first, second)] == ["meta"] * 3
    assert [each.shape for each in (found["ids"], first, second)] == [(2, 3), (2, 4), (2, 5)]
    assert found["ids"].dtype is torch.int64
    assert (text, found["step"], found["none"]) == ("text", 7, None)


def test_classes_of_batches_stay() -> None:
    pair = moved(Pair(ids(), "a"))
    assert type(pair) is Pair
    assert (pair.ids.device.type, pair.name) == ("meta", "a")
    batch = moved(Batch(ids(), 3))
    assert type(batch) is Batch
    assert (batch.ids.device.type, batch.step) == ("meta", 3)
    encoding = moved(Encoding({"ids": ids()}, "words"))
    assert type(encoding) is Encoding
    assert (encoding["ids"].device.type, encoding.kind) == ("meta", "words")


def test_the_loaders_own_batches_are_not_written_to() -> None:
    given = [Batch(ids(), 0), {"ids": ids()}, Encoding({"ids": ids()}, "words"), [ids()]]
    list(deepytorch.prefetch(given, "meta"))
    batch, mapping, encoding, listed = given
    for each in (batch.ids, mapping["ids"], encoding["ids"], listed[0]):  # type: ignore[union-attr,index,call-overload]
        assert torch.equal(each, ids())


def test_an_error_of_the_loader_comes_behind_the_batches_before_it() -> None:
    def failing() -> Iterator[torch.Tensor]:
        yield ids(1)
        yield ids(2)
        raise OSError("the disk is gone")

    left = iter(deepytorch.prefetch(failing(), "meta"))
    assert [next(left).shape, next(left).shape] == [(2, 1), (2, 2)]
    with pytest.raises(OSError, match="the disk is gone"):
        next(left)


def test_a_loader_is_gone_through_as_often_as_is_asked_one_batch_ahead() -> None:
    asked = []

    class Loader:
        def __iter__(self) -> Iterator[torch.Tensor]:
            for number in range(3):
                asked.append(number)
                yield ids(number + 1)

    prefetched = deepytorch.prefetch(Loader(), "meta")
    for _ in range(2):
        del asked[:]
        ahead = []
        for number, batch in enumerate(prefetched):
            assert batch.shape == (2, number + 1)
            ahead.append(len(asked))
        assert ahead == [2, 3, 3]


def test_the_length_is_the_loaders() -> None:
    loader = DataLoader(list(range(10)), batch_size=4)  # type: ignore[arg-type]
    assert len(deepytorch.prefetch(loader, "meta")) == 3
    with pytest.raises(TypeError, match="generator, which is prefetched"):
        len(deepytorch.prefetch((each for each in [ids()]), "meta"))


def test_on_the_cpu_batches_are_passed_on_as_they_are() -> None:
    given = [{"ids": ids()}, {"ids": ids()}]
    found = list(deepytorch.prefetch(given, "cpu"))
    assert all(one is two for one, two in zip(found, given, strict=True))


def test_an_empty_loader_gives_nothing() -> None:
    assert list(deepytorch.prefetch([], "meta")) == []
