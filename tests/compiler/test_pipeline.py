"""A pass written by CONTRIBUTING's recipe: alone, before and behind the one that strips padding."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from deepytorch.compiler import backend, manager
from deepytorch.compiler.code import lower_region
from deepytorch.compiler.code.compiled_step import CompiledStep
from deepytorch.compiler.report import LEDGER
from deepytorch.passes.base import Context, Decline, Pass, Rewrite, Role
from deepytorch.passes.fuse_linear_loss import FuseLinearLoss
from deepytorch.passes.graphs import copied
from deepytorch.passes.unpad.strip_padding import StripPadding
from tests.compiler.plain_models import VOCAB, Plain, sdpa_bool

aten = torch.ops.aten


@dataclass(frozen=True)
class SquareByMultiplying(Pass):
    """pow(x, 2) -> x * x."""

    exponent: int = 2

    def rewrite(self, module: fx.GraphModule, context: Context) -> Rewrite:
        rewrite = Rewrite()
        for node in list(module.graph.nodes):
            if node.target is not aten.pow.Tensor_Scalar:
                continue
            if node.args[1] != self.exponent:
                rewrite.declined.append(Decline(node.name, f"to the power of {node.args[1]}"))
                continue
            with module.graph.inserting_before(node):
                product = module.graph.call_function(aten.mul.Tensor, (node.args[0], node.args[0]))
            product.meta |= node.meta
            node.replace_all_uses_with(product)
            module.graph.erase_node(node)
            rewrite.changes.append(f"{node.name} is a product")
        return rewrite


def _squared_loss(model: Any, x: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model.head(x.pow(2)).view(-1, VOCAB), labels.view(-1))


def _mean_loss(model: Any, x: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Over all positions, pads too: nothing can be packed."""
    return model.head(x.pow(2)).mean()


