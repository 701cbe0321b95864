"""Numbers over all positions that a script takes for its log, without gradients: steps stay packed, and the numbers are
eager's, from one more forward.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from deepytorch.compiler.report import LEDGER
from tests.compiler.parity import OPTIONS, Batch, assert_close, assert_same_gradients, batches, causal_batch
from tests.compiler.test_outputs import bert, llama, without_labels
from tests.integrations.test_model_entry import entry_of

MANY_PADS = [(6, 20, "right"), (5, 24, "left"), (6, 22, "mixed"), (4, 26, "right"), (6, 21, "mixed")]
Call = Callable[..., Any]


def mostly_pads(*sizes: tuple[int, int, str]) -> list[Batch]:
    """Return batches in which at most a third of the positions are real."""
    found = []
    for batch in batches(causal_batch, *sizes):
        keep = batch["attention_mask"].cumsum(1) <= batch["attention_mask"].shape[1] // 3
        mask = batch["attention_mask"] * keep
        found.append({**batch, "attention_mask": mask, "labels": batch["labels"].masked_fill(mask == 0, -100)})
    return found


def mean_of_detached(logits: torch.Tensor) -> Any:
    return logits.detach().mean()


def mean_of_rows(logits: torch.Tensor) -> Any:
    return torch.stack([logits[:2].detach().mean(), logits[2:].detach().float().mean()])


def largest_without_grad(logits: torch.Tensor) -> Any:
    with torch.no_grad():
        return torch.stack([logits.amax(), logits.sum(), logits.std(), logits.softmax(-1).amax(-1).mean()])


def nan_anywhere(logits: torch.Tensor) -> Any:
    return torch.isnan(logits.detach()).any().float() + (logits.detach() > 0.1).sum()


LOOKS = [mean_of_detached, mean_of_rows, largest_without_grad, nan_anywhere]


def sequence_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the loss of log-probabilities of rows, as preference losses have it."""
    found = -F.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none").sum(1)
    return -F.logsigmoid(found[::2][: len(found) // 2] - found[1::2]).mean()


def region(model: nn.Module) -> Call:
    return torch.compile(model, backend="deepytorch", options=OPTIONS)  # type: ignore[no-any-return]


def at_entry(model: nn.Module) -> Call:
    entry = entry_of(model)
    return lambda **given: entry.call(model._call_impl, (), given)


def trained(call_of: Callable[[nn.Module], Call], model: nn.Module, look: Call, given: list[Batch]) -> tuple[int, ...]:
    """Train beside eager, with what `look` finds in each step compared; return how many steps ran packed, replayed."""
    reference = copy.deepcopy(model)
    call = call_of(model)
    before = LEDGER.report()
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-3) for each in (reference, model)]
    for number, batch in enumerate(given):
        seen, losses = [], []
        for each, optimizer in zip((reference, call), optimizers, strict=True):
            torch.manual_seed(number)
            optimizer.zero_grad()
            logits = each(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
            losses.append(sequence_loss(logits, batch["labels"]))
            seen.append(look(logits))
            losses[-1].backward()
        assert_close(losses[1], losses[0], f"loss {number}", rel=1e-5)
        assert_close(seen[1], seen[0], f"what was looked at in step {number}", rel=1e-5)
        assert type(seen[1]) is torch.Tensor
        assert not seen[1].requires_grad
        assert_same_gradients(reference, model)
        for optimizer in optimizers:
            optimizer.step()
    after = LEDGER.report()
    return tuple(after.total(name) - before.total(name) for name in ("steps_packed", "steps_replayed", "steps_padded"))


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("call_of", [region, at_entry])
def test_a_look_without_gradients_leaves_steps_packed(call_of: Callable[[nn.Module], Call], look: Call) -> None:
    given = mostly_pads(*MANY_PADS)
    assert trained(call_of, llama(), look, given) == (len(given) - 1, len(given) - 1, 0)


def test_a_batch_of_few_pads_runs_padded_then() -> None:
    given = mostly_pads(*MANY_PADS[:3]) + batches(causal_batch, (4, 12, "right"))
    for batch in given[3:]:
        batch["attention_mask"][1, -2:] = 0
        batch["labels"][1, -2:] = -100
        batch["attention_mask"][0], batch["attention_mask"][2:] = 1, 1
    assert trained(region, llama(), mean_of_detached, given) == (2, 2, 1)


def test_with_a_gradient_steps_run_padded() -> None:
    def look(logits: torch.Tensor) -> Any:
        return logits.mean().detach()

    given = mostly_pads(*MANY_PADS[:3])
    assert trained(region, llama(), look, given) == (0, 0, len(given) - 1)


@pytest.mark.parametrize("call_of", [region, at_entry])
@pytest.mark.parametrize(
    "write",
    [
        lambda detached: detached.mul_(2),
        lambda detached: detached.view(-1)[3:9].zero_(),
        lambda detached: detached.numpy().fill(0.25),
        lambda detached: detached.data.add_(1),
    ],
)
def test_a_write_into_a_detached_output_is_seen_by_later_looks(
    call_of: Callable[[nn.Module], Call], write: Call
) -> None:
    def look(logits: torch.Tensor) -> Any:
        detached = logits.detach()
        first = detached.mean()
        if len(seen) // 2 == 2:  # in the third step, when steps are packed
            write(detached)
        seen.append(True)
        return torch.stack([first, detached.mean(), logits.detach().mean()])

    seen: list[bool] = []
    model = llama()
    reference = copy.deepcopy(model)
    call = call_of(model)
    for batch in mostly_pads(*MANY_PADS):
        found = []
        for each in (reference, call):
            logits = each(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
            sequence_loss(logits, batch["labels"]).backward()
            found.append(look(logits))
        assert_close(found[1], found[0], "what was looked at", rel=1e-5)
        assert_same_gradients(reference, model)


@pytest.mark.parametrize("call_of", [region, at_entry])
def test_a_look_with_gradients_may_come_behind_one_without(call_of: Callable[[nn.Module], Call]) -> None:
    model = llama()
    reference = copy.deepcopy(model)
    call = call_of(model)
    for number, batch in enumerate(mostly_pads(*MANY_PADS)):
        found = []
        for each in (reference, call):
            logits = each(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
            loss = sequence_loss(logits, batch["labels"])
            found.append(logits.detach().mean())
            if number == 3:
                loss = loss + logits.square().mean()
                found[-1] = found[-1] + logits.detach().sum()
            loss.backward()
        assert_close(found[1], found[0], "what was looked at", rel=1e-5)
        assert_same_gradients(reference, model)


def test_with_dropout_the_numbers_are_those_that_eager_would_have_drawn() -> None:
    model = bert(hidden_dropout_prob=0.3)
    reference = copy.deepcopy(model)
    compiled = torch.compile(model, backend="deepytorch", options=OPTIONS)
    given = mostly_pads((6, 20, "right"), (5, 24, "right"), (6, 22, "right"))  # its pooler reads first positions
    for number, batch in enumerate(given):
        found, later = [], []
        for each in (reference, compiled):
            torch.manual_seed(number)
            hidden = without_labels(each, batch).last_hidden_state
            drawn = torch.get_rng_state()
            found.append(hidden.detach().mean())
            assert torch.equal(torch.get_rng_state(), drawn), "a look draws nothing"
            later.append(hidden[batch["attention_mask"].bool()].square().sum())
            later[-1].backward()
        assert_close(found[1], found[0], "mean", rel=1e-5)
        assert torch.isfinite(later[1])
        model.zero_grad()
        reference.zero_grad()
    assert LEDGER.report().regions[-1].steps_replayed == len(given) - 1


def test_without_any_gradients_a_look_at_pads_has_calls_run_padded() -> None:
    """An evaluation gains nothing from a packed forward beside the padded one."""
    model = llama().eval()
    reference = copy.deepcopy(model)
    compiled = torch.compile(model, backend="deepytorch", options=OPTIONS)
    with torch.no_grad():
        for batch in mostly_pads(*MANY_PADS[:3]):
            wanted, found = (without_labels(each, batch).logits.mean() for each in (reference, compiled))
            assert_close(found, wanted, "mean", rel=1e-5)
    assert LEDGER.report().regions[-1].steps_packed == 0


def test_a_look_behind_the_optimizers_step_sees_the_old_weights() -> None:
    model = llama()
    reference = copy.deepcopy(model)
    compiled = torch.compile(model, backend="deepytorch", options=OPTIONS)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (reference, model)]
    for batch in mostly_pads(*MANY_PADS):
        found = []
        for each, optimizer in zip((reference, compiled), optimizers, strict=True):
            optimizer.zero_grad()
            logits = each(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
            sequence_loss(logits, batch["labels"]).backward()
            optimizer.step()
            found.append(logits.detach().mean())
        assert_close(found[1], found[0], "mean", rel=1e-4)
    assert LEDGER.report().regions[-1].steps_replayed == len(MANY_PADS) - 1
