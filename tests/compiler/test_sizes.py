"""How often Dynamo traces a region until the batch's sizes are symbols, and that no mark stays behind."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import _deregister_pytree_node, register_pytree_node

from deepytorch.compiler import backend
from deepytorch.compiler.code.nested import compile_nested
from deepytorch.compiler.compile_module import compiled_call
from deepytorch.compiler.dynamo.sizes import marked_ahead, unmarked
from deepytorch.compiler.outcome import Outcome, outcomes
from deepytorch.integrations.packed_attention import Rows, encode_mask
from deepytorch.torch_internals import dynamo_config

DIM = 16


class _Layer(nn.Module):
    def __init__(self, attends: bool = True) -> None:
        super().__init__()
        self.attends, self.linear = attends, nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        if not self.attends:
            return x * mask[..., None]
        heads = x[:, None]
        return F.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask[:, None, None, :].bool())[:, 0]


class _SelfAttention(_Layer):
    """The same by a name that tells."""


class _Model(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.tokens, self.layer = nn.Embedding(32, DIM), layer

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, unused: torch.Tensor | None = None) -> torch.Tensor:
        x = self.layer(self.tokens(ids), mask)
        return (x.square().mean(-1) * mask).sum() / mask.sum()


class _Traces:
    """What the backend was called with: of every trace the sizes of the batch."""

    def __init__(self) -> None:
        self.sizes: list[list[tuple[Any, ...]]] = []

    def __call__(self, module: Any, inputs: Any, **options: Any) -> Callable[..., Any]:
        values = [node.meta.get("example_value") for node in module.graph.nodes if node.op == "placeholder"]
        batch = [value for value in values if isinstance(value, torch.Tensor) and value.dtype is torch.int64]
        self.sizes.append([tuple(value.shape) for value in batch])
        return _BACKEND(module, inputs, **options)

    @property
    def symbolic(self) -> list[bool]:
        """Of each trace, whether a size of the batch is a symbol."""
        return [any(isinstance(size, torch.SymInt) for shape in sizes for size in shape) for sizes in self.sizes]


_BACKEND = backend.deepytorch_backend


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Traces]:
    """Traces of models that are analysed and run in eager: nothing is lowered."""
    from deepytorch.compiler import compile_module

    found = _Traces()
    monkeypatch.setattr(compile_module, "_OWN", weakref.WeakKeyDictionary())
    monkeypatch.setattr(compile_module, "_CALLED", set())
    monkeypatch.setattr(compile_module, "TorchCompileWrapper", lambda *_: found)
    token = backend.EXPLAINING.set([])
    torch._dynamo.reset()
    yield found
    backend.EXPLAINING.reset(token)
    torch._dynamo.reset()


def _batch(rows: int, positions: int) -> tuple[torch.Tensor, ...]:
    mask = (torch.arange(positions) < torch.randint(2, positions, (rows, 1))).long()
    return torch.randint(0, 32, (rows, positions)), mask, torch.ones(rows, positions)


def _marks(tensors: tuple[torch.Tensor, ...]) -> list[str]:
    return [name for tensor in tensors for name in vars(tensor)]


@pytest.mark.parametrize(("layer", "symbolic"), [(_SelfAttention, [True]), (_Layer, [False, True])])
def test_a_model_that_attends_by_name_is_traced_once(
    traces: _Traces, layer: type[_Layer], symbolic: list[bool]
) -> None:
    model, first, second = _Model(layer()), _batch(4, 11), _batch(3, 9)
    call = compiled_call(_Model, None, {"lowering": "aot_eager"})
    with outcomes() as found:
        for batch in (first, second, first):
            torch.testing.assert_close(call(model, *batch), model(*batch))
            assert _marks(batch) == []
    assert traces.symbolic == symbolic  # and the other sizes are the same graph's
    assert found == [Outcome.PACKED]


def test_a_graph_without_attention_is_traced_as_it_comes(traces: _Traces) -> None:
    """In spite of its name: by fixed sizes, as stock would, after one trace for nothing."""
    model, batch = _Model(_SelfAttention(attends=False)), _batch(4, 11)
    call = compiled_call(_Model, None, {"lowering": "aot_eager"})
    torch.testing.assert_close(call(model, *batch), model(*batch))
    assert traces.symbolic == [True, False]
    assert _marks(batch) == []


def test_a_region_that_cannot_be_packed_is_traced_as_stock_would(traces: _Traces) -> None:
    class _Around(_Model):
        def forward(self, ids: torch.Tensor, mask: torch.Tensor, unused: torch.Tensor | None = None) -> torch.Tensor:
            x = self.layer(self.tokens(ids), torch.ones_like(mask))  # no key is a pad
            return x.square().mean()

    model, batch = _Around(_SelfAttention()), _batch(4, 11)
    call = compiled_call(_Around, None, {"lowering": "aot_eager"})
    backend.EXPLAINING.set(None)  # which does not ask for the trace that stock lowers
    with outcomes() as found:
        torch.testing.assert_close(call(model, *batch), model(*batch))
    assert traces.symbolic == [True, False]
    assert found == [Outcome.DECLINED]
    assert _marks(batch) == []


def test_only_the_first_call_is_marked() -> None:
    """Marks on a later call's arguments would not match the guards of what is compiled."""
    seen = []

    class _Looks(_Model):
        def forward(self, ids: torch.Tensor, mask: torch.Tensor, unused: torch.Tensor | None = None) -> torch.Tensor:
            seen.append(sorted(vars(ids)))
            return ids.sum()

    call = compiled_call(_Looks, None, {"lowering": "aot_eager"})
    model = _Looks(_SelfAttention())
    with torch.compiler.set_stance("force_eager"):
        for _ in range(2):
            call(model, *_batch(4, 11))
    assert {"_deepytorch_marked", "_dynamo_weak_dynamic_indices"} <= set(seen[0])
    assert seen[1] == []


