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


def test_a_comparison_goes_through_no_graph_from_outside_of_the_region() -> None:
    torch.manual_seed(0)
    widths = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = hf.LlamaConfig(vocab_size=96, max_position_embeddings=128, tie_word_embeddings=True, **widths)

    def call(model: nn.Module, input_ids: torch.Tensor, **batch: torch.Tensor) -> Any:
        embeds = model.get_input_embeddings()(input_ids).sin()  # the weight of the head, which is in the region, too
        return model(inputs_embeds=embeds, **batch)

    pair = Pair(hf.LlamaForCausalLM(config).train(), call=call)
    (region,) = pair.train(batches(causal_batch, *[(4, 12, "right")] * 3)).regions
    assert (region.steps_packed, region.verified_steps, region.fallbacks) == (2, 2, [])


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_kernel_of_packed_attention_that_is_wrong_leaves_steps_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = varlen_attention_cpu.forward
    monkeypatch.setattr(
        varlen_attention_cpu, "forward", lambda *args, **kwargs: tuple(1.01 * x for x in forward(*args, **kwargs))
    )
    region = train()
    assert (region.steps_packed, region.steps_padded) == (0, 3)
    [message] = region.fallbacks
    assert message.endswith("StripPadding is to blame")


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
    monkeypatch.setattr(lower_region, "_has_strict_numerics", lambda module: True)
    region = train(lowering="inductor")
    assert (region.steps_packed, compiled) == (3, [False, True])
    [message] = region.fallbacks
    assert message.endswith("the compiler is to blame, and it is compiled again with strict numerics")


@pytest.mark.slow
def test_a_compiler_that_is_wrong_in_any_case_leaves_the_region_in_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lower_region, "_has_strict_numerics", lambda module: True)
    compiled = wrong_compiler(lambda config: False, monkeypatch)
    region = train(lowering="inductor")
    assert (region.steps_packed, compiled[:2]) == (0, [False, False])
    assert [each.rpartition("; ")[2] for each in region.fallbacks[:2]] == [
        "the compiler is to blame, and it is compiled again with strict numerics",
        "the compiler is to blame",
    ]
    assert region.route == "eager"


@pytest.mark.slow
def test_without_other_numerics_it_is_not_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong_compiler(lambda config: False, monkeypatch)
    region = train(lowering="inductor")
    assert region.fallbacks[0].endswith("the compiler is to blame")
    assert region.route == "eager"


