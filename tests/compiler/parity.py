"""Two copies of one model, eager and compiled, trained side by side on padded batches: all that a user sees agrees."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from deepytorch.compiler.report import LEDGER, Report

Batch = dict[str, torch.Tensor]
Compare = Callable[[Any, Any, Batch], None]

# What compiling means in these tests: rewriting alone takes half the time. COMPILED is for those of what is compiled:
# how often that is, under sizes that vary, with parts to be computed again. A few have Inductor.
OPTIONS = {"lowering": "eager"}
COMPILED = {"lowering": "aot_eager"}
PAD = 1
IGNORED = -100


def token_mask(rows: int, positions: int, padding: str, generator: torch.Generator) -> torch.Tensor:
    """A mask (rows, positions) int64; the first row is whole, so that no column is pads only.

    `padding`: "right", "left", "mixed" (either, row by row), "holes" (pads between tokens), "none",
    "one" (rows of one token).
    """
    lengths = torch.randint(2, positions, (rows,), generator=generator)
    lengths[0] = positions
    columns = torch.arange(positions)[None]
    right = columns < lengths[:, None]
    left = right.flip(1)
    if padding == "right":
        mask = right
    elif padding == "left":
        mask = left
    elif padding == "mixed":
        mask = torch.where(torch.arange(rows)[:, None] % 2 == 0, right, left)
    elif padding == "holes":
        mask = torch.rand(rows, positions, generator=generator) < 0.6
        mask[0] = True
        mask[:, 1] = True
    elif padding == "one":
        mask = columns < torch.where(torch.arange(rows) % 2 == 0, positions, 1)[:, None]
    elif padding == "none":
        mask = torch.ones(rows, positions, dtype=torch.bool)
    else:
        raise ValueError(padding)
    return mask.long()


def causal_batch(
    rows: int, positions: int, padding: str, generator: torch.Generator, *, vocab: int = 96, prompt: int = 0
) -> Batch:
    """ids, mask and labels of a causal model; labels that a pad would predict, and the prompt's, are ignored."""
    mask = token_mask(rows, positions, padding, generator)
    ids = torch.randint(5, vocab, (rows, positions), generator=generator)
    labels = ids.masked_fill(mask == 0, IGNORED)
    labels[:, 1:].masked_fill_(mask[:, :-1] == 0, IGNORED)
    labels[:, 0] = IGNORED  # nobody predicts the first
    if prompt:
        labels[:, :prompt] = IGNORED
    return {"input_ids": ids.masked_fill(mask == 0, PAD), "attention_mask": mask, "labels": labels}


def masked_lm_batch(rows: int, positions: int, padding: str, generator: torch.Generator, *, vocab: int = 96) -> Batch:
    """ids, mask and labels at about a third of the tokens."""
    mask = token_mask(rows, positions, padding, generator)
    ids = torch.randint(5, vocab, (rows, positions), generator=generator)
    hidden = (torch.rand(rows, positions, generator=generator) > 0.35) | (mask == 0)
    hidden[0, :2] = False
    return {
        "input_ids": ids.masked_fill(mask == 0, PAD),
        "attention_mask": mask,
        "labels": ids.masked_fill(hidden, IGNORED),
    }


def batches(make: Callable[..., Batch], *sizes: tuple[int, int, str], seed: int = 1, **kwargs: Any) -> list[Batch]:
    """One batch a (rows, positions, padding)."""
    generator = torch.Generator().manual_seed(seed)
    return [make(rows, positions, padding, generator, **kwargs) for rows, positions, padding in sizes]


class Pair:
    """A model compiled by deepytorch, and its eager twin."""

    def __init__(
        self,
        model: nn.Module,
        *,
        options: dict[str, Any] | None = None,
        optimizer: Callable[..., torch.optim.Optimizer] | None = None,
        call: Callable[..., Any] | None = None,
        **compile_kwargs: Any,
    ) -> None:
        """`call(model, **batch)` is one forward; what is compiled is the model."""
        LEDGER.forget()
        self.model, self.reference = model, copy.deepcopy(model)
        self.compiled = torch.compile(
            model, backend="deepytorch", options={**OPTIONS, **(options or {})}, **compile_kwargs
        )
        self.call = call or (lambda module, **batch: module(**batch))
        make = optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9))
        self.optimizers = [make([p for p in m.parameters() if p.requires_grad]) for m in (self.reference, self.model)]

    def step(self, batch: Batch, compare: Compare | None = None, *, when: str = "before backward") -> None:
        """One optimizer step of both, every comparison made. `when` outputs are looked at: before or after backward."""
        expected, found = self.call(self.reference, **batch), self.call(self.compiled, **batch)
        wanted, loss = loss_of(expected), loss_of(found)
        assert_close(loss, wanted, "loss", rel=1e-5)
        if compare is not None and when == "before backward":
            compare(expected, found, batch)
        wanted.backward()
        loss.backward()
        assert_same_gradients(self.reference, self.model)
        if compare is not None and when == "after backward":
            compare(expected, found, batch)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def train(self, given: Iterable[Batch], compare: Compare | None = None) -> Report:
        """A step of each batch, outputs looked at in turns before backward, after it and never; then the weights."""
        for number, batch in enumerate(given):
            turn = number % 3
            self.step(batch, compare if turn < 2 else None, when=("before backward", "after backward", "")[turn])
        assert_same_parameters(self.reference, self.model)
        return LEDGER.report()


