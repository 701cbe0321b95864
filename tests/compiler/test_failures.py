"""Whatever fails in deepytorch, training goes on: as stock would compile it, padded or eager, counted and said once."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._dynamo.exc import BackendCompilerFailed

import deepytorch.log
from deepytorch.compiler import backend as backend_module
from deepytorch.compiler.code import compiled_step, compilers, lower_region
from deepytorch.compiler.code.worker.queue import Compilation
from deepytorch.compiler.config import CompilerConfig
from deepytorch.compiler.report import LEDGER
from deepytorch.compiler.step import packing
from deepytorch.errors import ConfigError
from deepytorch.passes.unpad.strip_padding import StripPadding
from tests.compiler.parity import (
    COMPILED,
    OPTIONS,
    Pair,
    batches,
    describe,
    expect_packed,
    masked_lm_batch,
    padded_because,
)
from tests.compiler.plain_models import Plain, sdpa_bool

GIVEN = ((4, 11, "right"), (3, 13, "left"), (5, 9, "holes"), (4, 12, "right"))


class Broken(RuntimeError):
    pass


def model() -> nn.Module:
    return Plain(sdpa_bool, layers=1).train()


def fail(*args: Any, **kwargs: Any) -> Any:
    raise Broken("on purpose")


@pytest.fixture(autouse=True)
def nothing_said_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepytorch.log, "_SEEN", set())


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "deepytorch" and r.levelno >= logging.WARNING]


@pytest.mark.slow
def test_a_pass_that_raises_leaves_the_region_as_stock_compiles_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(StripPadding, "rewrite", fail)
    report = Pair(model()).train(batches(masked_lm_batch, *GIVEN))
    assert report.total("steps_packed") == 0
    assert all(region.outcome == "declined" for region in report.regions), describe(report)
    assert any("on purpose" in reason for region in report.regions for reason in region.declined), describe(report)
    said = warnings_of(caplog)
    assert len([line for line in said if "on purpose" in line]) == 1, said


def test_a_pass_that_breaks_the_graph_before_it_raises_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    def wreck(self: Any, module: Any, context: Any) -> Any:
        for node in list(module.graph.nodes):
            if node.op == "call_function" and not node.users:
                module.graph.erase_node(node)
        for node in module.graph.nodes:
            if node.op == "call_function":
                node.target = torch.ops.aten.neg.default
                node.args = node.args[:1]
        raise Broken("on purpose")

    monkeypatch.setattr(StripPadding, "rewrite", wreck)
    report = Pair(model()).train(batches(masked_lm_batch, *GIVEN))
    assert report.total("steps_packed") == 0, describe(report)


def test_capturing_that_raises_leaves_the_region_as_stock_compiles_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(backend_module, "capture", fail)
    report = Pair(model()).train(batches(masked_lm_batch, *GIVEN))
    assert report.total("steps_packed") == 0
    assert any("on purpose" in reason for region in report.regions for reason in region.declined), describe(report)
    assert len([line for line in warnings_of(caplog) if "on purpose" in line]) == 1


def test_lowering_that_raises_runs_eager_and_is_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lower_region, "lower", fail)
    report = Pair(model(), options=COMPILED).train(batches(masked_lm_batch, *GIVEN))
    fallbacks = [line for region in report.regions for line in region.fallbacks]
    assert any("on purpose" in line for line in fallbacks), describe(report)
    assert report.total("steps_packed") == 0
    said = [line for line in warnings_of(caplog) if "on purpose" in line]
    assert 1 <= len(said) == len(set(said)) <= 2, said


def test_lowering_that_raises_in_a_declined_region_runs_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lower_region, "lower", fail)
    report = Pair(model(), options={"unpad": False}).train(batches(masked_lm_batch, *GIVEN))
    assert any(region.outcome == "eager" for region in report.regions), describe(report)


def test_a_graph_without_inputs_is_compiled_beside_as_others_are(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def compiled_at_once(name: str, *_: Any) -> Compilation:
        asked.append(name)
        pending = Compilation(name)
        pending.finish()
        return pending

    def draw() -> torch.Tensor:
        return torch.arange(4.0).sin()

    monkeypatch.setattr(compilers, "compile_in_worker", compiled_at_once)
    monkeypatch.setattr(CompilerConfig, "waits", False)  # though nothing is gained by not waiting for this lowering
    LEDGER.forget()
    compiled = torch.compile(draw, backend="deepytorch", options={"lowering": "aot_eager"})
    with torch.no_grad():
        assert torch.equal(compiled(), draw())
        assert torch.equal(compiled(), draw())
    [region] = LEDGER.report().regions
    assert (region.outcome, region.fallbacks, region.compiles) == ("declined", [], 1)
    assert len(asked) == 1


def test_a_graph_that_computes_nothing_is_not_handed_to_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilers, "compile_in_worker", fail)
    nothing = fx.Graph()  # as Dynamo makes it where a frame only draws from `random`
    nothing.output(())
    step = backend_module.deepytorch_backend(fx.GraphModule(nn.Module(), nothing), [], options={"wait": False})
    assert step() == ()


def test_a_packed_step_that_fails_at_run_time_goes_on_padded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pair = Pair(model())
    given = batches(masked_lm_batch, *GIVEN)
    pair.step(given[0])
    calls = []
    original = compiled_step.CompiledStep.__call__

    def packed_fails(self: Any, arguments: list[Any]) -> Any:
        calls.append(self)
        if self is calls[0]:
            raise Broken("on purpose")
        return original(self, arguments)

    monkeypatch.setattr(compiled_step.CompiledStep, "__call__", packed_fails)
    for batch in given[1:]:
        pair.step(batch)
    report = LEDGER.report()
    assert report.total("steps_packed") == 1
    assert report.total("steps_padded") == 3
    assert padded_because(report) == {"the packed step failed": 3}
    assert len([line for region in report.regions for line in region.fallbacks]) == 1, describe(report)
    assert len([line for line in warnings_of(caplog) if "on purpose" in line]) == 1
    assert calls.count(calls[0]) == 1, "a step that failed is not tried again"


def test_facts_that_fail_in_every_step_are_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(model())
    given = batches(masked_lm_batch, *GIVEN)
    monkeypatch.setattr(packing, "read_facts", fail)
    for batch in given:
        pair.step(batch)
    report = LEDGER.report()
    assert padded_because(report) == {"the batch could not be read": len(given)}
    assert len([line for region in report.regions for line in region.fallbacks]) == 1, describe(report)


def test_both_steps_failing_at_run_time_goes_on_in_eager(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiled_step.CompiledStep, "__call__", fail)
    pair = Pair(model())
    for batch in batches(masked_lm_batch, *GIVEN):
        pair.step(batch)
    report = LEDGER.report()
    assert report.total("steps_packed") == 0
    lines = [line for region in report.regions for line in region.fallbacks]
    assert any("packed" in line for line in lines), describe(report)
    assert any("padded" in line for line in lines), describe(report)
    said = [line for line in warnings_of(caplog) if "on purpose" in line]
    assert len(said) == len(set(said)) == 2, said


def test_a_packed_step_that_fails_behind_a_padded_one_runs_in_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def broken(self: Any, arguments: Any) -> Any:
        calls.append(self)
        raise Broken("on purpose")

    monkeypatch.setattr(compiled_step.CompiledStep, "__call__", broken)
    pair = Pair(model(), options={"min_padding": 0.05})  # the first batch runs padded
    for batch in batches(masked_lm_batch, (4, 11, "none"), (4, 11, "right"), (4, 11, "right")):
        pair.step(batch)
    assert len(calls) == len(set(calls)) == 2, "code that has failed is run once more"


def test_an_error_of_the_users_own_model_is_the_users_to_see() -> None:
    compiled = torch.compile(model(), backend="deepytorch", options=OPTIONS)
    good, bad = batches(masked_lm_batch, (4, 11, "right"), (4, 11, "right"))
    compiled(**good)
    bad["input_ids"][0, 0] = 10_000  # no such word
    with pytest.raises((IndexError, RuntimeError)):
        compiled(**bad)


def test_running_out_of_memory_is_raised_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(self: Any, arguments: list[Any]) -> Any:
        raise torch.OutOfMemoryError("on purpose")

    pair = Pair(model())
    given = batches(masked_lm_batch, *GIVEN)
    pair.step(given[0])
    with monkeypatch.context() as patch:
        patch.setattr(compiled_step.CompiledStep, "__call__", no_memory)
        with pytest.raises(torch.OutOfMemoryError):
            pair.compiled(**given[1])
    pair.step(given[2])
    assert LEDGER.report().total("steps_packed") == 2, describe(LEDGER.report())


def test_an_option_that_is_not_known_is_refused_by_name() -> None:
    compiled = torch.compile(model(), backend="deepytorch", options={"lowerings": "aot_eager"})
    with pytest.raises(BackendCompilerFailed, match="lowerings") as raised:
        compiled(**batches(masked_lm_batch, (4, 11, "right"))[0])
    assert isinstance(raised.value.inner_exception, ConfigError)


def test_unpad_switched_off_compiles_everything_as_stock() -> None:
    report = Pair(model(), options={"unpad": False}).train(batches(masked_lm_batch, *GIVEN))
    assert report.total("steps_packed") == 0
    assert {region.outcome for region in report.regions} == {"declined"}


def test_loss_rows_switched_off_packs_tokens_and_keeps_every_loss_row() -> None:
    report = Pair(model(), options={"loss_rows": False}).train(batches(masked_lm_batch, *GIVEN))
    expect_packed(report)
    changes = [change for region in report.regions for change in region.changes]
    assert not [change for change in changes if re.search(r"[1-9]\d* operators on labelled tokens", change)]