def whole(**options: Any) -> Any:
    """Train a network of which nothing is packed nor tried beside eager; return the region's record."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))

    def call(module: nn.Module, x: torch.Tensor) -> Any:
        return (module(x).square().mean(),)

    pair = Pair(network, options={"tune": False, **options}, call=call)
    (region,) = pair.train([{"x": torch.randn(6, 8)} for _ in range(4)]).regions
    return region


def test_a_whole_region_is_compared_though_it_has_one_form() -> None:
    region = whole()
    assert (region.outcome, region.fallbacks) == ("declined", [])
    assert region.forms_compared > 0


def test_wrong_code_of_a_whole_region_is_left_for_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong_compiler(lambda config: False, monkeypatch)
    region = whole()
    [message] = region.fallbacks
    assert "compiled differs from eager" in message
    assert message.endswith("it is left for eager")
    assert region.route == "eager"


def test_nobody_compares_the_code_of_a_whole_region_that_steps_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DEEPYTORCH")
    assert whole().forms_compared == 0


# ---------------------------------------------------------------------- alone


class Uncompiled:
    """Code of a way that nobody runs. recomputes: parts of it are computed again in the backward."""

    def __init__(self, recomputes: bool = False) -> None:
        self.recomputes = recomputes


class Made:
    """Ways that were made, with their graphs."""

    def __init__(self, has_strict: bool = True, recomputes: bool = False) -> None:
        self.made: list[tuple[fx.GraphModule, bool]] = []
        self._has_strict, self._code = has_strict, Uncompiled(recomputes)

    def __call__(self, graph: fx.GraphModule, strict: bool) -> Way | None:
        self.made.append((graph, strict))
        return None if strict and not self._has_strict else Way(graph, self._code, None)  # type: ignore[arg-type]


def graphs() -> tuple[fx.GraphModule, fx.GraphModule]:
    return fx.GraphModule({}, fx.Graph()), fx.GraphModule({}, fx.Graph())


BEHIND = ["FuseLinearLoss"]


def test_a_graph_without_other_passes_is_compiled_as_strictly_as_the_one_before() -> None:
    make, (planned, alone) = Made(), graphs()
    ladder = Ladder(make, planned, alone, BEHIND)
    assert ladder.step_down(lambda way: True, is_compiled=True)[0]
    assert ladder.step_down(lambda way: way.graph is alone, is_compiled=True) == (
        True,
        "FuseLinearLoss is to blame, and left out",
    )
    assert make.made == [(planned, False), (planned, True), (alone, True)]
    assert ladder.step_down(lambda way: False, is_compiled=True) == (False, "StripPadding is to blame")
    assert not ladder.compiler_is_to_blame


def test_a_step_that_ran_operator_by_operator_does_not_blame_the_compiler() -> None:
    ladder = Ladder(Made(), graphs()[0])
    assert ladder.step_down(lambda way: True, is_compiled=False) == (False, "StripPadding is to blame")


@pytest.mark.parametrize("recomputes", [False, True])
def test_what_cannot_be_known_blames_nobody(recomputes: bool) -> None:
    make, (planned, alone) = Made(recomputes=recomputes), graphs()
    ladder = Ladder(make, planned, alone, BEHIND)

    def agrees(way: Way) -> bool | None:
        assert way.graph is alone or not recomputes, "a graph whose parts are to be computed again has run"
        return None

    for _ in range(2):
        goes_on, what = ladder.step_down(agrees, is_compiled=True)
        assert what.startswith("what is to blame is not known")
    assert not goes_on
    assert ladder.way.graph is planned
    assert not ladder.compiler_is_to_blame


def test_the_compiler_is_to_blame_where_it_has_no_other_numerics() -> None:
    ladder = Ladder(Made(has_strict=False), *graphs(), BEHIND)
    assert ladder.step_down(lambda way: True, is_compiled=True) == (False, "the compiler is to blame")
    assert ladder.compiler_is_to_blame


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


WEIGHT = nn.Parameter(torch.arange(1.0, 5.0))
INPUTS = (WEIGHT, torch.ones(4))


OPTIMIZER = torch.optim.SGD([nn.Parameter(torch.zeros(1))])


class Codes:
    """Guarded code of a region, of which all ways are known. operators: what its graph gives, operator by operator."""

    def __init__(
        self, code: Scaled, strict: Scaled | None = None, plain: Scaled | None = None, **settings: Any
    ) -> None:
        self.record, self.given_up = RegionRecord("region", "packed", "inductor"), 0
        self.operators: float | None = settings.pop("operators", 1.0)
        made = [each and CompiledForm(each, name) for each, name in ((strict, "strict"), (plain, "plain"))]
        graph = Eager(lambda *inputs: [(inputs[0] * inputs[1]).sum() * self.operators])
        self.form = Guarded(
            CompiledForm(code),
            None if self.operators is None else graph,
            lambda: made[0],
            lambda: made[1],
            Eager(lambda *inputs: [(inputs[0] * inputs[1]).sum()]),
            Guard(self.record),
            self.record,
            self._gives_up,
            **settings,
        )

    def _gives_up(self) -> None:
        self.given_up += 1

    def polls(self, count: int, *, steps: bool = True) -> list[bool]:
        """Poll so often, with a step of an optimizer after each or none."""
        found = []
        for _ in range(count):
            found.append(self.form.poll(INPUTS))
            if steps:
                OPTIMIZER.step()
        return found


def test_nothing_is_compared_between_two_calls_of_one_step() -> None:
    """The reducer of a data-parallel module may wait for the backward of the first one."""
    code = Scaled(1.0)
    codes = Codes(code, every=1)
    assert all(codes.polls(3, steps=False))
    assert code.calls == 1
    assert all(codes.polls(3))
    assert code.calls == 3  # the first of these is of the step before


def test_code_that_agrees_is_compared_once() -> None:
    code = Scaled(1.0)
    codes = Codes(code)
    assert all(codes.polls(3))
    assert (codes.record.forms_compared, code.calls, codes.record.fallbacks) == (1, 1, [])


def test_it_is_compared_again_where_that_is_asked_for() -> None:
    code = Scaled(1.0)
    codes = Codes(code, every=3)
    assert all(codes.polls(4))
    code.factor = 1.01
    assert codes.polls(2) == [True, False]  # the sixth step
    assert codes.given_up == 1


@pytest.mark.parametrize(
    ("operators", "name", "factor"), [(1.0, "strict", 3.0), (None, "strict", 3.0), (1.01, "plain", 4.0)]
)
def test_code_that_differs_is_left_for_code_without_what_is_to_blame(
    operators: float | None, name: str, factor: float
) -> None:
    strict, plain = Scaled(1.0, ready_at=2), Scaled(1.0, ready_at=2)
    codes = Codes(Scaled(1.01), strict, plain, operators=operators)
    assert codes.polls(5) == [False, False, False, True, True]
    [message] = codes.record.fallbacks
    assert "compiled differs from eager: output 0 by 1.0e-02" in message
    assert message.endswith(f"it is left for {name}")
    strict.factor, plain.factor = 3.0, 4.0
    assert codes.form(INPUTS)[0].item() == 10.0 * factor
    assert codes.given_up == 0


def test_code_that_differs_twice_is_left_for_eager() -> None:
    codes = Codes(Scaled(1.01), Scaled(0.9), Scaled(1.0))
    assert not any(codes.polls(4))
    assert codes.record.fallbacks[-1].endswith("it is left for eager")
    assert codes.given_up == 1


def test_a_comparison_that_comes_to_nothing_is_made_again_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepytorch.compiler.step.guard.has_room", lambda devices: False)
    code = Scaled(1.0)
    codes = Codes(code)
    assert all(codes.polls(2))
    monkeypatch.setattr("deepytorch.compiler.step.guard.has_room", lambda devices: True)
    assert all(codes.polls(4))
    assert code.calls == 1


def test_without_gradients_nothing_is_compared() -> None:
    codes = Codes(Scaled(1.0))
    with torch.no_grad():
        assert codes.polls(1) == [True]
    assert codes.record.forms_compared == 0
