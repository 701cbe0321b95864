"""Which route a call takes: each state and event of the machine, and random sequences of events against eager."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from deepytorch.compiler.code.compiled_step import CompiledStep
from deepytorch.compiler.report import LEDGER, RegionRecord
from deepytorch.compiler.step.events import RegionEvents
from deepytorch.compiler.step.route import MAX_PROFILED, Route, State, Uses, route
from tests.compiler.parity import (
    COMPILED,
    Batch,
    Pair,
    assert_close,
    assert_same_gradients,
    assert_same_parameters,
    batches,
    masked_lm_batch,
)  # fmt: skip
from tests.compiler.plain_models import Plain, filled

PACKS = State(packs=True, defers=True)
PROFILED = PACKS.profiled_call(trains=False)
WHOLE = State()


@dataclass
class Given:
    """A call as a test says it is. read: how often the batch was read."""

    is_forward_mode: bool = False
    is_recomputed: bool = False
    is_searched: bool = False
    why: str | None = None
    real_share: float = 0.3
    read: int = 0

    @property
    def refusal(self) -> str | None:
        self.read += 1
        return self.why


BROKEN = PROFILED.failed(Route.PACKED)
# state, call, the route, and what the reason says
ROUTES: list[tuple[State, Given, Route, str]] = [
    (WHOLE, Given(), Route.PADDED, ""),
    (WHOLE, Given(is_recomputed=True), Route.PADDED, ""),
    (WHOLE, Given(is_searched=True), Route.PADDED, ""),
    (WHOLE, Given(is_forward_mode=True), Route.EAGER, "forward-mode"),
    (WHOLE.needs_eager_backward("create_graph=True"), Given(), Route.EAGER, "create_graph=True"),
    # a checkpoint expects what ran before, whatever was asked since
    (WHOLE.needs_eager_backward("create_graph=True"), Given(is_recomputed=True), Route.PADDED, ""),
    (
        State(packs=True).needs_eager_backward("create_graph=True"),
        Given(is_recomputed=True),
        Route.EAGER,
        "create_graph",
    ),
    (WHOLE.failed(Route.PADDED), Given(), Route.EAGER, ""),
    (PACKS, Given(), Route.PROFILED, ""),
    (PACKS, Given(why="no padding"), Route.PADDED, "no padding"),
    (PACKS, Given(is_recomputed=True), Route.EAGER, "hooks on saved tensors"),
    (PACKS, Given(is_searched=True), Route.EAGER, "unused parameters"),
    (PACKS, Given(is_forward_mode=True), Route.EAGER, "forward-mode"),
    (PACKS.profiled_call(trains=True), Given(), Route.PROFILED, ""),
    (PACKS.profiled_call(trains=True).backward(), Given(), Route.PACKED, ""),
    (PROFILED, Given(), Route.PACKED, ""),
    (PROFILED, Given(why="no padding"), Route.PADDED, "no padding"),
    (PROFILED.used(Uses.PADS, "argmax looks at pads"), Given(), Route.PADDED, "argmax looks at pads"),
    (PROFILED.used(Uses.GRAPH, "retain_grad"), Given(), Route.EAGER, "retain_grad"),
    (PROFILED.used(Uses.VALUES, "mean"), Given(), Route.PACKED, ""),
    (PROFILED.used(Uses.VALUES, "mean"), Given(real_share=0.7), Route.PADDED, "mean"),
    (PROFILED.used(Uses.VALUES, "mean"), Given(why="no padding"), Route.PADDED, "no padding"),
    (PACKS.used(Uses.VALUES, "mean"), Given(), Route.PROFILED, ""),
    (PROFILED.needs_eager_backward("create_graph=True"), Given(), Route.EAGER, "create_graph=True"),
    (PROFILED.differed(), Given(), Route.PADDED, "differed"),
    (BROKEN, Given(), Route.PADDED, "failed"),
    (BROKEN.failed(Route.PADDED), Given(), Route.EAGER, "failed"),
    (State(packs=True), Given(), Route.PACKED, ""),  # its outputs are values: nobody can look at pads
    (State(packs=True), Given(is_recomputed=True), Route.PACKED, ""),
]


@pytest.mark.parametrize(("state", "call", "expected", "why"), ROUTES)
def test_the_route_of_a_call(state: State, call: Given, expected: Route, why: str) -> None:
    found, reason = route(state, call)
    assert found is expected
    assert why in reason
    assert bool(reason) or not why


def test_every_route_is_chosen_by_some_state() -> None:
    assert {expected for _, _, expected, _ in ROUTES} == set(Route)


@pytest.mark.parametrize(("state", "call", "expected", "why"), ROUTES)
def test_the_batch_is_read_only_where_it_decides(state: State, call: Given, expected: Route, why: str) -> None:
    call.read = 0
    route(state, call)
    reads = state.packs and state.uses <= Uses.VALUES and not state.broken and not call.is_forward_mode
    reads = reads and not (state.defers and (call.is_recomputed or call.is_searched))
    assert call.read == (1 if reads else 0)


EVENTS: dict[str, Callable[[State], State]] = {
    "values": lambda state: state.used(Uses.VALUES, "mean"),
    "pads": lambda state: state.used(Uses.PADS, "argmax"),
    "graph": lambda state: state.used(Uses.GRAPH, "retain_grad"),
    "a backward that needs eager": lambda state: state.needs_eager_backward("create_graph=True"),
    "differed": State.differed,
    "profiled": lambda state: state.profiled_call(trains=True),
    "profiled without a backward": lambda state: state.profiled_call(trains=False),
    "backward": State.backward,
    "packed failed": lambda state: state.failed(Route.PACKED),
    "padded failed": lambda state: state.failed(Route.PADDED),
}


def test_events_never_lead_back() -> None:
    """Whatever came before, an event never makes a region use less than it did, nor forgets a failure."""
    for names in itertools.product(EVENTS, repeat=3):
        state = PACKS
        for name in names:
            after = EVENTS[name](state)
            assert after.uses >= state.uses
            assert after.broken >= state.broken
            assert after.profiled >= state.profiled
            assert after.had_backward >= state.had_backward
            assert (after.uses > state.uses) == (after.because != state.because), "a reason stands for its use"
            state = after
        chosen, why = route(state, Given())
        assert (chosen is Route.EAGER) >= (state.uses is Uses.GRAPH)
        assert chosen not in state.broken
        assert why or chosen in (Route.PACKED, Route.PROFILED)


def test_an_event_changes_nothing_else() -> None:
    """Each event touches the fields that it names, and returns the same state where it tells nothing new."""
    touched = {
        name: {each.name for each in fields(State) if getattr(event(PACKS), each.name) != getattr(PACKS, each.name)}
        for name, event in EVENTS.items()
    }
    assert touched == {
        "values": {"uses", "because"},
        "pads": {"uses", "because"},
        "graph": {"uses", "because"},
        "a backward that needs eager": {"uses", "because"},
        "differed": {"uses", "because"},
        "profiled": {"profiled"},
        "profiled without a backward": {"profiled", "had_backward"},
        "backward": {"had_backward"},
        "packed failed": {"broken"},
        "padded failed": {"broken"},
    }
    used = EVENTS["graph"](PACKS)
    assert EVENTS["pads"](used) is used


def test_profiling_ends() -> None:
    state = PACKS
    for _ in range(MAX_PROFILED):
        assert not state.knows_uses
        state = state.profiled_call(trains=True)
    assert state.knows_uses


def test_events_are_written_to_the_record() -> None:
    record = RegionRecord("region", "packed", "eager")
    events = RegionEvents(record, PROFILED)
    events.used_tokens("logits", torch.softmax)
    events.looked_at_pads("logits", torch.argmax)
    assert record.outputs["logits"][0] == "softmax"
    assert "argmax" in record.outputs["logits"][1]
    assert "looks at padded positions of 'logits'" in events.state.because
    before = events.state
    events.looked_at_pads("logits", torch.argmax)
    assert events.state is before
    assert len(record.outputs["logits"]) == 3  # another line of the script


def test_values_without_gradients_are_enough_where_a_rank_can_run_a_call_again_and_later_steps_are_packed() -> None:
    events = RegionEvents(RegionRecord("region", "packed", "eager"), PROFILED)
    assert events.looked_at_values("logits", torch.mean)
    assert events.state.uses is Uses.VALUES
    assert "looks at padded positions without gradients of 'logits'" in events.state.because
    events.looked_at_pads("logits", torch.argmax)
    assert not events.looked_at_values("logits", torch.mean)
    assert events.state.uses is Uses.PADS
    alone = RegionEvents(RegionRecord("region", "packed", "eager"), PROFILED, can_replay=False)
    assert not alone.looked_at_values("logits", torch.mean)
    assert alone.state.uses is Uses.PADS


# ---------------------------------------------------------------------- a whole region, against eager


def _loss_and_logits(model: Any, x: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> Any:
    logits = model.head(x)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


def _reads_loss(loss: torch.Tensor, logits: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return loss


def _reads_tokens(loss: torch.Tensor, logits: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return loss + 1e-2 * logits[mask.bool()].square().mean()


def _reads_pads(loss: torch.Tensor, logits: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return loss + 1e-2 * logits.square().mean()


def _retains(loss: torch.Tensor, logits: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    if logits.requires_grad:
        logits.retain_grad()
    return _reads_pads(loss, logits, mask)


USES = (_reads_loss, _reads_tokens, _reads_pads, _retains)
SHAPES = [(4, 11, "right"), (3, 9, "left"), (2, 11, "mixed"), (5, 7, "holes"), (3, 8, "none"), (4, 9, "one")]
STEPS = 14


def _run(model: nn.Module, run: Any, use: Any, kind: str, batch: Batch) -> torch.Tensor:
    """Return the loss of one step of a kind, its gradients in the model."""
    if kind == "evaluation":
        with torch.no_grad():
            return use(*run(**batch), batch["attention_mask"])
    loss = use(*run(**batch), batch["attention_mask"])
    if kind == "create_graph":
        slopes = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        loss = loss + 1e-3 * sum(each.square().sum() for each in slopes)
    loss.backward(retain_graph=kind == "retain_graph")
    return loss.detach()


@pytest.mark.parametrize("seed", range(5))
def test_a_random_sequence_of_events_trains_as_eager(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses of outputs, failures, evaluation, second backwards and batches without padding between, in any order."""
    chosen = random.Random(seed)
    torch.manual_seed(seed)
    pair = Pair(Plain(filled, _loss_and_logits, layers=1).train(), options=COMPILED)
    run_code, broken = CompiledStep.__call__, [False]

    def maybe_broken(self: CompiledStep, arguments: Any) -> Any:
        if broken[0]:
            broken[0] = False
            raise ValueError("on purpose")
        return run_code(self, arguments)

    monkeypatch.setattr(CompiledStep, "__call__", maybe_broken)
    happened = []
    for number in range(STEPS):
        # a region never goes back, so uses that end packing come up late
        use = chosen.choice(USES[: 1 + number // 4])
        kinds = ["step", "step", "evaluation", *(("retain_graph",) if number > 6 else ())]
        kind = chosen.choice([*kinds, *(("create_graph", "failure") if number > 9 else ())])
        [batch] = batches(masked_lm_batch, chosen.choice(SHAPES), seed=100 * seed + number)
        happened.append(f"{kind}, {use.__name__}")
        wanted = _run(pair.reference, pair.reference, use, kind, batch)
        broken[0] = kind == "failure"
        found = _run(pair.model, pair.compiled, use, kind, batch)
        broken[0] = False
        assert_close(found, wanted, f"the loss after {happened}", rel=2e-5)
        if kind != "evaluation":
            assert_same_gradients(pair.reference, pair.model)
            for optimizer in pair.optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert_same_parameters(pair.reference, pair.model)
    assert LEDGER.report().total("steps_packed") > 0, happened
