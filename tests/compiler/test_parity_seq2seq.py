"""Encoder-decoders: two token spaces, each with its own mask, one attention across."""

from __future__ import annotations

import copy
import functools
import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from deepytorch.errors import DeferredError
from tests.compiler.parity import (
    COMPILED,
    IGNORED,
    PAD,
    Batch,
    Pair,
    compare_whole,
    describe,
    expect_packed,
    token_mask,
)

hf = pytest.importorskip("transformers")


@functools.cache
def dynamo_copies_configs() -> bool:
    """Whether Dynamo traces `copy.deepcopy` of a configuration, which T5's forward does."""
    config = hf.T5Config()
    try:
        torch.compile(lambda x: (copy.deepcopy(config), x + 1)[1], backend="eager", fullgraph=True)(torch.ones(1))
    except torch._dynamo.exc.TorchDynamoException:
        return False
    return True


def bart(attention: str) -> Any:
    if "self.layerdrop >" not in inspect.getsource(hf.models.bart.modeling_bart.BartDecoder.forward):
        pytest.skip("this transformers draws a number before each layer of Bart, which cuts its graph")
    return hf.BartForConditionalGeneration(
        hf.BartConfig(
            d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
            encoder_ffn_dim=48, decoder_ffn_dim=48, vocab_size=96, dropout=0.0, attention_dropout=0.0,
            activation_dropout=0.0, max_position_embeddings=64, attn_implementation=attention,
        )
    )  # fmt: skip


def t5(attention: str, **kwargs: Any) -> Any:
    if not dynamo_copies_configs():
        pytest.skip("this torch's Dynamo does not copy configurations, which cuts T5's graph")
    return hf.T5ForConditionalGeneration(
        hf.T5Config(
            d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=96, decoder_start_token_id=0,
            dropout_rate=0.0, attn_implementation=attention, **kwargs,
        )
    )  # fmt: skip


def pairs(*sizes: tuple[int, int, str, int], decoder_mask: bool = False, seed: int = 1) -> list[Batch]:
    """Batches of (rows, source positions, source padding, target positions); targets are padded to the right."""
    generator = torch.Generator().manual_seed(seed)
    given = []
    for rows, source, padding, target in sizes:
        mask = token_mask(rows, source, padding, generator)
        ids = torch.randint(5, 96, (rows, source), generator=generator).masked_fill(mask == 0, PAD)
        real = token_mask(rows, target, "right", generator)
        labels = torch.randint(5, 96, (rows, target), generator=generator).masked_fill(real == 0, IGNORED)
        batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
        if decoder_mask:
            batch["decoder_attention_mask"] = real
        given.append(batch)
    return given


SIZES = ((4, 12, "right", 7), (3, 9, "left", 10), (5, 14, "holes", 6), (4, 11, "one", 9))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "attention"),
    [(bart, "sdpa"), pytest.param(bart, "eager", marks=pytest.mark.matrix),
     pytest.param(t5, "sdpa", marks=pytest.mark.matrix), (t5, "eager")],
    ids=["bart-sdpa", "bart-eager", "t5-sdpa", "t5-eager"],
)  # fmt: skip
def test_both_sides_are_packed_and_train_as_eager_does(build: Any, attention: str) -> None:
    pair = Pair(build(attention).train(), options=COMPILED)
    report = pair.train(pairs(*SIZES))
    expect_packed(report, steps=4, padded=0)
    assert report.total("recompiles") == 0, describe(report)


@pytest.mark.slow
@pytest.mark.parametrize("build", [pytest.param(bart, marks=pytest.mark.matrix), t5], ids=["bart", "t5"])
def test_a_mask_for_the_decoder_is_followed_as_well(build: Any) -> None:
    pair = Pair(build("sdpa").train())
    expect_packed(pair.train(pairs(*SIZES, decoder_mask=True)), steps=4, padded=0)


@pytest.mark.slow
@pytest.mark.parametrize("build", [pytest.param(bart, marks=pytest.mark.matrix), t5], ids=["bart", "t5"])
def test_logits_are_those_of_eager_at_every_position_of_the_decoder(build: Any) -> None:
    """Also behind its last label, where nothing was computed: whoever looks there gets padded steps."""
    pair = Pair(build("sdpa").train())
    report = pair.train(pairs(*SIZES[:3]), compare_whole())
    assert (report.total("steps_profiled"), report.total("steps_padded")) == (1, 2), describe(report)


@pytest.mark.slow
def test_the_encoders_output_can_be_used_beside_the_loss() -> None:
    def compare(expected: Any, found: Any, batch: Batch) -> None:
        real = batch["attention_mask"].bool()
        one, other = found.encoder_last_hidden_state[real], expected.encoder_last_hidden_state[real]
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)

    pair = Pair(bart("sdpa").train())
    expect_packed(pair.train(pairs(*SIZES[:2]), compare))


@pytest.mark.slow
def test_decoder_ids_given_with_labels_of_the_users_own() -> None:
    pair = Pair(bart("sdpa").train())
    given = pairs(*SIZES[:3])
    for batch in given:
        batch["decoder_input_ids"] = batch["labels"].clamp(min=2).roll(1, 1)
    expect_packed(pair.train(given), steps=3)


class Translator(nn.Module):
    """`nn.Transformer` with every mask it takes."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(96, 32), nn.Linear(32, 96)
        self.transformer = nn.Transformer(32, 4, 2, 2, 48, dropout=0.0, batch_first=True)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        decoder_input_ids: torch.Tensor,
        labels: torch.Tensor,
    ) -> torch.Tensor:
        length = decoder_input_ids.shape[1]
        later = torch.ones(length, length, dtype=torch.bool, device=labels.device).triu(1)
        x = self.transformer(
            self.tokens(input_ids),
            self.tokens(decoder_input_ids),
            tgt_mask=later,
            tgt_is_causal=True,  # where it is not said, torch.nn looks at the mask's numbers, which breaks the graph
            src_key_padding_mask=attention_mask == 0,
            memory_key_padding_mask=attention_mask == 0,
            tgt_key_padding_mask=decoder_input_ids == PAD,
        )
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@pytest.mark.slow
def test_torch_nns_transformer_is_packed_on_both_sides() -> None:
    pair = Pair(Translator().train())
    given = pairs(*SIZES)
    for batch in given:
        batch["decoder_input_ids"] = batch["labels"].clamp(min=PAD)
    expect_packed(pair.train(given), steps=4)


@pytest.mark.slow
def test_logits_of_a_trimmed_decoder_are_refused_once_any_weight_was_written_through_data() -> None:
    model = bart("sdpa").train()
    compiled = torch.compile(model, backend="deepytorch", options={"lowering": "aot_eager"})
    compiled(**pairs((4, 11, "right", 7))[0]).loss.backward()  # watched: eager itself
    out = compiled(**pairs((4, 11, "right", 7))[0])
    model.model.decoder.layers[0].fc1.weight.data.mul_(2)
    with pytest.raises(DeferredError, match=r"a weight of shape .* has changed since the step"):
        out.logits.sum()
