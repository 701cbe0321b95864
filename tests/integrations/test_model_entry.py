"""Padding stripped at the entry of a Hugging Face model, without a graph: everything agrees with padded eager."""

from __future__ import annotations

import copy
import functools
import pickle
import sys
import weakref
from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo import eval_frame

pytest.importorskip("transformers")
import transformers as hf

from deepytorch import autowrap, handles, library_code
from deepytorch.compiler.outcome import Outcome
from deepytorch.compiler.report import LEDGER, Report
from deepytorch.integrations.model_entry import MANY_KINDS, ModelEntry, entry_for
from tests.compiler.parity import (
    Batch,
    Pair,
    assert_close,
    batches,
    causal_batch,
    compare_at_tokens,
    compare_whole,
    expect_packed,
    masked_lm_batch,
    mixture,
    padded_because,
)
from tests.compiler.test_parity_decoders import GROUPED, gpt2, llama, mistral, opt, qwen2
from tests.compiler.test_parity_encoders import bert, roberta, with_classes
from tests.compiler.test_parity_seq2seq import SIZES, bart, pairs, t5
from tests.integrations.opaque_attention import in_transformers


def entry_of(model: nn.Module, *least_pads: float) -> ModelEntry:
    entry = entry_for(model, *least_pads)
    assert entry is not None
    return entry


