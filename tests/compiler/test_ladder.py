"""A step that differs from eager is computed in the next way, without what is to blame: see [Note: Ladder]."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import fx, nn

from deepytorch.compiler.code import lower_region
from deepytorch.compiler.report import RegionRecord
from deepytorch.compiler.step.guard import Guard
from deepytorch.compiler.step.guarded import Guarded
from deepytorch.compiler.step.ladder import Ladder, Way
from deepytorch.compiler.step.tuner import CompiledForm, Eager
from deepytorch.passes.fuse_linear_loss import FuseLinearLoss
from deepytorch.passes.ops import linear_cross_entropy_chunked, varlen_attention_cpu
from tests.compiler.parity import Pair, batches, causal_batch

hf = pytest.importorskip("transformers")

VOCABULARY = 2048
GIVEN = batches(causal_batch, *[(4, 72, "right")] * 4, vocab=VOCABULARY)
STRICT = "emulate_precision_casts"


def llama() -> nn.Module:
    torch.manual_seed(0)
    widths = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = hf.LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, max_position_embeddings=128, **widths)
    return hf.LlamaForCausalLM(config).train()


@pytest.fixture(autouse=True)
def _each_step_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPYTORCH", "verify")
    monkeypatch.setenv("DEEPYTORCH_VERIFY_EVERY", "1")


def train(**options: Any) -> Any:
    """Train four steps beside eager, with the same numbers in each; return the region's record.

    The first one runs in eager, and the uses of its outputs are noted.
    """
    report = Pair(llama(), options=options).train(GIVEN)
    (region,) = report.regions
    return region


def test_nothing_is_left_out_where_nothing_differs() -> None:
    region = train()
    assert (region.steps_packed, region.verified_steps, region.fallbacks) == (3, 3, [])
    assert any("cross" in each for each in region.changes)


def test_a_pass_that_scales_the_loss_is_left_out_and_steps_stay_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    rewrite = FuseLinearLoss.rewrite

    def scales(self: FuseLinearLoss, module: fx.GraphModule, context: Any) -> Any:
        found = rewrite(self, module, context)
        if found.fired:
            [loss] = [n for n in module.graph.nodes if n.target is torch.ops.deepytorch.linear_cross_entropy.default]
            with module.graph.inserting_after(loss):
                scaled = module.graph.call_function(torch.ops.aten.mul.Scalar, (loss, 1.01))
            loss.replace_all_uses_with(scaled, delete_user_cb=lambda user: user is not scaled)
        return found

    monkeypatch.setattr(FuseLinearLoss, "rewrite", scales)
    region = train()
    assert region.steps_packed == 3
    [message] = region.fallbacks
    assert "FuseLinearLoss is to blame, and left out" in message


def test_a_kernel_that_scales_a_gradient_is_left_out_with_its_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = linear_cross_entropy_chunked.forward

    def scales(*args: Any) -> Any:
        loss, gradients, logsumexp = forward(*args)
        return loss, tuple(1.01 * each for each in gradients), logsumexp

    monkeypatch.setattr(linear_cross_entropy_chunked, "forward", scales)
    region = train()
    assert region.steps_packed == 3
    [message] = region.fallbacks
    assert "the gradient of weight" in message
    assert "FuseLinearLoss is to blame, and left out" in message


def test_a_kernel_of_packed_attention_that_is_wrong_leaves_steps_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = varlen_attention_cpu.forward
    monkeypatch.setattr(
        varlen_attention_cpu, "forward", lambda *args, **kwargs: tuple(1.01 * x for x in forward(*args, **kwargs))
    )
    region = train()
    assert (region.steps_packed, region.steps_padded) == (0, 3)
    [message] = region.fallbacks
    assert "StripPadding is to blame, and the region runs padded" in message


def wrong_compiler(is_right: Callable[[Any], bool], monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Have a compiler whose code is wrong unless its configuration is right; return which one compiled what."""
    compiled = []

    def lower(module: fx.GraphModule, example_inputs: Sequence[Any], *, config: Any, plan: Any) -> Any:
        right = is_right(config)
        compiled.append(right)

        def run(*inputs: Any) -> Any:
            found = module.forward(*inputs)
            return found if right else [1.01 * x if torch.is_floating_point(x) else x for x in found]

        return run

    monkeypatch.setattr(lower_region, "lower", lower)
    return compiled