def _looks_everywhere(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def _losses(model: nn.Module, masks: list[torch.Tensor], compiled: bool) -> list[tuple[float, list[torch.Tensor]]]:
    call = torch.compile(model, backend="deepytorch", options={"lowering": "aot_eager"}) if compiled else model
    found = []
    for number, mask in enumerate(masks):
        ids = torch.randint(1, VOCAB, mask.shape, generator=torch.Generator().manual_seed(number))
        model.zero_grad()
        loss = call(ids, mask, ids.masked_fill(mask == 0, -100))
        loss.backward()
        found.append((loss.item(), [each.grad.clone() for each in model.parameters() if each.grad is not None]))
    return found


@pytest.mark.parametrize(
    ("masked", "passes", "outcome"),
    [
        pytest.param(True, (SquareByMultiplying(), StripPadding()), "packed", marks=pytest.mark.slow),
        (True, (StripPadding(), SquareByMultiplying()), "packed"),
        pytest.param(False, (StripPadding(), SquareByMultiplying()), "rewritten", marks=pytest.mark.slow),
        (False, (SquareByMultiplying(),), "rewritten"),
        (False, (SquareByMultiplying(exponent=3), StripPadding()), "declined"),
    ],
)
def test_a_pass_that_fired_is_lowered_whatever_becomes_of_padding(monkeypatch, masked, passes, outcome):
    ran: list[fx.GraphModule] = []
    lower = lower_region.lower

    def spying(module, *args, **kwargs):
        ran.append(copy.deepcopy(module))
        return lower(module, *args, **kwargs)

    monkeypatch.setattr(lower_region, "lower", spying)
    monkeypatch.setattr(backend, "passes_for", lambda plan: list(passes))
    assert {type(each) for each in manager.passes_for(manager.Plan.initial("r", backend.CompilerConfig.parse()))} == {
        StripPadding,
        FuseLinearLoss,
    }
    torch.manual_seed(0)
    model = Plain(sdpa_bool, _squared_loss) if masked else Plain(_looks_everywhere, _mean_loss)
    reference = copy.deepcopy(model)
    ragged = torch.tensor([[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 0], [1, 0, 0, 0, 0, 0]])
    masks = [ragged, ragged.flip(0), torch.ones_like(ragged), ragged]
    before = len(LEDGER.report().regions)
    ours, theirs = _losses(model, masks, compiled=True), _losses(reference, masks, compiled=False)
    for (loss, gradients), (wanted, expected) in zip(ours, theirs, strict=True):
        assert loss == pytest.approx(wanted, rel=1e-5)
        for one, other in zip(gradients, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    [region] = LEDGER.report().regions[before:]
    assert region.outcome == outcome
    assert not region.fallbacks
    powers = ["pow" in str(module.graph) for module in ran]
    if outcome == "declined":
        assert all(powers)
        assert any("to the power of 2" in reason for reason in region.declined)
    elif outcome == "rewritten":
        assert not any(powers)
    else:  # the packed graph, and the padded one for the batch without padding: as it was before padding was stripped
        assert len(ran) == 2
        assert sorted(powers) == [False, isinstance(passes[0], StripPadding)]


@dataclass(frozen=True)
class ReadValues(Pass):
    """Changes nothing; keeps a copy of what it is given."""

    seen: tuple[list[fx.GraphModule], ...] = field(default=([],), compare=False)

    def rewrite(self, module: fx.GraphModule, context: Context) -> Rewrite:
        self.seen[0].append(copied(module))
        return Rewrite()


class _Sizes(fx.Interpreter):
    """Compares the value that each node says it has with the one that it gets; symbols stand for what inputs have."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.numbers: dict[Any, int] = {}
        self.compared = 0

    def run_node(self, n: fx.Node) -> Any:
        value, said = super().run_node(n), n.meta.get("val")
        if isinstance(value, torch.Tensor):
            sizes = [size.node.expr if isinstance(size, torch.SymInt) else size for size in said.shape]
            if n.op == "placeholder":
                self.numbers |= {e: size for e, size in zip(sizes, value.shape, strict=True) if hasattr(e, "is_Symbol")}
            wanted = [int(e.subs(self.numbers)) if hasattr(e, "subs") else e for e in sizes]
            assert wanted == list(value.shape), n
            assert (said.dtype, said.device) == (value.dtype, value.device), n
            self.compared += 1
        return value


@pytest.mark.slow
@pytest.mark.parametrize("autocast", [False, True])
def test_a_pass_behind_another_reads_the_values_of_what_that_one_wrote(monkeypatch, autocast):
    reader = ReadValues(([],))
    monkeypatch.setattr(backend, "passes_for", lambda plan: [StripPadding(), SquareByMultiplying(), reader])
    given: list[tuple[fx.GraphModule, list[Any]]] = []
    run = CompiledStep.__call__

    def spying(self, arguments, *args, **kwargs):
        given.append((self._module, list(arguments)))
        return run(self, arguments, *args, **kwargs)

    monkeypatch.setattr(CompiledStep, "__call__", spying)

    def loss(model: Any, x: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return _squared_loss(model, x, mask, labels)

    torch.manual_seed(0)
    ragged = torch.tensor([[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 0], [1, 0, 0, 0, 0, 0]])
    _losses(Plain(sdpa_bool, loss), [ragged, ragged.flip(0)[:2, :4].contiguous()], compiled=True)
    [module] = reader.seen[0]
    nodes = [node for node in module.graph.nodes if node.op in ("placeholder", "call_function")]
    assert not any(node.target is aten.pow.Tensor_Scalar for node in nodes)
    assert {node.meta["input"].role for node in nodes if node.op == "placeholder"} >= {Role.PARAMETER, Role.INDEX}
    packed = [arguments for ran, arguments in given if any("flat_" in n.name for n in ran.graph.nodes)]
    assert len(packed) == 2
    for arguments in packed:
        sizes = _Sizes(module)
        with torch.no_grad():
            sizes.run(*arguments)
        assert sizes.compared > 30
        assert len(sizes.numbers) == 6  # rows, one more, positions, tokens, tokens with a label, the longest row
        counts = [node for node in nodes if node.target is aten.sym_size.int]
        assert counts
        assert all(isinstance(node.meta["val"], torch.SymInt) for node in counts)


def test_two_passes_that_depend_on_the_batch_are_a_mistake():
    from deepytorch.compiler.manager import run_passes

    @dataclass(frozen=True)
    class Both(SquareByMultiplying):
        depends_on_batch = True

    module = fx.GraphModule(nn.Module(), fx.Graph())
    x = module.graph.placeholder("x")
    squared = module.graph.call_function(aten.pow.Tensor_Scalar, (x, 2))
    again = module.graph.call_function(aten.pow.Tensor_Scalar, (squared, 3))
    module.graph.output((again,))
    with pytest.raises(AssertionError, match="both depend on the batch"):
        run_passes(module, [Both(), Both(exponent=3)], Context())