class EntryPair(Pair):
    """A model that is packed at entry, and its eager twin. Nothing is compiled."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.entry = entry_of(model)
        self.compiled = lambda **batch: self.entry.call(model._call_impl, (), batch)


def declined(entry: ModelEntry, model: nn.Module, batch: Batch) -> str:
    """Return why a model is not packed at entry; the call itself has to give what eager gives."""
    twin = copy.deepcopy(model)
    torch.manual_seed(3)
    found = entry.call(model._call_impl, (), batch)
    torch.manual_seed(3)
    torch.testing.assert_close(found[0], twin(**batch)[0])
    assert entry.record.steps_packed == 0
    assert entry.record.outcome == "declined"
    return "; ".join(entry.record.declined)


def report() -> Report:
    return LEDGER.report()


def since_5(what: str) -> None:
    """Skip where transformers is older than 5, which says too little of `what`: it stays padded there."""
    if int(hf.__version__.partition(".")[0]) < 5:
        pytest.skip(f"transformers {hf.__version__} is older than 5: {what}")


def taken(entry: Any) -> int:
    """Calls that came to be packed, the first of a kind among them, which is watched."""
    return entry.record.steps_packed + entry.record.steps_profiled


def of_a_library(kind: type) -> type:
    """A class as if it stood there."""
    kind.__module__ = hf.LlamaForCausalLM.__module__
    for name, each in list(vars(kind).items()):
        if isinstance(each, FunctionType):
            setattr(kind, name, in_transformers(each))
    return kind


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("build", [llama, qwen2, gpt2, opt], ids=lambda build: build.__name__)
def test_decoders_train_as_eager_does_for_every_padding(build: Callable[[str], Any], attention: str) -> None:
    if attention == "eager" or build is gpt2:
        since_5("eager attention, and positions of GPT-2 counted from the left")
    pair = EntryPair(build(attention).train())
    given = batches(causal_batch, *mixture([(4, 10, "none")]))
    expect_packed(pair.train(given, compare_at_tokens()), steps=5, padded=1)
    assert padded_because(report()) == {"hardly any padding in the batch": 1}


def test_windows_are_packed_and_holes_run_padded() -> None:
    model = mistral("sdpa").train()
    model.config.use_cache = False
    pair = EntryPair(model)
    pair.train(batches(causal_batch, *mixture()), compare_at_tokens())
    assert padded_because(report()) == {"tokens with holes between them, which the model was not proved for": 1}
    expect_packed(report(), steps=4)


def test_calls_that_ask_for_a_cache_of_windows_run_padded_and_the_others_are_packed() -> None:
    pair = EntryPair(mistral("sdpa").train())
    one, two = batches(causal_batch, (4, 11, "right"), (4, 9, "right"))
    given = [{**one, "use_cache": False}, {**two, "use_cache": True}, {**one, "use_cache": False}]
    pair.train(given)
    assert (taken(pair.entry), pair.entry.record.steps_padded) == (2, 1)
    assert "use_cache=False" in pair.entry.record.declined[0]


@pytest.mark.parametrize("build", [bert, roberta], ids=lambda build: build.__name__)
def test_encoders_train_as_eager_does(build: Callable[..., Any]) -> None:
    since_5("BERT")
    kind = hf.BertForMaskedLM if build is bert else hf.RobertaForMaskedLM
    pair = EntryPair(kind(build("sdpa")).train())
    expect_packed(pair.train(batches(masked_lm_batch, *mixture()), compare_at_tokens()), steps=5, padded=0)


@pytest.mark.parametrize("build", [bart, t5], ids=lambda build: build.__name__)
@pytest.mark.parametrize("decoder_mask", [True, False], ids=["masked", "unmasked"])
def test_both_sides_of_an_encoder_decoder(build: Callable[[str], Any], decoder_mask: bool) -> None:
    if build is t5:
        since_5("T5")
    pair = EntryPair(build("sdpa").train())

    def compare(expected: Any, found: Any, batch: Batch) -> None:
        real = batch.get("decoder_attention_mask", torch.ones_like(batch["labels"])).bool()
        assert_close(found.logits[real], expected.logits[real], "logits", rel=1e-5, floor=1e-6)
        real = batch["attention_mask"].bool()
        hidden = "encoder_last_hidden_state"
        assert_close(found[hidden][real], expected[hidden][real], hidden, rel=1e-5, floor=1e-6)

    expect_packed(pair.train(pairs(*SIZES, decoder_mask=decoder_mask), compare), steps=4, padded=0)


def test_a_head_that_looks_at_rows_stays_padded_above_a_packed_encoder() -> None:
    since_5("BERT")
    pair = EntryPair(hf.BertForSequenceClassification(bert("sdpa", num_labels=3)).train())
    given = batches(with_classes, (4, 11, "right"), (3, 9, "right"), (4, 10, "left"))
    for batch in given:
        batch["input_ids"] = batch["input_ids"].masked_fill(
            batch["attention_mask"] == 0, pair.model.config.pad_token_id
        )
    expect_packed(pair.train(given), steps=2, padded=1)


def test_a_head_that_looks_for_the_last_token_reads_it_by_the_ids_at_pads() -> None:
    model = hf.LlamaForSequenceClassification(hf.LlamaConfig(**GROUPED, pad_token_id=1, num_labels=3)).train()
    pair = EntryPair(model)
    given = batches(with_classes, (4, 11, "right"), (4, 9, "right"))
    given[1]["input_ids"][-1, -1] = 7  # not the padding's id: eager reads there
    given[1]["attention_mask"][-1, -1] = 0
    pair.train(given + given)
    assert padded_because(report()) == {"an id at a padded position is not the padding's": 2}
    expect_packed(report(), steps=2)


def test_a_head_that_chooses_among_positions_is_left_alone() -> None:
    since_5("BERT")
    model = hf.BertForQuestionAnswering(bert("sdpa")).train()
    [batch] = batches(causal_batch, (4, 11, "right"))
    batch["start_positions"], batch["end_positions"] = torch.tensor([0, 1, 1, 0]), torch.tensor([1, 2, 1, 1])
    del batch["labels"]
    entry = entry_of(model)
    assert "chooses among positions" in declined(entry, model, batch)


@of_a_library
class Averages(hf.LlamaForCausalLM):
    """Mixes in the mean over all positions, pads among them."""

    def forward(self, input_ids: Any, attention_mask: Any = None, position_ids: Any = None, labels: Any = None) -> Any:
        hidden = self.model(input_ids, attention_mask=attention_mask, position_ids=position_ids).last_hidden_state
        logits = self.lm_head(hidden + 0.1 * hidden.mean(1, keepdim=True))
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size)
        return hf.modeling_outputs.CausalLMOutputWithPast(loss=loss, logits=logits)


@of_a_library
class LooksAtItsNeighbour(hf.LlamaForCausalLM):
    """Lets every row see the one before."""

    def forward(self, input_ids: Any, attention_mask: Any = None, position_ids: Any = None, labels: Any = None) -> Any:
        return super().forward(input_ids.roll(1, 0), attention_mask, position_ids, labels=labels)


class CountsWhatItSees(hf.LlamaForCausalLM):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.seen = nn.BatchNorm1d(4)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [(Averages, "differ"), (LooksAtItsNeighbour, "differ"), (CountsWhatItSees, "batch normalisation")],
    ids=["mean over pads", "rows mixed", "statistics"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_models_that_are_not_the_same_packed_are_declined(kind: Any, reason: str, dtype: torch.dtype) -> None:
    model = kind(hf.LlamaConfig(**GROUPED)).to(dtype).train()
    [batch] = batches(causal_batch, (4, 11, "right"))
    entry = entry_of(model)
    said = declined(entry, model, batch)
    assert reason in said or "a token shows" in said


def test_position_embeddings_that_depend_on_the_padded_length_are_declined() -> None:
    config = hf.LlamaConfig(**GROUPED, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
    model = hf.LlamaForCausalLM(config).train()
    [batch] = batches(causal_batch, (4, 11, "right"))
    entry = entry_of(model)
    assert "padded length" in declined(entry, model, batch)


def test_routers_whose_loss_reads_the_mask_are_declined_by_a_reason_in_words() -> None:
    routing = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "output_router_logits": True}
    config = hf.Qwen3MoeConfig(**GROUPED, **routing)
    model = hf.Qwen3MoeForCausalLM(config).train()
    entry = entry_of(model)
    [batch] = batches(causal_batch, (4, 11, "right"))
    assert "sets output_router_logits" in declined(entry, model, batch)
    model.config.output_router_logits = False
    entry.call(model._call_impl, (), batch)
    assert taken(entry) == 1, entry.record.declined


class FailsOnOneRow(hf.LlamaForCausalLM):
    def forward(self, **batch: Any) -> Any:
        if batch["input_ids"].shape[0] == 1:
            raise ValueError("expected several rows")
        return super().forward(**batch)


def test_a_failure_on_a_packed_row_is_told_with_its_place_in_the_model() -> None:
    since_5("functions in classes of transformers")
    model = of_a_library(FailsOnOneRow)(hf.LlamaConfig(**GROUPED)).train()
    [batch] = batches(causal_batch, (4, 11, "right"))
    said = declined(entry_of(model), model, batch)
    assert "the probe failed in forward (" in said
    assert "with ValueError: expected several rows" in said


def test_batches_that_cannot_be_packed_run_padded_and_are_counted() -> None:
    pair = EntryPair(llama("sdpa").train())
    given = batches(causal_batch, (4, 11, "right"), (1, 9, "right"), (4, 9, "right"), (4, 9, "right"), (4, 8, "right"))
    given[2]["labels"] = given[2]["input_ids"].clone()  # labels at pads
    given[3]["attention_mask"] = given[3]["attention_mask"] * 2
    given[3]["attention_mask"][0] = 1
    given[4]["attention_mask"][1] = 0  # nothing in a row
    given[4]["labels"][1] = -100
    pair.train([*given, given[0]])
    expect_packed(report(), steps=2)
    assert padded_because(report()) == {
        "a batch of one row": 1,
        "a label at a padded position is not ignored": 1,
        "a mask holds numbers besides 0 and 1": 1,
        "a row without a token": 1,
    }


def test_an_error_of_the_users_is_theirs_and_one_of_packing_falls_back() -> None:
    pair = EntryPair(llama("sdpa").train())
    one, two = batches(causal_batch, (4, 11, "right"), (4, 9, "right"))
    pair.step(one)
    with pytest.raises(IndexError):
        pair.compiled(**{**two, "input_ids": two["input_ids"] + 10**6})
    pair.step(two)
    assert taken(pair.entry) == 2
    for model in (pair.model, pair.reference):
        layer = model.model.layers[0]

        def forward(hidden: torch.Tensor, *args: Any, own: Any = layer.forward, **kwargs: Any) -> Any:
            if hidden.shape[0] == 1:
                raise ValueError("one row")
            return own(hidden, *args, **kwargs)

        layer.forward = in_transformers(forward)
    pair.step(one)
    pair.step(two)
    assert taken(pair.entry) == 2
    assert "one row" in pair.entry.record.declined[0]


def test_a_forward_that_fails_half_way_is_run_again_as_if_it_had_not_begun() -> None:
    """What it drew is drawn again, and what it wrote is not written twice."""
    pair = EntryPair(llama("sdpa", attention_dropout=0.0).train())
    fails = [False]
    for model in (pair.model, pair.reference):
        layer = model.model.layers[0]
        layer.register_buffer("calls", torch.zeros(()))

        def forward(hidden: torch.Tensor, *args: Any, own: Any = layer, fails: Any = fails, **kwargs: Any) -> Any:
            if fails[0]:
                own.calls.add_(1)
                hidden = nn.functional.dropout(hidden, 0.5)
                if hidden.shape[0] == 1:
                    raise ValueError("one row")
            return type(own).forward(own, hidden, *args, **kwargs)

        layer.forward = in_transformers(forward)
    one, two = batches(causal_batch, (4, 11, "right"), (4, 9, "right"))
    pair.step(one)
    pair.step(two)
    assert taken(pair.entry) == 2
    fails[0] = True
    torch.manual_seed(5)
    wanted, drawn = pair.reference(**one).loss, torch.get_rng_state()
    torch.manual_seed(5)
    torch.testing.assert_close(pair.compiled(**one).loss, wanted)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert "one row" in pair.entry.record.declined[0]
    assert pair.model.model.layers[0].calls == 1


def test_a_kind_of_call_too_many_leaves_nothing_behind() -> None:
    model = llama("sdpa", num_hidden_layers=1).train()
    entry = entry_of(model)
    (batch,) = batches(causal_batch, (4, 11, "right"))
    for number in range(MANY_KINDS + 4):
        model.model.layers[0].mlp.forward = lambda x, number=number: x * number  # the script's own
        entry.call(model._call_impl, (), batch)
    assert len(entry._found_out) == MANY_KINDS
    assert len(entry.record.declined) == 1


def test_a_part_that_is_compiled_by_itself_keeps_a_model_with_replaced_calls_padded() -> None:
    """And nothing is set for all threads, in which others may run compiled code."""
    since_5("T5")
    pair = EntryPair(t5("sdpa").train())
    stances, (one, two, three) = [], pairs(*SIZES)[:3]

    def noting(*args: Any, own: Any = pair.model.lm_head.forward) -> Any:
        stances.append(eval_frame._stance.stance)
        return own(*args)

    pair.model.lm_head.forward = in_transformers(noting)
    pair.step(one)
    pair.step(two)
    assert taken(pair.entry) == 2
    assert set(stances) == {"default"}
    pair.model.encoder.block[0].compile(backend="eager")
    pair.step(three)
    assert "would not see the calls" in "; ".join(pair.entry.record.padded_because)


def test_batches_with_few_pads_run_padded_where_that_is_asked_for() -> None:
    model = llama("sdpa").train()
    [few, many] = batches(causal_batch, (4, 11, "right"), (4, 11, "right"))
    few["attention_mask"][:] = 1
    few["attention_mask"][0, -1] = 0
    few["labels"][0, -1] = -100
    many["attention_mask"][1:, 4:] = 0
    many["labels"][1:, 4:] = -100
    entry = entry_of(model, 0.1)
    for batch in (few, many, few):
        entry.call(model._call_impl, (), batch)
    assert (taken(entry), entry.record.steps_padded) == (1, 2)


def test_arguments_that_are_not_known_run_padded_and_the_next_call_is_packed() -> None:
    since_5("eager attention")
    pair = EntryPair(llama("eager").train())
    one, two = batches(causal_batch, (4, 11, "right"), (4, 9, "right"))
    for batch, asked in ((one, True), (two, False), (one, True)):
        pair.step({**batch, "output_attentions": asked})
    cache = hf.DynamicCache()
    pair.compiled(**one, past_key_values=cache)
    assert cache.get_seq_length() == 11
    assert taken(pair.entry) == 1
    assert padded_because(report()) == {
        "the argument output_attentions is given": 2,
        "the argument past_key_values is given": 1,
    }


def test_hooks_of_the_users_see_what_eager_shows_them() -> None:
    pair = EntryPair(llama("sdpa").train())
    seen: dict[str, list[torch.Tensor]] = {"eager": [], "ours": []}
    for name, model in (("eager", pair.reference), ("ours", pair.model)):

        def hook(_: nn.Module, given: Any, output: torch.Tensor, name: str = name) -> torch.Tensor:
            assert given[0].shape == output.shape
            seen[name].append(output.detach().clone())
            return output * 1.5

        model.model.layers[0].mlp.register_forward_hook(hook)
    pair.train(batches(causal_batch, (4, 11, "right"), (3, 9, "holes")), compare_whole())
    assert pair.entry.record.steps_packed == 0
    assert "a hook on a module's forward" in " ".join(padded_because(report()))
    assert len(seen["ours"]) == 2  # none of them from a probe
    for one, other in zip(seen["eager"], seen["ours"], strict=True):
        assert_close(other, one, "what a hook saw")


def test_hooks_on_gradients_run_padded() -> None:
    pair = EntryPair(llama("sdpa").train())
    for model in (pair.model, pair.reference):
        model.model.layers[0].register_full_backward_hook(lambda *_: None)
    pair.train(batches(causal_batch, (4, 11, "right")))
    [(reason, count)] = padded_because(report()).items()
    assert reason.startswith("a backward hook")
    assert count == 1


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_recomputes_packed(reentrant: bool) -> None:
    since_5("T5")
    for build in (llama, t5):
        pair = EntryPair(build("sdpa").train())
        for model in (pair.model, pair.reference):
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            if reentrant:
                model.enable_input_require_grads()
        given = batches(causal_batch, (4, 11, "right"), (3, 9, "left")) if build is llama else pairs(*SIZES)
        expect_packed(pair.train(given), steps=len(given))


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_call_inside_of_a_checkpoint_is_computed_again_as_it_was(reentrant: bool) -> None:
    pair = EntryPair(llama("sdpa").train())
    start = torch.zeros((), requires_grad=True)  # reentrant checkpoints need an input that asks for a gradient

    def checkpointed(module: Any, **batch: Any) -> Any:
        def loss(zero: torch.Tensor) -> torch.Tensor:
            return module(**batch).loss + zero

        return torch.utils.checkpoint.checkpoint(loss, start, use_reentrant=reentrant)

    given = batches(causal_batch, (4, 11, "right"), (3, 9, "left"), (4, 12, "right"))
    pair.train(given[:1])
    pair.call = checkpointed
    [*_, trained] = [each for each in pair.train(given).regions if not each.name.endswith("without gradients")]
    assert (trained.steps_profiled, trained.steps_packed) == (1, 0)


def test_key_value_caches_and_hidden_states_are_those_of_eager() -> None:
    since_5("a second step (hidden states leave their mark on each layer, so that it is watched again)")
    pair = EntryPair(llama("sdpa").train())

    def compare(expected: Any, found: Any, batch: Batch) -> None:
        for one, other in zip(expected.hidden_states, found.hidden_states, strict=True):
            assert_close(other, one, "hidden state", rel=1e-5, floor=1e-6)
        for one, other in zip(expected.past_key_values.layers, found.past_key_values.layers, strict=True):
            assert_close(other.keys, one.keys, "keys", rel=1e-5, floor=1e-6)

    given = [{**batch, "output_hidden_states": True, "use_cache": True} for batch in batches(causal_batch, *mixture())]
    pair.step(given[0])  # watched; what comes later is found when it happens
    pair.step(given[1], compare, when="before backward")
    pair.step(given[2], compare, when="after backward")
    record = pair.entry.record
    assert (record.steps_profiled, record.steps_packed, record.steps_replayed, record.steps_padded) == (1, 1, 1, 1)


def test_pads_looked_at_after_the_optimizers_step_are_those_of_the_old_weights() -> None:
    model = llama("sdpa").train()
    reference = copy.deepcopy(model)
    entry = entry_of(model)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (reference, model)]
    for given in batches(causal_batch, (4, 11, "right"), (4, 9, "right"), (4, 10, "right")):
        wanted, found = reference(**given), entry.call(model._call_impl, (), given)
        for each, optimizer in zip((wanted, found), optimizers, strict=True):
            each.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert entry.record.steps_packed == 2
    torch.testing.assert_close(found.logits + 0.0, wanted.logits, rtol=1e-4, atol=1e-5)
    assert entry.record.steps_replayed == 1


def test_losses_of_an_accumulation_and_tuples() -> None:
    pair = EntryPair(llama("sdpa").train())
    one, two = batches(causal_batch, (4, 11, "right"), (4, 9, "left"))
    given = [{**one, "num_items_in_batch": torch.tensor(57)}, {**two, "return_dict": False}]
    expect_packed(pair.train(given + given), steps=4)


def test_dropout_is_drawn_anew_and_the_probe_draws_nothing() -> None:
    since_5("BERT")
    config = hf.BertConfig(**GROUPED | {"max_position_embeddings": 64})
    model = hf.BertForMaskedLM(config).train()
    [batch] = batches(masked_lm_batch, (6, 20, "right"))
    entry = entry_of(model)
    entry.call(model._call_impl, (), batch)  # watched, in eager
    state = torch.random.get_rng_state()
    first, second = (entry.call(model._call_impl, (), batch).loss for _ in range(2))
    assert entry.record.steps_packed == 2
    assert first != second
    torch.random.set_rng_state(state)
    assert entry.call(model._call_impl, (), batch).loss == first
    assert model.training


def test_half_precision_is_as_near_to_double_as_eager_is() -> None:
    torch.manual_seed(0)
    model = llama("sdpa").to(torch.bfloat16).train()
    [batch] = batches(causal_batch, (6, 20, "right"))
    exact = copy.deepcopy(model).double()
    eager = copy.deepcopy(model)
    entry = entry_of(model)
    losses = [exact(**batch).loss, eager(**batch).loss, entry.call(model._call_impl, (), batch).loss]
    for loss in losses:
        loss.backward()
    assert taken(entry) == 1
    for wanted, one, other in zip(exact.parameters(), eager.parameters(), model.parameters(), strict=True):
        assert wanted.grad is not None and one.grad is not None and other.grad is not None  # noqa: PT018
        errors = [(each.grad.double() - wanted.grad).square().mean().sqrt() for each in (one, other)]
        assert errors[1] <= 3 * errors[0] + 1e-3 * wanted.grad.square().mean().sqrt()


def test_a_restored_model_is_as_it_was_and_copies_and_pickles_are_clean() -> None:
    model = hf.BertForMaskedLM(bert("sdpa")).train()
    keys = list(model.state_dict())
    pair = EntryPair(model)
    pair.train(batches(masked_lm_batch, (4, 11, "right")))
    assert list(model.state_dict()) == keys
    [batch] = batches(masked_lm_batch, (4, 9, "right"), seed=5)
    other = pickle.loads(pickle.dumps(model))
    torch.testing.assert_close(other(**batch).loss, copy.deepcopy(model)(**batch).loss)
    pair.entry.restore()
    assert not any("_compiled_call_impl" in vars(module) for module in model.modules())
    torch.testing.assert_close(model(**batch).loss, other(**batch).loss)


# Cases that were wrong once.


def test_gradients_reach_embeddings_that_are_given() -> None:
    pair = EntryPair(llama("sdpa").train())

    def call(model: Any, **batch: Any) -> Any:
        embeds = (pair.reference if model is pair.reference else pair.model).get_input_embeddings()(
            batch.pop("input_ids")
        )
        return model(inputs_embeds=embeds, **batch)

    pair.call = call
    expect_packed(pair.train(batches(causal_batch, (4, 11, "right"), (3, 9, "left")), compare_at_tokens()), steps=2)


def own_loss(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **_: Any) -> torch.Tensor:
    """Shifts by itself, without padding."""
    flat = logits[:, :-1].reshape(-1, vocab_size).float()
    return nn.functional.cross_entropy(flat, labels[:, 1:].reshape(-1), ignore_index=-100)


@pytest.mark.parametrize("kind", ["does not shift", "shifts by itself"])
def test_losses_that_shift_in_other_ways(kind: str) -> None:
    if kind == "shifts by itself":
        model = llama("sdpa")
        model.loss_function = in_transformers(own_loss)
    else:
        model = hf.BartForCausalLM(bart("sdpa").config)
    pair = EntryPair(model.train())
    for batch in batches(causal_batch, (4, 11, "right"), (3, 9, "right")):
        batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        pair.step(batch)
    expect_packed(report(), steps=2)


def test_hooks_may_write_in_place_and_hook_gradients() -> None:
    pair = EntryPair(llama("sdpa").train())
    norms: dict[bool, list[float]] = {True: [], False: []}
    for model in (pair.model, pair.reference):
        packed = model is pair.model

        def scale(gradient: torch.Tensor, packed: bool = packed) -> torch.Tensor:
            norms[packed].append(float(gradient.norm()))
            return gradient * 0.1

        def grow(module: nn.Module, given: Any, output: torch.Tensor) -> None:
            output.mul_(1.5)

        def watch(module: nn.Module, given: Any, output: torch.Tensor, scale: Any = scale) -> None:
            output.register_hook(scale)

        def shrink(module: nn.Module, given: Any) -> None:
            given[0].mul_(0.5)

        model.model.layers[0].mlp.register_forward_hook(grow)
        model.model.layers[1].mlp.register_forward_hook(watch)
        model.model.layers[1].mlp.down_proj.register_forward_pre_hook(shrink)
    pair.train(batches(causal_batch, (4, 11, "right"), (3, 9, "right")))
    assert pair.entry.record.steps_packed == 0
    assert norms[True] == pytest.approx(norms[False], rel=1e-4)
    assert len(norms[True]) == 2


class Auxiliary(hf.LlamaForCausalLM):
    """Adds a term over all positions: in training only, or always and small, or behind a gate that is zero."""

    how = "training"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.gate = nn.Parameter(torch.zeros(()))
        self.average = nn.Buffer(torch.zeros(()))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().forward(*args, **kwargs)
        extra = outputs.logits.logsumexp(-1).square().mean()
        if self.how == "gate":
            outputs.loss = outputs.loss + self.gate * extra
        elif self.how == "always":
            outputs.loss = outputs.loss + 0.1 * extra
        elif self.how == "buffer":
            with torch.no_grad():
                self.average.mul_(0.9).add_(0.1 * extra.detach())
        elif self.how == "kept":
            self.extra = extra
        elif self.training:
            outputs.loss = outputs.loss + 0.1 * extra
        return outputs


@pytest.mark.parametrize("how", ["training", "always", "gate", "buffer", "kept"])
def test_terms_over_all_positions_are_found(how: str) -> None:
    model = Auxiliary(hf.LlamaConfig(**GROUPED)).train()
    model.how = how
    [batch] = batches(causal_batch, (4, 11, "right"))
    entry = entry_of(model)
    assert declined(entry, model, batch)
    if how == "buffer":
        twin = Auxiliary(model.config).train()
        twin.load_state_dict(model.state_dict())
        with torch.no_grad():
            twin.average.zero_()
        twin.how = how
        twin(**batch)
        torch.testing.assert_close(model.average, twin.average)  # the probe left no trace in it


def test_a_proof_holds_for_the_model_and_the_arguments_that_it_was_made_with() -> None:
    model = llama("sdpa").train()
    one, two = batches(causal_batch, (4, 11, "right"), (4, 9, "right"))
    entry = entry_of(model)

    def agrees(batch: Batch, packed: int) -> None:
        wanted = copy.deepcopy(model)(**batch)
        found = entry.call(model._call_impl, (), batch)
        name = "loss" if "labels" in batch else "logits"
        real = batch["attention_mask"].bool() if name == "logits" else ...
        assert_close(found[name][real], wanted[name][real], name)
        assert taken(entry) == packed

    agrees({name: value for name, value in one.items() if name != "labels"}, 1)
    agrees(two, 2)  # labels are asked about anew

    def averaged(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **_: Any) -> torch.Tensor:
        return logits.float().square().mean()

    model.loss_function = averaged
    agrees(one, 2)
    del model._loss_function  # transformers' own again
    agrees(one, 3)

    class Averaging(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return self.inner(hidden) + hidden.mean(1, keepdim=True)

    model.model.layers[0].mlp = Averaging(model.model.layers[0].mlp)
    agrees(two, 3)


def test_a_proof_holds_for_the_attributes_that_it_was_made_with() -> None:
    """A configuration that turns causal midway, and a switch that eager's attention does not read beside a mask."""
    pair = EntryPair(hf.BertForMaskedLM(bert("sdpa")).train())
    given = batches(masked_lm_batch, (4, 11, "right"), (3, 13, "right"))
    pair.train(given)
    for model in (pair.reference, pair.model):
        model.config.is_decoder = True
    pair.train(given)
    assert taken(pair.entry) >= 2  # and no less equal behind the change

    pair = EntryPair(llama("sdpa").train())
    given = batches(causal_batch, (4, 11, "right"), (3, 13, "right"))
    pair.train(given)
    for model in (pair.reference, pair.model):
        for layer in model.model.layers:
            layer.self_attn.is_causal = False
    pair.train(given)
    assert (taken(pair.entry), pair.entry.record.steps_padded) == (2, 2)


