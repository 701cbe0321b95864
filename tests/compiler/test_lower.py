"""Lowering runs our passes where they belong, beside the user's, and no cache ever mixes ours with stock's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from deepytorch.compiler.code import lower as lower_module
from deepytorch.compiler.code.lower import GraphPasses, fingerprint, lower
from deepytorch.compiler.config import CompilerConfig
from deepytorch.compiler.plan import Plan

aten = torch.ops.aten
EAGER = CompilerConfig(lowering="aot_eager")
INDUCTOR = CompilerConfig()
ROOT = Path(__file__).parents[2]


@pytest.fixture
def no_caches():
    with torch._inductor.config.patch(force_disable_caches=True):
        yield


@dataclass(frozen=True)
class Swap:
    """sin -> exp, which a forward shows; cos -> neg, which a backward shows."""

    factor: float = 1.0

    def __call__(self, graph: fx.Graph) -> None:
        swaps = {aten.sin.default: aten.exp.default, aten.cos.default: aten.neg.default}
        for node in graph.nodes:
            node.target = swaps.get(node.target, node.target)


def swap(graph: fx.Graph) -> None:
    Swap()(graph)


def function(x: torch.Tensor) -> torch.Tensor:
    return x.sin().sum()


def value_and_gradient(config: CompilerConfig, passes: GraphPasses | None = None) -> tuple[float, float]:
    torch._dynamo.reset()
    compiled = torch.compile(
        function, backend=lambda gm, inputs: lower(gm, inputs, config, passes=passes), fullgraph=True
    )
    x = torch.full((4,), 2.0, requires_grad=True)
    value = compiled(x)
    value.backward()
    return round(value.item() / 4, 4), round(x.grad[0].item(), 4)


STOCK = (0.9093, -0.4161)  # sin 2, cos 2
SWAPPED = (7.3891, -2.0)  # exp 2, -2


def test_aot_eager_runs_the_graph_as_it_is():
    assert value_and_gradient(EAGER) == STOCK


def test_eager_runs_the_graph_itself_and_has_no_place_for_passes():
    config = CompilerConfig(lowering="eager")
    assert config.waits
    assert value_and_gradient(config) == STOCK
    module = fx.symbolic_trace(torch.nn.Linear(2, 2))
    assert lower(module, [torch.ones(1, 2)], config) == module.forward
    with pytest.raises(ValueError, match="which the lowering 'eager' has none of"):
        lower(module, [torch.ones(1, 2)], config, passes=GraphPasses(post_grad_pre=(swap,)))


@pytest.mark.parametrize("slot", ["post_grad_pre", "post_grad_post"])
def test_aot_eager_runs_post_grad_passes_on_both_graphs(slot):
    assert value_and_gradient(EAGER, GraphPasses(**{slot: (Swap(),)})) == SWAPPED


@pytest.mark.parametrize("slot", ["joint_pre", "joint_post"])
def test_aot_eager_runs_joint_passes(slot):
    assert value_and_gradient(EAGER, GraphPasses(**{slot: (swap,)})) == SWAPPED


def test_aot_eager_runs_passes_without_gradients():
    compiled = torch.compile(
        function, backend=lambda gm, inputs: lower(gm, inputs, EAGER, passes=GraphPasses(post_grad_pre=(swap,)))
    )
    with torch.no_grad():
        assert compiled(torch.tensor([2.0])).item() == pytest.approx(7.3891, abs=1e-4)


def test_aot_eager_recomputes_what_activation_checkpointing_marked():
    calls = []

    def count(graph: fx.Graph) -> None:
        calls.append(sum(node.target is aten.sin.default for node in graph.nodes))

    def checkpointed(x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(lambda x: x.sin().sin(), x, use_reentrant=False).sum()

    passes = GraphPasses(post_grad_pre=(count,))
    compiled = torch.compile(checkpointed, backend=lambda gm, inputs: lower(gm, inputs, EAGER, passes=passes))
    x = torch.ones(3, requires_grad=True)
    compiled(x).backward()
    assert calls == [2, 1]  # the inner sine is computed again in the backward
    torch.testing.assert_close(x.grad, x.detach().cos() * x.detach().sin().cos())


@pytest.mark.slow
def test_inductor_runs_every_slot(no_caches):
    for slot in ("joint_pre", "joint_post", "post_grad_post"):  # the fourth is in most of these tests
        assert value_and_gradient(INDUCTOR, GraphPasses(**{slot: (Swap(),)})) == SWAPPED, slot


def test_inductor_reads_a_buffer_behind_the_write_into_it(no_caches):
    """Stock torch 2.13 adds the zeros that `index_put` is still to write into."""

    def with_written(x, y, entries, index, weight):
        scaled = x * y
        change = scaled - y * scaled.sum(1, keepdim=True)
        written = aten.index_put.default(torch.zeros(x.shape[0], 4), [index], entries.softmax(-1))
        return (x + change + change + written).t() @ weight

    index = torch.tensor([0, 3, 5, 7, 9])
    given = (torch.randn(12, 4), torch.randn(12, 4), torch.randn(5, 4), index, torch.randn(12, 8))
    torch._dynamo.reset()
    compiled = torch.compile(with_written, backend=lambda gm, inputs: lower(gm, inputs, INDUCTOR), dynamic=True)
    torch.testing.assert_close(compiled(*given), with_written(*given))


@pytest.mark.slow
def test_inductor_lowers_nested_in_a_backend_at_run_time(no_caches):
    passes = GraphPasses(post_grad_pre=(Swap(),))
    compilations = []

    def inner(gm: fx.GraphModule, inputs: list) -> object:
        compilations.append(gm)
        return lower(gm, inputs, INDUCTOR, passes=passes)

    def packed(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x.sin().sum(),)

    def outer(gm: fx.GraphModule, inputs: list) -> object:
        nested = torch.compile(packed, backend=inner, fullgraph=True, dynamic=True)
        return lambda *arguments: nested(arguments[-1])  # behind its size

    torch._dynamo.reset()
    compiled = torch.compile(function, backend=outer, dynamic=True)
    for length in (3, 5, 8, 13):
        x = torch.full((length,), 2.0, requires_grad=True)
        compiled(x).backward()
        assert x.grad[0] == -2
    assert len(compilations) == 1


class Counted(CustomGraphPass):
    """A pass such as a user puts into Inductor's slots."""

    def __init__(self, name: bytes | None = b"counted") -> None:
        self.name = name
        self.graphs: list[str] = []

    def __call__(self, graph: fx.Graph) -> None:
        self.graphs.append(str(graph))

    def uuid(self) -> bytes | None:
        return self.name


