"""Whatever mask, lengths and labels a batch has: loss, gradients and outputs of the compiled model are eager's."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from deepytorch.compiler.report import LEDGER
from tests.compiler.parity import COMPILED, IGNORED, PAD, Batch, assert_close, assert_same_gradients
from tests.compiler.plain_models import VOCAB, Plain, attended, distance, filled, keys

EXAMPLES = 60


def causal(q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    return attended(q, k, v, (distance(q) >= 0) & keys(mask))


def windowed(q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    return attended(q, k, v, (distance(q) >= 0) & (distance(q) < 3) & keys(mask))


def shifted(model: Any, x: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> Any:
    logits = model.head(x)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum"), logits


def own_token(model: Any, x: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> Any:
    logits = model.head(x)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"), logits


def pooled(model: Any, x: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> Any:
    mean = (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True).clamp(min=1)
    return F.cross_entropy(model.head(mean), labels[:, 0].clamp(min=0)), x


KINDS = {
    "decoder": (causal, shifted),
    "windowed decoder": (windowed, shifted),
    "encoder": (filled, own_token),
    "pooled encoder": (filled, pooled),
}


@pytest.fixture(scope="module", params=KINDS)
def twins(request: pytest.FixtureRequest) -> Iterator[tuple[nn.Module, nn.Module, Callable[..., Any]]]:
    """One compilation for all examples."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Plain(*KINDS[request.param]).train()
    reference = copy.deepcopy(model)
    LEDGER.forget()
    yield reference, model, torch.compile(model, backend="deepytorch", options=COMPILED)
    report = LEDGER.report()
    assert report.total("steps_packed") >= EXAMPLES // 4, "hardly anything was packed: the properties held of eager"
    assert report.total("recompiles") <= 2


@st.composite
def any_batch(draw: st.DrawFn) -> Batch:
    rows, positions = draw(st.integers(2, 5)), draw(st.sampled_from([3, 5, 8, 13]))
    lengths = st.integers(1, positions)
    right = lengths.map(lambda n: [1] * n + [0] * (positions - n))
    left = lengths.map(lambda n: [0] * (positions - n) + [1] * n)
    bits = st.lists(st.integers(0, 1), min_size=positions, max_size=positions)
    row = draw(st.sampled_from([right, left, st.one_of(right, left), bits]))
    mask = torch.tensor([draw(row) for _ in range(rows)])
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    ids = torch.randint(5, VOCAB, (rows, positions), generator=generator)
    labels = ids.clone()
    pattern = draw(st.sampled_from(["tokens seen", "response", "some", "tokens", "all", "one", "none"]))
    if pattern in ("tokens", "tokens seen", "response", "some"):
        labels[mask == 0] = IGNORED
    if pattern in ("tokens seen", "response"):
        labels[:, 1:][mask[:, :-1] == 0] = IGNORED
    if pattern == "response":
        labels[:, : positions // 2] = IGNORED
    if pattern == "some":
        labels[:, 1:][mask[:, :-1] == 0] = IGNORED
        labels[torch.rand(rows, positions, generator=generator) < 0.5] = IGNORED
    if pattern in ("one", "none"):
        labels.fill_(IGNORED)
    if pattern == "one":
        labels[draw(st.integers(0, rows - 1)), draw(st.integers(0, positions - 1))] = 9
    return {"input_ids": ids.masked_fill(mask == 0, PAD), "attention_mask": mask, "labels": labels}


@pytest.mark.slow
@given(batch=any_batch(), look=st.sampled_from(["never", "before", "after"]))
@settings(max_examples=EXAMPLES, deadline=None)
def test_every_batch_trains_as_in_eager(
    twins: tuple[nn.Module, nn.Module, Callable[..., Any]], batch: Batch, look: str
) -> None:
    reference, model, compiled = twins
    reference.zero_grad()
    model.zero_grad()
    (wanted, shown), (found, output) = reference(**batch), compiled(**batch)
    real = batch["attention_mask"].bool()
    assert_close(found, wanted, "loss", rel=1e-5, floor=1e-6)
    if look == "before":
        assert_close(output[real], shown[real], "output", rel=1e-5, floor=1e-6)
    wanted.backward()
    found.backward()
    if any(p.grad is not None and p.grad.any() for p in reference.parameters()):
        assert_same_gradients(reference, model)
    else:
        assert not any(p.grad is not None and p.grad.any() for p in model.parameters())
    if look == "after":
        assert_close(output[real], shown[real], "output", rel=1e-5, floor=1e-6)