def test_what_a_model_counts_by_itself_asks_for_no_other_proof() -> None:
    @of_a_library
    class Counting(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner, self.calls = inner, 0

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return self.inner(hidden)

    model = llama("sdpa").train()
    model.model.layers[0].mlp = Counting(model.model.layers[0].mlp)
    pair = EntryPair(model)
    pair.train(batches(causal_batch, *[(4, 11, "right")] * (MANY_KINDS + 2)))
    assert taken(pair.entry) == MANY_KINDS + 2


@pytest.mark.parametrize("problem", ["multi_label_classification", "regression"])
def test_labels_of_any_shape_are_a_rows(problem: str) -> None:
    since_5("BERT")
    config = bert("sdpa", num_labels=3, problem_type=problem)
    pair = EntryPair(hf.BertForSequenceClassification(config).train())
    given = batches(with_classes, (4, 11, "right"), (3, 9, "right"))
    for batch in given:
        batch["labels"] = torch.rand(len(batch["labels"]), 3).round()
        batch["input_ids"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, config.pad_token_id)
    expect_packed(pair.train(given), steps=2)


def test_a_probe_that_fails_leaves_the_call_alone() -> None:
    model = hf.BartForSequenceClassification(bart("sdpa").config).train()
    [batch] = batches(with_classes, (4, 11, "none"))
    batch["input_ids"][:, -1] = model.config.eos_token_id
    batch["input_ids"][:, :-1].masked_fill_(batch["input_ids"][:, :-1] == model.config.eos_token_id, 7)
    entry = entry_of(model)
    assert declined(entry, model, batch)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["positions", "bias", "pooler"])