def loss_of(output: Any) -> torch.Tensor:
    """The loss of a model's output: its `loss`, its first item, or itself."""
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, (tuple, list)):
        return output[0]
    return output.loss


def assert_close(
    found: torch.Tensor, wanted: torch.Tensor, name: str, *, rel: float = 1e-5, floor: float = 1e-7
) -> None:
    """Same shape and dtype, and the difference's norm within `rel` of the wanted norm."""
    assert found.shape == wanted.shape, f"{name}: shape {tuple(found.shape)}, expected {tuple(wanted.shape)}"
    assert found.dtype == wanted.dtype, f"{name}: {found.dtype}, expected {wanted.dtype}"
    difference = (found.detach().double() - wanted.detach().double()).norm().item()
    norm = wanted.detach().double().norm().item()
    assert difference <= rel * norm + floor, f"{name}: off by {difference:.3g} of {norm:.3g} (relative {rel} allowed)"


def assert_same_gradients(reference: nn.Module, model: nn.Module, *, rel: float = 1e-4) -> None:
    """Every parameter's gradient, those that have none included."""
    wanted = {name: parameter.grad for name, parameter in reference.named_parameters()}
    largest = max((g.norm().item() for g in wanted.values() if g is not None), default=0.0)
    assert largest > 0, "the reference has no gradient at all: this test tests nothing"
    for name, parameter in model.named_parameters():
        if wanted[name] is None:
            assert parameter.grad is None or not parameter.grad.any(), f"{name} has a gradient that eager has not"
            continue
        assert parameter.grad is not None, f"{name} has no gradient, eager has one"
        assert_close(parameter.grad, wanted[name], f"gradient of {name}", rel=rel, floor=1e-6 * largest)


def assert_same_parameters(reference: nn.Module, model: nn.Module, *, rel: float = 1e-5, floor: float = 1e-6) -> None:
    """What both trainings made of the weights."""
    found = dict(model.named_parameters())
    for name, wanted in reference.named_parameters():
        assert_close(found[name], wanted, f"parameter {name}", rel=rel, floor=floor)


def compare_at_tokens(name: str = "logits", mask: str = "attention_mask") -> Compare:
    """An output with an entry a token: equal at tokens. (What stands at pads is zeros or what eager shows there.)"""

    def compare(expected: Any, found: Any, batch: Batch) -> None:
        real = batch[mask].bool()
        assert_close(getattr(found, name)[real], getattr(expected, name)[real], name, rel=1e-5, floor=1e-6)

    return compare


def compare_whole(name: str = "logits") -> Compare:
    """An output without positions: equal all over."""

    def compare(expected: Any, found: Any, batch: Batch) -> None:
        assert_close(getattr(found, name), getattr(expected, name), name, rel=1e-5, floor=1e-6)

    return compare


def expect_packed(report: Report, *, steps: int | None = None, padded: int | None = None) -> None:
    """That packing really fired: at least once, or exactly as often as said, the watched first step among them."""
    story = describe(report)
    assert report.total("steps_packed") > 0, f"nothing was packed: {story}"
    if steps is not None:
        assert report.total("steps_packed") + report.total("steps_profiled") == steps, story
    if padded is not None:
        assert report.total("steps_padded") == padded, story
    assert not [fallback for region in report.regions for fallback in region.fallbacks], story


def expect_not_packed(report: Report) -> None:
    """That nothing was packed, with a reason given, and nothing failed."""
    story = describe(report)
    assert report.regions, "no region was compiled"
    assert report.total("steps_packed") == 0, story
    assert any(region.declined or region.padded_because for region in report.regions), story
    assert not [fallback for region in report.regions for fallback in region.fallbacks], story


def padded_because(report: Report) -> dict[str, int]:
    """Why padded steps ran, over all regions."""
    reasons: dict[str, int] = {}
    for region in report.regions:
        for reason, count in region.padded_because.items():
            reasons[reason] = reasons.get(reason, 0) + count
    return reasons


def declined(report: Report) -> str:
    """Every reason for a decline, as one text."""
    return "; ".join(reason for region in report.regions for reason in region.declined)


def describe(report: Report) -> str:
    """The records, for a failing assertion."""
    return " | ".join(
        f"{r.name} {r.outcome} packed {r.steps_packed} padded {r.steps_padded} {r.padded_because} "
        f"declined {r.declined} fallbacks {r.fallbacks} recompiles {r.recompiles}"
        for r in report.regions
    )


def mixture(sizes: Sequence[tuple[int, int, str]] = ()) -> list[tuple[int, int, str]]:
    """The sizes that every family sees: all paddings, changing rows and positions, rows of one token."""
    return [(4, 11, "right"), (4, 13, "left"), (3, 9, "mixed"), (5, 12, "holes"), (4, 8, "one"), *sizes]
