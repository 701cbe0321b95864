"""Calls without gradients: packed at entry with eager's numbers where that pays, and never for `generate`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from deepytorch import forward_only
from deepytorch.compiler import budget
from deepytorch.compiler.budget import Budget
from deepytorch.forward_only import ForwardOnly
from deepytorch.integrations.entry_uses import KEPT
from deepytorch.integrations.model_entry import ModelEntry, entry_for
from tests.compiler.parity import Batch, batches, causal_batch, masked_lm_batch, mixture
from tests.compiler.test_parity_decoders import gpt2, llama
from tests.compiler.test_parity_encoders import bert

STEPS = mixture([(4, 10, "none"), (3, 7, "right")])


class Evaluated:
    """A model with its entry, and a copy of it in eager."""

    def __init__(self, model: Any) -> None:
        self.model, self.eager = model, copy.deepcopy(model)
        found = entry_for(model)
        assert found is not None
        self.entry: ModelEntry = found
        self._calls = ForwardOnly(waits=True)

    def __call__(self, **batch: Any) -> Any:
        return self._calls.call(self.entry, self.model, (), batch)

    def expect(self, batch: Batch, mode: Callable[[], AbstractContextManager[object]] = torch.no_grad) -> None:
        """Compare a call with eager: the loss, and logits at tokens."""
        with mode():
            found, expected = self(**batch), self.eager(**batch)
            torch.testing.assert_close(found.loss, expected.loss)
            at = batch["attention_mask"].bool()
            torch.testing.assert_close(found.logits[at], expected.logits[at], rtol=1e-4, atol=1e-5)

    @property
    def packed(self) -> int:
        return self.entry.record.steps_packed + self.entry.record.steps_profiled


def with_dropout(model: Any, probability: float) -> Any:
    for each in model.modules():
        if isinstance(each, nn.Dropout):
            each.p = probability
    return model


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("build", [llama, gpt2], ids=lambda build: build.__name__)
def test_decoders_are_evaluated_as_in_eager_for_every_padding(build: Callable[[str], Any], mode: Any) -> None:
    evaluated = Evaluated(build("sdpa").eval())
    for batch in batches(causal_batch, *STEPS):
        evaluated.expect(batch, mode)
    assert evaluated.packed >= 5, evaluated.entry.record
    for batch in batches(causal_batch, *STEPS):
        evaluated.expect(batch, mode)
    assert evaluated.entry.record.steps_packed >= 5, evaluated.entry.record


def test_encoders_and_a_model_that_changes_its_mode() -> None:
    evaluated = Evaluated(with_dropout(hf.BertForMaskedLM(bert("sdpa")), 0.3))
    for training in (False, True, False):
        for each in (evaluated.model, evaluated.eager):
            each.train(training)
        for batch in batches(masked_lm_batch, *STEPS):
            with torch.no_grad():
                found, expected = evaluated(**batch), evaluated.eager(**batch)
            at = batch["attention_mask"].bool()
            if training:  # draws differ, and there are some
                assert not torch.allclose(found.logits[at], expected.logits[at])
            else:
                torch.testing.assert_close(found.logits[at], expected.logits[at], rtol=1e-4, atol=1e-5)
    assert evaluated.packed >= 12, evaluated.entry.record


def test_pads_are_those_of_the_mode_in_which_the_call_was_made() -> None:
    evaluated = Evaluated(with_dropout(hf.BertForMaskedLM(bert("sdpa")), 0.5).eval())
    first, second = batches(masked_lm_batch, (3, 9, "right"), (3, 9, "mixed"))
    for _ in range(KEPT + 2):
        evaluated.expect(first)
    with torch.no_grad():
        found, expected = evaluated(**second).logits, evaluated.eager(**second).logits
    evaluated.model.train()
    torch.testing.assert_close(found + 0.0, expected, rtol=1e-4, atol=1e-5)  # all of it, pads too
    assert evaluated.model.training
    assert all(each.training for each in evaluated.model.modules())


def test_a_script_that_keeps_logits_has_its_calls_run_padded() -> None:
    evaluated = Evaluated(llama("sdpa").eval())
    given = batches(causal_batch, *[(3, 9, "right")] * 9)
    with torch.no_grad():
        kept = [evaluated(**batch).logits for batch in given]
        expected = [evaluated.eager(**batch).logits for batch in given]
    assert evaluated.entry.record.steps_packed == 0  # it shows while calls are profiled
    assert "kept" in next(iter(evaluated.entry.record.padded_because))
    torch.testing.assert_close(torch.cat(kept), torch.cat(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("batches_evaluated", [2, 3, 9])
def test_logits_that_are_kept_are_there_when_other_weights_are_loaded(batches_evaluated: int) -> None:
    evaluated = Evaluated(llama("sdpa").eval())
    best = {name: each + 0.1 for name, each in evaluated.model.state_dict().items()}
    given = batches(causal_batch, *[(3, 9, "right")] * batches_evaluated)
    with torch.no_grad():
        kept = [evaluated(**batch).logits for batch in given]
        expected = [evaluated.eager(**batch).logits for batch in given]
    evaluated.model.load_state_dict(best)
    torch.testing.assert_close(torch.cat(kept), torch.cat(expected), rtol=1e-4, atol=1e-5)


def test_a_script_that_begins_to_keep_logits_later() -> None:
    evaluated = Evaluated(llama("sdpa").eval())
    given = batches(causal_batch, *[(3, 9, "right")] * 9)
    for batch in given:
        evaluated.expect(batch)
    assert evaluated.entry.record.steps_packed == len(given) - KEPT - 1
    with torch.no_grad():
        kept = [evaluated(**batch).logits for batch in given]
        expected = [evaluated.eager(**batch).logits for batch in given]
    assert "kept" in next(iter(evaluated.entry.record.padded_because))
    torch.testing.assert_close(torch.cat(kept), torch.cat(expected), rtol=1e-4, atol=1e-5)


class Clock:
    """The seconds since the process began, as the test says."""

    def __init__(self) -> None:
        self.now = 1000.0


class Entry:
    """Counts calls, and takes as long as it is told."""

    is_the_only_way = replaces_calls = False

    def __init__(self, clock: Clock, seconds: float) -> None:
        self.clock, self.seconds, self.calls = clock, seconds, 0

    def call(self, run: Any, args: Any, kwargs: Any) -> Any:
        self.calls += 1
        self.clock.now += self.seconds
        return "packed"

    def restore(self) -> None:
        raise AssertionError("evaluation restores nothing")

    def leave(self, reason: str) -> None:
        raise AssertionError("evaluation leaves training's packing alone")


class Padded(nn.Module):
    """A model whose calls take a second."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def forward(self, **batch: Any) -> str:
        self._clock.now += 1.0
        return "padded"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for home in (forward_only.time, budget.time):
        monkeypatch.setattr(home, "perf_counter", lambda: made.now)
    monkeypatch.setattr(budget, "seconds_since_start", lambda: made.now)
    monkeypatch.setattr(forward_only, "BUDGET", Budget())
    return made