def test_calls_that_dynamo_would_not_see_are_not_compiled(kind: str) -> None:
    if kind != "positions":
        since_5("T5 or BERT")
    call = None
    if kind == "pooler":
        model = hf.BertModel(bert("sdpa")).train()
        given = batches(masked_lm_batch, (4, 11, "right"), (3, 9, "right"), (4, 10, "right"))

        def call(module: nn.Module, labels: torch.Tensor, **batch: torch.Tensor) -> Any:
            return (module(**batch).pooler_output.square().sum(),)

    else:
        model, given = (bart if kind == "positions" else t5)("sdpa").train(), pairs(*SIZES)
    pair = Pair(model, call=call)
    handle = autowrap.optimize(pair.model, options={"lowering": "aot_eager"})
    handle._packs_at_entry = True  # as where graphs break and none is packed
    pair.compiled = pair.model
    try:
        pair.train(given)
        [entry] = [each for each in report().regions if each.name.startswith("model entry")]
        assert (entry.outcome, entry.steps_packed + entry.steps_profiled) == ("packed", len(given))
    finally:
        handle.restore()


def test_attention_that_a_transformers_before_5_gives_no_way_into_is_declined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepytorch.integrations.entry_readings.asks_for_every_attention", lambda _: False)
    model = llama("eager").train()
    entry = entry_of(model)
    (batch,) = batches(causal_batch, (4, 11, "right"))
    assert "before version 5" in declined(entry, model, batch)


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return 2 * grad.clamp(-1, 1)