@pytest.mark.slow
@pytest.mark.parametrize("where", ["options", "config"])
def test_pass_that_the_user_had_set_still_runs_and_sees_what_it_would_see(where, no_caches):
    theirs, ours = Counted(), GraphPasses(post_grad_pre=(Swap(),), post_grad_post=(Swap(),))
    slots = {"post_grad_custom_pre_pass": theirs, "joint_custom_post_pass": theirs}
    if where == "options":
        assert value_and_gradient(CompilerConfig.parse(options=slots), ours) == SWAPPED
    else:
        with torch._inductor.config.patch(slots):
            assert value_and_gradient(INDUCTOR, ours) == SWAPPED
    assert len(theirs.graphs) == 3
    assert all("sin" in graph or "cos" in graph for graph in theirs.graphs)


@pytest.mark.skipif(lower_module._InferenceAware is None, reason="this version of torch has no inference-aware passes")
@pytest.mark.slow
def test_inference_aware_pass_of_the_user_is_told(no_caches):
    class Aware(lower_module._InferenceAware):
        told: list[bool] = []  # noqa: RUF012

        def __call__(self, graph: fx.Graph, is_inference: bool) -> None:
            self.told.append(is_inference)

        def uuid(self) -> bytes:
            return b"aware"

    with torch._inductor.config.patch(post_grad_custom_pre_pass=Aware()):
        assert value_and_gradient(INDUCTOR) == STOCK
    assert Aware.told == [False, False]


# cache keys


def test_there_is_always_a_pass_with_a_uuid():
    slots = lower_module._slots(GraphPasses(), {}, None)
    assert list(slots) == ["joint_custom_post_pass", "post_grad_custom_pre_pass"]
    assert all(each.uuid() for each in slots.values())