def test_what_would_cut_a_graph_is_left_out_before_the_first_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was noticed in the first trace, in time for the second one."""
    seen = []

    class _Warns(_Model):
        def forward(self, ids: torch.Tensor, mask: torch.Tensor, unused: torch.Tensor | None = None) -> torch.Tensor:
            seen.append(logging.Logger.warning_once in dynamo_config.ignore_logging_functions)  # type: ignore[attr-defined]
            return ids.sum()

    call = compiled_call(_Warns, None, {"lowering": "aot_eager"})
    monkeypatch.setattr(logging.Logger, "warning_once", lambda *_: None, raising=False)  # transformers comes late
    with dynamo_config.patch(ignore_logging_functions=set()), torch.compiler.set_stance("force_eager"):
        call(_Warns(_SelfAttention()), *_batch(4, 11))
    assert seen == [True]


def _leave(_: torch.Tensor) -> None:
    pass


def _mark(tensor: torch.Tensor) -> None:
    torch._dynamo.mark_dynamic(tensor, 1)


def _stamp(tensor: torch.Tensor) -> None:
    """As AOTAutograd does with the inputs of a graph whose sizes are symbols."""
    tensor._dynamo_propagated_dynamic_indices = {1}  # type: ignore[attr-defined]


@pytest.mark.parametrize("later", [_leave, _mark, _stamp])
@pytest.mark.parametrize("first", [_leave, _mark, _stamp])
def test_a_batch_that_comes_with_marks_is_the_same_graphs(
    first: Callable[[torch.Tensor], None], later: Callable[[torch.Tensor], None]
) -> None:
    """By the script, or by a graph of another model: one compile serves batches with marks and without."""
    compiled = []

    def count(module: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        compiled.append(module)
        return module.forward

    graph = torch.fx.symbolic_trace(lambda x: (x * 2,))
    torch._dynamo.reset()
    x = torch.ones(3, 4, dtype=torch.int64)
    first(x)
    marks = dict(vars(x))
    call, outputs = compile_nested(graph, count, [x], [(0, 1)])
    torch.testing.assert_close(outputs[0], x * 2)
    assert vars(x) == marks
    for shape in ((3, 5), (2, 7), (6, 2)):
        x = torch.ones(shape, dtype=torch.int64)
        later(x)
        marks = dict(vars(x))
        torch.testing.assert_close(call(x)[0], x * 2)
        assert vars(x) == marks
    assert len(compiled) == 1


def test_gradients_flow_through_what_is_marked() -> None:
    graph = torch.fx.symbolic_trace(lambda x: (x * 2,))
    x = torch.ones(3, 4, requires_grad=True)
    _, outputs = compile_nested(graph, lambda module, _: module.forward, [x], [(0, 1)])
    outputs[0].sum().backward()
    torch.testing.assert_close(x.grad, torch.full((3, 4), 2.0))


def _ahead(model: nn.Module, *tensors: torch.Tensor) -> list[str]:
    with marked_ahead(model, tensors[:1], {"rest": list(tensors[1:])}):
        return _marks(tensors)


def test_what_is_not_marked_ahead() -> None:
    model = _Model(_SelfAttention())
    assert _ahead(model, *_batch(4, 11)) != []
    assert _ahead(_Model(_Layer()), *_batch(4, 11)) == []  # nothing attends, as far as names tell
    assert _ahead(model, *_batch(1, 11)) == []  # one row, as of a packed batch
    ragged = torch.nested.nested_tensor([torch.ones(3, 4), torch.ones(2, 4)])
    for other in (nn.Parameter(torch.ones(4, 4)), torch.eye(4).to_sparse(), ragged, torch.tensor(4)):
        assert _ahead(model, other) == []
    with dynamo_config.patch(automatic_dynamic_shapes=False, assume_static_by_default=True):  # dynamic=False
        assert _ahead(model, *_batch(4, 11)) == []


def test_a_graph_without_attention_needs_nothing_of_dynamos() -> None:
    """Another front end's has no example values in its meta."""
    graph = torch.fx.symbolic_trace(nn.Linear(DIM, DIM))
    x = torch.randn(4, DIM)
    found = backend.deepytorch_backend(graph, [x], options={"lowering": "aot_eager"})(x)
    torch.testing.assert_close(found, graph(x))