@of_a_library
class _Doubling(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Doubled.apply(x.tanh())


class _OfTheUser(nn.Module):
    """Joins tokens that are further apart than the rows of a probe are long."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        far = nn.functional.pad(x, (0, 0, 20, 0))[:, : x.shape[1]]
        return torch.tanh(x + far)


def test_a_model_with_modules_of_the_script_is_not_packed_at_entry() -> None:
    """Also where weights are sharded, so that no look at graphs comes before packing at entry."""
    model = llama("sdpa").train()
    model.model.layers[0].mlp.act_fn = _OfTheUser()
    entry = entry_of(model)
    (batch,) = batches(causal_batch, (2, 40, "right"))
    assert "of the script's own" in declined(entry, model, batch)


def _far(x: torch.Tensor) -> torch.Tensor:
    """A token sees the one 40 before it, in rows that are longer than a probe's."""
    return nn.functional.pad(x, (0, 0, 40, 0))[:, : x.shape[1]]


def _on_the_instance(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    mlp.forward = lambda x: type(mlp).forward(mlp, x) + _far(x)


def _wrapped_as_the_librarys(model: Any) -> None:
    mlp = model.model.layers[0].mlp

    @functools.wraps(mlp.forward)  # names transformers as its module
    def forward(x: torch.Tensor) -> torch.Tensor:
        return type(mlp).forward(mlp, x) + _far(x)

    mlp.forward = forward


def _behind_a_librarys_wrapper(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    own = lambda x: type(mlp).forward(mlp, x) + _far(x)  # noqa: E731
    mlp.forward = torch.autocast("cpu", torch.bfloat16, enabled=False)(own)


def _a_function_that_forward_calls(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    del mlp.act_fn
    mlp.act_fn = partial(lambda far, x: nn.functional.silu(x) + far(x), _far)


def _an_object_that_is_called(model: Any) -> None:
    class Act:
        __slots__ = ()

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.silu(x) + _far(x)

    del model.model.layers[0].mlp.act_fn
    model.model.layers[0].mlp.act_fn = Act()


def _a_hook_of_accelerates(model: Any) -> None:
    hooks = pytest.importorskip("accelerate.hooks")

    class Far(hooks.ModelHook):
        def post_forward(self, module: nn.Module, output: torch.Tensor) -> torch.Tensor:
            return output + _far(output)

    hooks.add_hook_to_module(model.model.layers[0].mlp, Far())


@pytest.mark.parametrize(
    "set_on",
    [
        _on_the_instance,
        _wrapped_as_the_librarys,
        _behind_a_librarys_wrapper,
        _a_function_that_forward_calls,
        _an_object_that_is_called,
        _a_hook_of_accelerates,
    ],
    ids=lambda each: each.__name__.strip("_"),
)
def test_functions_that_a_script_has_set_on_a_librarys_module_are_the_scripts(set_on: Callable[[Any], None]) -> None:
    model = llama("sdpa", num_hidden_layers=1).train()
    set_on(model)
    entry = entry_of(model)
    (batch,) = batches(causal_batch, (2, 50, "right"))
    wanted = model(**batch).loss
    torch.testing.assert_close(entry.call(model._call_impl, (), batch).loss, wanted)
    assert entry.record.outcome == "declined"
    assert "of the script's own" in entry.record.declined[0]
    assert not library_code.is_of_libraries(model)


@pytest.mark.parametrize("where", ["class", "module"])
def test_what_a_script_has_put_into_a_librarys_code_is_the_scripts(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama("sdpa", num_hidden_layers=1)
    home = sys.modules[type(model).__module__]
    assert library_code.is_of_libraries(model)
    if where == "class":
        own = home.LlamaMLP.forward
        monkeypatch.setattr(home.LlamaMLP, "forward", functools.wraps(own)(lambda self, x: own(self, x) + _far(x)))
    else:
        turned = home.apply_rotary_pos_emb
        monkeypatch.setattr(home, "apply_rotary_pos_emb", lambda *args, **kwargs: turned(*args, **kwargs))
    assert not library_code.is_of_libraries(model)


def test_what_accelerate_and_transformers_set_on_a_model_is_a_librarys() -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state()  # another test may have chosen another precision
    model = accelerate.Accelerator(mixed_precision="bf16", cpu=True).prepare_model(llama("sdpa", num_hidden_layers=1))
    assert "forward" in vars(model)
    model.gradient_checkpointing_enable()
    accelerate.hooks.add_hook_to_module(model.model.norm, accelerate.hooks.AlignDevicesHook())
    model.model.layers[0].mlp.compile()
    assert library_code.is_of_libraries(model)
    accelerate.state.AcceleratorState._reset_state()


@pytest.mark.parametrize(("module", "known"), [("checkpointing", True), ("longlora", False)])
def test_llama_factorys_checkpoint_function_is_a_librarys_and_its_attention_is_not(module: str, known: bool) -> None:
    model = llama("sdpa", num_hidden_layers=1)
    written = {"__name__": f"llamafactory.model.model_utils.{module}", "checkpoint": torch.utils.checkpoint.checkpoint}
    exec("def run(function, *args, **kwargs): return checkpoint(function, *args, **kwargs)", written)
    model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=written["run"])
    assert library_code.is_of_libraries(model) is known


def test_a_proof_holds_for_the_functions_on_the_model_that_it_was_made_with() -> None:
    """Also where the first one has gone, and the second one stands in its memory."""
    model = llama("sdpa", num_hidden_layers=1).train()
    entry = entry_of(model)
    (batch,) = batches(causal_batch, (4, 11, "right"))
    mlp = model.model.layers[0].mlp

    def agrees(packed: int) -> None:
        torch.testing.assert_close(entry.call(model._call_impl, (), batch).loss, model(**batch).loss, rtol=1e-4, atol=0)
        assert taken(entry) == packed

    def of_a_token(x: torch.Tensor) -> torch.Tensor:
        return type(mlp).forward(mlp, x) * 1.01

    def of_all_before(x: torch.Tensor) -> torch.Tensor:
        return type(mlp).forward(mlp, x) + x.cumsum(1)

    agrees(1)
    mlp.forward = in_transformers(of_a_token)
    agrees(2)
    gone = weakref.ref(mlp.forward)
    mlp.forward = in_transformers(of_all_before)
    assert gone() is None  # the key of the proof does not hold it
    agrees(2)
    mlp.forward = in_transformers(of_a_token)
    agrees(3)
    del mlp.forward
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            type(mlp), "forward", in_transformers(lambda self, x: self.down_proj(self.up_proj(x.cumsum(1))))
        )
        agrees(3)
    agrees(4)


def test_what_is_not_proved_by_its_graph_is_not_packed_at_entry_where_the_user_has_written_of_it() -> None:
    model = llama("sdpa")
    alone, cut = [Outcome.UNTRACEABLE, Outcome.DECLINED], [Outcome.PACKED, Outcome.DECLINED]
    assert handles.needs_entry(model, alone)
    assert not handles.needs_entry(model, [Outcome.PACKED])
    assert not handles.needs_entry(model, [Outcome.DECLINED])
    assert handles.needs_entry(model, cut)
    model.model.layers[0].mlp.act_fn = _OfTheUser()
    assert not handles.needs_entry(model, alone)
    assert not handles.needs_entry(model, cut)
    assert handles.first_entry_of(model, None) is None


def test_ranks_that_share_weights_are_not_asked_in_steps_of_their_own() -> None:
    model = llama("sdpa")
    assert handles.first_entry_of(model, None) is not None
    next(model.parameters()).device_mesh = object()
    assert handles.first_entry_of(model, None) is None


@pytest.mark.slow
def test_a_model_whose_graph_cannot_be_analysed_is_packed_at_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A custom autograd function is one graph, of which a trace of the forward would lose the backward."""
    monkeypatch.setattr(sys.modules[hf.LlamaForCausalLM.__module__], "_Doubled", _Doubled, raising=False)
    model = llama("sdpa", num_hidden_layers=1).train()
    model.model.layers[0].mlp.act_fn = _Doubling()
    pair = Pair(model)
    handle = autowrap.optimize(pair.model, options={"lowering": "aot_eager"})
    pair.compiled = pair.model
    try:
        pair.train(batches(causal_batch, *mixture()[:4]))
        entry = handle.entry
        assert entry is not None
        assert any("left to stock" in reason for region in report().regions for reason in region.declined)
        assert taken(entry) == 3, entry.record
    finally:
        handle.restore()
