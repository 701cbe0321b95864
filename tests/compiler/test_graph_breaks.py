"""Where Dynamo cuts a model in two, what crosses the cut is no output of the model: what follows may look at pads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from deepytorch.compiler.compile_module import compiled_call
from deepytorch.compiler.dynamo.asserted_scalars import asserts_scalars
from tests.compiler.parity import OPTIONS, Pair, batches, causal_batch, expect_packed, masked_lm_batch
from tests.compiler.plain_models import DIM, SIZES, VOCAB, Block, sdpa_bool


class Recurrence(nn.Module):
    """Dynamo does not trace it."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(DIM, DIM, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.cell(x)[0]


def broken_then_centred(x: torch.Tensor) -> torch.Tensor:
    torch._dynamo.graph_break()
    return x - x.mean(1, keepdim=True)


def broken_only(x: torch.Tensor) -> torch.Tensor:
    torch._dynamo.graph_break()
    return x


class Cut(nn.Module):
    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.first, self.second = Block(sdpa_bool), Block(sdpa_bool)
        self.between = between

    def forward(self, input_ids: Any, attention_mask: Any, labels: Any) -> torch.Tensor:
        x = self.between(self.first(self.tokens(input_ids), attention_mask))
        return F.cross_entropy(self.head(self.second(x, attention_mask)).flatten(0, 1), labels.flatten())


@pytest.mark.slow
@pytest.mark.parametrize(
    "build",
    [pytest.param(Recurrence, marks=pytest.mark.slow), lambda: broken_then_centred, lambda: broken_only],
    ids=["a recurrent network", "a mean over positions", "nothing"],
)
def test_a_cut_model_trains_as_eager_does(build: Callable[[], Any]) -> None:
    Pair(Cut(build()).train()).train(batches(masked_lm_batch, *SIZES))


@pytest.mark.slow
def test_a_warning_of_transformers_does_not_cut_a_model_imported_after_us() -> None:
    """GPT-2 warns once in its loss, through a method that transformers adds to `logging.Logger` when it is imported."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_embd=32, n_layer=1, n_head=4, vocab_size=96, n_positions=32, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
        use_cache=False,
    )  # fmt: skip
    pair = Pair(transformers.GPT2LMHeadModel(config).train())
    with torch._dynamo.config.patch(ignore_logging_functions=set()):
        given = batches(causal_batch, (4, 11, "right"), (3, 13, "left"), (4, 9, "right"), (3, 11, "left"))
        expect_packed(pair.train(given), steps=4)


def xlm() -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.XLMConfig(
        emb_dim=32, n_layers=1, n_heads=4, vocab_size=96, max_position_embeddings=32, dropout=0.0, pad_index=1,
        attention_dropout=0.0, use_cache=False,
    )  # fmt: skip
    return transformers.XLMWithLMHeadModel(config).train()


def test_a_number_that_is_only_asserted_does_not_cut_a_model() -> None:
    """XLM asserts of each batch that no row is longer than the batch: by a number that Python reads from a tensor."""
    pair = Pair(xlm())
    pair.compiled = partial(compiled_call(type(pair.model), None, {**OPTIONS, "wait": True}), pair.model)
    given = batches(masked_lm_batch, (4, 11, "right"), (3, 13, "left"), (4, 9, "mixed"), (5, 12, "holes"))
    expect_packed(pair.train(given), steps=4, padded=0)
    too_long = given[0] | {"lengths": torch.tensor([99, 1, 1, 1])}
    with pytest.raises(AssertionError):
        pair.reference(**too_long)
    with pytest.raises((AssertionError, RuntimeError)):
        pair.compiled(**too_long)


class Asserts(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.max().item() < 9
        return x


def test_numbers_that_decide_something_are_no_assertions() -> None:
    """This file, which defines `Asserts`, also reads numbers that it does not assert of: `places`."""
    assert asserts_scalars(xlm())
    assert not asserts_scalars(nn.Linear(2, 2))
    places = torch.arange(3).tolist()
    assert not [place for place in places if asserts_scalars(Asserts())]