def test_a_call_that_is_packed_at_entry_is_not_marked_ahead() -> None:
    """Its mask has rows, by its sizes: as many as the longest row has columns."""
    rows = Rows(torch.tensor([0, 3, 8]).int(), torch.tensor([0, 1, 2, 0, 1, 2, 3, 4]).int(), 5)
    packed = (torch.ones(1, 8, dtype=torch.int64), encode_mask(rows))
    model = _Model(_SelfAttention())
    with unmarked():
        assert _ahead(model, *packed) == []
        assert _ahead(model, *_batch(4, 11)) == []  # of a step that runs padded there
    assert _ahead(model, *_batch(4, 11)) != []


class _Cache:
    """Of a class whose registered flatten refuses some."""


def _refuse(_: _Cache) -> Any:
    raise RuntimeError("a cache of windows cannot be exported")


def test_arguments_that_cannot_be_flattened_are_left_unmarked() -> None:
    model, (ids, mask, _) = _Model(_SelfAttention()), _batch(4, 11)
    register_pytree_node(_Cache, _refuse, lambda leaves, _: _Cache())
    try:
        with marked_ahead(model, (ids, mask), {"past_key_values": _Cache()}):
            assert _marks((ids, mask)) == []
    finally:
        _deregister_pytree_node(_Cache)
    endless: list[Any] = [ids]
    endless.append(endless)
    with marked_ahead(model, (ids, mask), {"unused": endless}):
        assert _marks((ids, mask)) == []


def test_marks_of_the_users_own_stay_as_they_are() -> None:
    model, (ids, mask, unused) = _Model(_SelfAttention()), _batch(4, 11)
    torch._dynamo.mark_static(mask, 0)
    theirs = dict(vars(mask))
    with marked_ahead(model, (ids, mask, unused), {}):
        assert vars(mask) == theirs
        assert vars(ids)["_dynamo_weak_dynamic_indices"] == {0, 1}
    assert vars(mask) == theirs
    assert _marks((ids, unused)) == []


def test_marks_are_gone_after_an_error() -> None:
    batch = _batch(4, 11)

    def fail() -> None:
        with marked_ahead(_Model(_SelfAttention()), batch, {}):
            assert _marks(batch)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert _marks(batch) == []