MASKED: Mapping[str, Any] = {"input_ids": torch.ones(2, 8, dtype=torch.long), "attention_mask": torch.ones(2, 8)}


def test_packing_begins_when_it_can_be_afforded_and_ends_where_it_takes_longer(clock: Clock) -> None:
    calls, model = ForwardOnly(waits=False), Padded(clock)
    clock.now = 1.0
    slow = Entry(clock, 3.0)
    assert [calls.call(slow, model, (), MASKED) for _ in range(2)] == ["padded"] * 2  # the run is too young
    clock.now = 1000.0
    assert [calls.call(slow, model, (), MASKED) for _ in range(10)] == ["packed"] * 8 + ["padded"] * 2
    fast = Entry(clock, 0.5)
    calls = ForwardOnly(waits=False)
    found = [calls.call(fast, model, (), MASKED) for _ in range(20)]
    assert found == ["padded"] + ["packed"] * 19


def test_generation_and_calls_without_a_mask_never_reach_the_entry(clock: Clock) -> None:
    calls, model, entry = ForwardOnly(waits=True), Padded(clock), Entry(clock, 0.0)
    for more in ({"use_cache": True}, {"past_key_values": object()}, {"attention_mask": None}):
        assert calls.call(entry, model, (), {**MASKED, **more}) == "padded"
    one = {"input_ids": torch.ones(2, 1), "attention_mask": torch.ones(2, 1)}
    assert calls.call(entry, model, (), one) == "padded"
    assert entry.calls == 0
