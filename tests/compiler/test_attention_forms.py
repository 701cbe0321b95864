"""Which form computes an attention on a GPU, told from a packed graph, without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import deepytorch.passes.ops.varlen_attention  # noqa: F401  (registers the operator)
from deepytorch.compiler.dynamo.graph_traits import attention_forms
from deepytorch.passes.ops import varlen_attention_cuda as cuda


class Attentions:
    """A graph of attentions, whose tokens are as many as a symbol says."""

    def __init__(self, device: str) -> None:
        self.graph = fx.Graph()
        self.env = ShapeEnv()
        self._fake = FakeTensorMode(shape_env=self.env)
        self._tokens = self._fake.from_tensor(torch.empty(19, 1)).shape[0]
        self._device = device
        self.rows, self.other_rows = self._input(5, dtype=torch.int32), self._input(5, dtype=torch.int32)

    def _input(self, *sizes: Any, dtype: torch.dtype) -> fx.Node:
        node = self.graph.placeholder(f"input_{len(self.graph.nodes)}")
        with self._fake:
            node.meta["val"] = torch.empty(sizes, dtype=dtype, device=self._device)
        return node

    def add(self, dtype: torch.dtype, head_dim: int = 64, bias: bool = False, cross: bool = False, **rule: Any) -> None:
        """One more attention."""
        tensors = [self._input(self._tokens, 4, head_dim, dtype=dtype) for _ in range(3)]
        added = self._input(4, 1, self._tokens, self._tokens, dtype=dtype) if bias else None
        rows = (self.rows, self.other_rows if cross else self.rows)
        self.graph.call_function(
            torch.ops.deepytorch.varlen_attention.default,
            (*tensors, *rows, 19, 19, added, None, None, None),
            {"scale": 0.1, **rule},
        )


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with such a GPU."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(cuda, "_capability", lambda _: (9, 0))


@pytest.mark.usefixtures("hopper")
def test_each_attention_has_its_form_and_why_no_faster_one() -> None:
    pytest.importorskip("triton")
    attentions = Attentions("cuda")
    for _ in range(2):
        attentions.add(torch.bfloat16, window_right=0)
    attentions.add(torch.float32)
    attentions.add(torch.bfloat16, bias=True)
    attentions.add(torch.bfloat16, window_left=3, window_right=0)
    attentions.add(torch.bfloat16, window_left=3, window_right=0, cross=True)
    attentions.add(torch.bfloat16, head_dim=320)
    attentions.add(torch.bfloat16, dropout_p=0.1)
    yet = "not measured on this device yet"
    redrawn = "dropout, which a recomputed forward would draw anew"
    assert attention_forms(attentions.graph) == {
        f"flash (triton: {yet}; efficient: {yet})": 2,
        f"flash (efficient: a window; triton: {yet})": 1,
        f"triton (flash: dtype torch.float32; efficient: {yet})": 1,
        "triton (flash: a bias; efficient: a bias)": 1,
        "triton (flash: a window between two token spaces; efficient: a window)": 1,
        f"triton (flash: {redrawn}; efficient: {redrawn})": 1,
        "efficient (flash: head_dim 320 of keys and 320 of values; triton: head_dim 320 of keys and 320 of values)": 1,
    }


@pytest.mark.usefixtures("hopper")
def test_what_was_measured_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(cuda, "known", lambda _, __, forms: forms[-1])
    attentions = Attentions("cuda")
    attentions.add(torch.float32)
    assert attention_forms(attentions.graph) == {
        "efficient (flash: dtype torch.float32; triton: slower where it was measured)": 1
    }


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_asking_guards_on_no_size(device: str) -> None:
    attentions = Attentions(device)
    attentions.add(torch.bfloat16, bias=True)
    guards = len(attentions.env.guards)
    assert sum(attention_forms(attentions.graph).values()) == 1
    assert len(attentions.env.guards) == guards


def test_on_the_cpu_there_is_one_form_and_a_graph_may_have_none() -> None:
    attentions = Attentions("cpu")
    assert attention_forms(attentions.graph) == {}
    attentions.add(torch.float32, bias=True)
    assert attention_forms(attentions.graph) == {"cpu": 1}