def test_uuid_tells_apart_what_matters(monkeypatch):
    base = GraphPasses(post_grad_pre=(Swap(),))
    others = [
        base,
        GraphPasses(),
        replace(base, post_grad_pre=(Swap(2.0),)),
        replace(base, post_grad_pre=(swap,)),
        replace(base, post_grad_pre=(Swap(), Swap())),
        replace(base, post_grad_pre=(), post_grad_post=(Swap(),)),
    ]
    uuids = [each.uuid() for each in others]
    for plan in (Plan.initial("a", INDUCTOR), Plan.initial("b", INDUCTOR)):
        uuids.append(lower_module._slots(base, {}, plan)["post_grad_custom_pre_pass"].uuid())
    monkeypatch.setattr(lower_module, "__version__", "another")
    uuids.append(base.uuid())
    monkeypatch.undo()
    monkeypatch.setattr(lower_module, "_module_source", lambda kind: "another source")
    uuids.append(base.uuid())
    assert None not in uuids
    assert len(set(uuids)) == len(uuids)


def test_what_cannot_be_told_apart_is_not_cached():
    captured = 3

    def closure(graph: fx.Graph) -> int:
        return captured

    class Plain:
        def __call__(self, graph: fx.Graph) -> None:
            pass

    for each in (closure, Plain(), len):
        assert fingerprint(each) is None
        passes = GraphPasses(post_grad_pre=(each,))
        assert passes.uuid() is None
        assert lower_module._slots(passes, {}, None)["post_grad_custom_pre_pass"].uuid() is None


@pytest.mark.parametrize("theirs", [Counted(None), Counted(b""), lambda graph: None])
def test_pass_of_the_user_without_a_uuid_is_not_cached(theirs):
    slots = lower_module._slots(GraphPasses(), {"post_grad_custom_pre_pass": theirs}, None)
    assert slots["post_grad_custom_pre_pass"].uuid() is None


def test_pass_of_the_user_is_part_of_the_key():
    slots = [
        lower_module._slots(GraphPasses(), {"post_grad_custom_pre_pass": each}, None)[
            "post_grad_custom_pre_pass"
        ].uuid()
        for each in (None, Counted(b"a"), Counted(b"b"), [Counted(b"a"), Counted(b"b")])
    ]
    assert len(set(slots)) == 4


CHILD = """
import json, sys
import torch
from torch._dynamo.utils import counters
from test_lower import GraphPasses, INDUCTOR, Swap, function, value_and_gradient

def stock():
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True)
    x = torch.full((4,), 2.0, requires_grad=True)
    value = compiled(x)
    value.backward()
    return round(value.item() / 4, 4), round(x.grad[0].item(), 4)

runs = {
    "stock": stock,
    "none": lambda: value_and_gradient(INDUCTOR),
    "post_grad": lambda: value_and_gradient(INDUCTOR, GraphPasses(post_grad_pre=(Swap(),))),
    "joint": lambda: value_and_gradient(INDUCTOR, GraphPasses(joint_pre=(Swap(),))),
}
found = {}
for name in sys.argv[1:]:
    counters.clear()
    result = runs[name]()
    found[name] = {
        "result": result,
        "hits": counters["inductor"]["fxgraph_cache_hit"],
        "misses": counters["inductor"]["fxgraph_cache_miss"],
        "autograd_hits": counters["aot_autograd"]["autograd_cache_hit"],
        "autograd_misses": counters["aot_autograd"]["autograd_cache_miss"],
        "bypasses": counters["inductor"]["fxgraph_cache_bypass"] + counters["aot_autograd"]["autograd_cache_bypass"],
    }
print(json.dumps(found))
"""


def run_child(names: tuple[str, ...], cache: Path) -> dict[str, dict]:
    variables = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run([sys.executable, "-c", CHILD, *names], env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    for name, each in found.items():
        assert tuple(each["result"]) == (STOCK if name in ("stock", "none") else SWAPPED), (name, each)
        assert each["bypasses"] == 0, name
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "order",
    [
        ("stock", "post_grad", "joint", "none"),
        pytest.param(("joint", "post_grad", "none", "stock"), marks=pytest.mark.matrix),
    ],
)
def test_warm_caches_of_stock_and_ours_never_cross(order, tmp_path):
    for name, cold in run_child(order, tmp_path).items():
        assert (cold["hits"], cold["autograd_hits"]) == (0, 0), name
        assert (cold["misses"], cold["autograd_misses"]) == (2, 1), name  # forward and backward
    for name, warm in run_child(order, tmp_path).items():
        assert (warm["misses"], warm["autograd_misses"]) == (0, 0), name
        assert (warm["hits"], warm["autograd_hits"]) == (2, 1), name