def test_a_compiler_that_is_wrong_compiles_again_with_strict_numerics(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = wrong_compiler(lambda config: bool(config.inductor.get(STRICT)), monkeypatch)
    region = train(lowering="inductor")
    assert (region.steps_packed, compiled) == (3, [False, True])
    [message] = region.fallbacks
    assert "compiles the graph again with strict numerics" in message


def test_a_compiler_that_is_wrong_in_any_case_leaves_the_region_in_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = wrong_compiler(lambda config: False, monkeypatch)
    region = train(lowering="inductor")
    assert (region.steps_packed, compiled) == (0, [False, False])
    assert [each.rpartition("; ")[2] for each in region.fallbacks] == [
        "the compiler is to blame, and compiles the graph again with strict numerics",
        "the compiler is to blame, and the region runs in eager from now on",
    ]


# ---------------------------------------------------------------------- alone


def test_a_graph_without_other_passes_is_compiled_as_strictly_as_the_one_before() -> None:
    made: list[tuple[fx.GraphModule, bool]] = []

    def make(graph: fx.GraphModule, strict: bool) -> Way:
        made.append((graph, strict))
        return Way(graph, "code", None)  # type: ignore[arg-type]

    planned, alone = (fx.GraphModule({}, fx.Graph()) for _ in range(2))
    ladder = Ladder(make, planned, alone, ["FuseLinearLoss"])
    assert ladder.step_down(lambda way: True, is_compiled=True)[0]
    goes_on, what = ladder.step_down(lambda way: way.graph is alone, is_compiled=True)
    assert goes_on
    assert "FuseLinearLoss" in what
    assert made == [(planned, False), (planned, True), (alone, True)]
    assert ladder.step_down(lambda way: False, is_compiled=True) == (
        False,
        "StripPadding is to blame, and the region runs padded from now on",
    )
    assert not ladder.compiler_is_to_blame


def test_a_step_that_ran_operator_by_operator_does_not_blame_the_compiler() -> None:
    ladder = Ladder(lambda graph, strict: Way(graph, "code", None), fx.GraphModule({}, fx.Graph()))  # type: ignore[arg-type]
    assert ladder.step_down(lambda way: True, is_compiled=False)[1].startswith("StripPadding is to blame")


class Scaled:
    """Code that is there from a call on, and gives so many times what eager does."""

    def __init__(self, factor: float, ready_at: int = 0) -> None:
        self.factor, self.calls, self._polls, self._ready_at = factor, 0, 0, ready_at

    def poll(self, inputs: Sequence[Any]) -> bool:
        self._polls += 1
        return self._polls > self._ready_at

    def __call__(self, inputs: Sequence[Any]) -> list[torch.Tensor]:
        self.calls += 1
        return [self.factor * (inputs[0] * inputs[1]).sum()]


INPUTS = (nn.Parameter(torch.arange(1.0, 5.0)), torch.ones(4))


def guarded(*codes: Scaled | None) -> tuple[Guarded, RegionRecord]:
    record = RegionRecord("region", "packed", "inductor")
    forms = [each and CompiledForm(each, f"number {number}") for number, each in enumerate(codes)]
    eager = Eager(lambda *inputs: [(inputs[0] * inputs[1]).sum()])
    assert forms[0] is not None
    return Guarded(forms[0], [lambda form=form: form for form in forms[1:]], eager, Guard(record), record), record


def test_code_that_agrees_is_compared_once() -> None:
    code = Scaled(1.0)
    form, record = guarded(code)
    assert all(form.poll(INPUTS) for _ in range(3))
    assert (record.forms_compared, code.calls, record.fallbacks) == (1, 1, [])


def test_code_that_differs_is_left_for_the_next_that_agrees() -> None:
    form, record = guarded(Scaled(1.01), None, Scaled(0.9, ready_at=2), Scaled(1.0))
    assert [form.poll(INPUTS) for _ in range(6)] == [False, False, False, False, True, True]
    assert form(INPUTS)[0].item() == 10.0
    assert [each.split(": ")[-1].split("; ")[1] for each in record.fallbacks] == [
        "it runs number 2 from now on",
        "it runs number 3 from now on",
    ]


def test_code_that_differs_in_all_ways_is_left_for_eager() -> None:
    form, record = guarded(Scaled(1.01), Scaled(0.9))
    assert not any(form.poll(INPUTS) for _ in range(4))
    assert "it runs eager from now on" in record.fallbacks[-1]


def test_without_gradients_nothing_is_compared() -> None:
    form, record = guarded(Scaled(1.0))
    with torch.no_grad():
        assert form.poll(INPUTS)
    assert record.forms_compared == 0
