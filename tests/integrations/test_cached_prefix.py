"""Prefix tuning: keys and values that each row begins with are laid before the row's tokens in a packed batch."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
pytest.importorskip("peft")
import peft
import transformers as hf

import deepytorch
from deepytorch.compiler.report import LEDGER
from deepytorch.integrations import model_entry
from deepytorch.integrations.cached_prefix import CachedPrefix, is_wanted
from deepytorch.integrations.entry_calls import Replaced
from tests.compiler.parity import (
    Batch,
    Pair,
    assert_close,
    batches,
    causal_batch,
    compare_at_tokens,
    expect_packed,
    mixture,
    padded_because,
)
from tests.compiler.test_parity_decoders import GROUPED, gpt2, llama, mistral, opt, qwen2
from tests.compiler.test_parity_seq2seq import bart, pairs
from tests.integrations.test_model_entry import entry_of, report, since_5

VIRTUAL = 5


def with_prefix(model: nn.Module, **config: Any) -> Any:
    since_5("a cache of keys that a model is given")
    config = {"task_type": "CAUSAL_LM", "num_virtual_tokens": VIRTUAL, **config}
    return peft.get_peft_model(model, peft.PrefixTuningConfig(**config)).train()


class PrefixPair(Pair):
    """A model below a learned prefix that is packed at its entry, and its eager twin. Nothing is compiled."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        base = model.get_base_model()
        self.entry = entry_of(base)
        base._compiled_call_impl = Replaced(
            lambda module, *args, **kwargs: self.entry.call(module._call_impl, args, kwargs), base
        )
        self.compiled = model


def begun(batch: Batch, config: Any, *, rows: int | None = None, lengths: tuple[int, ...] = (3, 3)) -> Batch:
    """The arguments of a call whose rows begin with keys of these lengths, a length for each layer."""
    rows = rows or len(batch["input_ids"])
    size = (rows, config.num_key_value_heads)
    dim = config.hidden_size // config.num_attention_heads
    torch.manual_seed(4)
    layers = [[torch.randn(*size, length, dim, requires_grad=True) for _ in range(2)] for length in lengths]
    seen = torch.ones(len(batch["input_ids"]), lengths[0], dtype=torch.int64)
    mask = torch.cat([seen, batch["attention_mask"]], 1)
    return {**batch, "past_key_values": hf.DynamicCache(layers), "attention_mask": mask}


def refusal(model: Any, given: Batch) -> str:
    """Return why a call runs padded."""
    entry, reference = entry_of(model), copy.deepcopy(model)
    found = entry.call(model._call_impl, (), given)
    cache = given["past_key_values"]
    assert entry.record.steps_packed == 0
    fresh = {**given, "past_key_values": _without_the_last(cache, given["input_ids"].shape[1])}
    torch.testing.assert_close(found.logits, reference(**fresh).logits)
    return "; ".join([*entry.record.padded_because, *entry.record.declined])


def _without_the_last(cache: Any, positions: int) -> Any:
    return hf.DynamicCache([(layer.keys[:, :, :-positions], layer.values[:, :, :-positions]) for layer in cache.layers])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("build", [llama, qwen2, gpt2, opt], ids=lambda build: build.__name__)
def test_learned_prefixes_train_as_eager_does_for_every_padding(build: Callable[[str], Any], attention: str) -> None:
    pair = PrefixPair(with_prefix(build(attention)))
    given = batches(causal_batch, *mixture([(4, 10, "none")]))
    expect_packed(pair.train(given, compare_at_tokens()), steps=5, padded=1)
    assert padded_because(report()) == {"hardly any padding in the batch": 1}


def test_a_prefix_through_a_network_of_its_own_with_grouped_heads() -> None:
    pair = PrefixPair(with_prefix(hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED)), prefix_projection=True))
    expect_packed(pair.train(batches(causal_batch, *mixture()), compare_at_tokens()))


def test_the_scripts_cache_ends_as_in_eager() -> None:
    model = llama("sdpa").train()
    reference, entry = copy.deepcopy(model), entry_of(model)
    for number, batch in enumerate(batches(causal_batch, (4, 11, "right"), (4, 9, "left"), (4, 12, "right"))):
        wanted, found = begun(batch, model.config), begun(batch, model.config)
        outputs = entry.call(model._call_impl, (), found)
        reference(**wanted)
        assert outputs.past_key_values is found["past_key_values"]
        for one, other in zip(wanted["past_key_values"].layers, found["past_key_values"].layers, strict=True):
            assert one.keys.shape == other.keys.shape
            if number == 2:  # the look runs the call once more, padded, from the cache as it was
                assert_close(other.keys + 0.0, one.keys, "keys", floor=1e-6)
                assert_close(other.values + 0.0, one.values, "values", floor=1e-6)
    assert (entry.record.steps_profiled, entry.record.steps_packed, entry.record.steps_replayed) == (1, 2, 1)


def test_gradients_reach_a_prefix_that_differs_from_row_to_row() -> None:
    model = llama("sdpa").train()
    reference, entry = copy.deepcopy(model), entry_of(model)
    for batch in batches(causal_batch, (4, 11, "right"), (4, 9, "left"), (4, 12, "mixed")):
        wanted, found = begun(batch, model.config), begun(batch, model.config)
        prefixes = [CachedPrefix.of(each) for each in (wanted, found)]  # as they are now: a call appends to its cache
        losses = reference(**wanted).loss, entry.call(model._call_impl, (), found).loss
        gradients = [
            torch.autograd.grad(loss, prefix.tensors)
            for loss, prefix in zip(losses, prefixes, strict=True)
            if prefix is not None
        ]
        for one, other in zip(*gradients, strict=True):
            assert_close(other, one, "gradient of the prefix", rel=1e-4)
    assert entry.record.steps_packed == 2


def test_positions_of_the_scripts_are_kept() -> None:
    model = llama("sdpa").train()
    reference, entry = copy.deepcopy(model), entry_of(model)
    for batch in batches(causal_batch, (4, 11, "right"), (4, 9, "right"), (4, 12, "right")):
        batch["position_ids"] = torch.arange(batch["input_ids"].shape[1]).expand(batch["input_ids"].shape) * 2 + 1
        wanted, found = begun(batch, model.config), begun(batch, model.config)
        assert_close(entry.call(model._call_impl, (), found).loss, reference(**wanted).loss, "loss")
    assert entry.record.steps_packed == 2


def test_an_evaluation_with_labels_is_packed_and_generation_is_not_asked() -> None:
    model = llama("sdpa").eval()
    entry = entry_of(model)
    given = batches(causal_batch, *[(4, 9 + number, "right") for number in range(5)])
    with torch.no_grad():
        for batch in given:
            without = {name: each for name, each in batch.items() if name != "labels"}
            entry.call(model._call_impl, (), begun(without, model.config))
        assert not entry.asked
        for batch in given:
            entry.call(model._call_impl, (), begun(batch, model.config))
    assert entry.record.steps_packed > 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda given: given["attention_mask"][1:2, :2].fill_(0), "the mask hides cached keys"),
        (lambda given: given["attention_mask"][:, 3:].mul_(2), "numbers besides 0 and 1"),
    ],
)
def test_masks_that_say_more_run_padded(change: Callable[[Batch], Any], reason: str) -> None:
    model = llama("sdpa").train()
    [batch] = batches(causal_batch, (4, 11, "right"))
    given = begun(batch, model.config)
    change(given)
    assert reason in refusal(model, given)


def test_windows_over_cached_keys_are_declined() -> None:
    model = mistral("sdpa").train()
    [batch] = batches(causal_batch, (4, 11, "right"))
    assert "a window or a bias of positions over cached keys" in refusal(model, begun(batch, model.config))


def test_layers_of_other_lengths_and_empty_caches_are_no_prefix() -> None:
    config = llama("sdpa").config
    [batch] = batches(causal_batch, (4, 11, "right"))
    assert CachedPrefix.of(begun(batch, config)) is not None
    assert CachedPrefix.of(begun(batch, config, lengths=(3, 2))) is None
    assert CachedPrefix.of({**batch, "past_key_values": hf.DynamicCache()}) is None
    assert CachedPrefix.of({**batch, "past_key_values": "a cache of another kind"}) is None
    without = begun({name: each for name, each in batch.items() if name != "labels"}, config)
    assert is_wanted(without)
    with torch.no_grad():
        assert not is_wanted(without)


def test_an_encoder_decoder_stays_padded() -> None:
    pair = PrefixPair(with_prefix(bart("sdpa"), task_type="SEQ_2_SEQ_LM"))
    pair.train(pairs((4, 11, "right", 7), (4, 9, "right", 8)))
    assert pair.entry.record.padded_because == {"the argument past_key_values is given": 2}


def test_a_proof_holds_for_prefixes_of_any_length() -> None:
    model = llama("sdpa").train()
    reference, entry = copy.deepcopy(model), entry_of(model)
    for number, batch in enumerate(batches(causal_batch, *[(4, 11, "right")] * 4)):
        wanted, found = (begun(batch, model.config, lengths=(3 + number, 3 + number)) for _ in range(2))
        assert_close(entry.call(model._call_impl, (), found).loss, reference(**wanted).loss, "loss")
    assert (entry.record.steps_packed, len(entry._found_out)) == (3, 1)


def test_a_proof_leaves_the_scripts_cache_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proof without gradients, as of sharded weights, of a call whose prefix is trained and that has no labels."""
    monkeypatch.setattr(model_entry, "is_deterministic", lambda *_: False)
    model = llama("sdpa").train()
    reference, entry = copy.deepcopy(model), entry_of(model)
    for number, batch in enumerate(batches(causal_batch, *[(4, 11, "right")] * 3)):
        without = {name: each for name, each in batch.items() if name != "labels"}
        wanted, found = begun(without, model.config), begun(without, model.config)
        outputs = entry.call(model._call_impl, (), found)
        expected = reference(**wanted).logits
        if number == 2:
            assert_close(outputs.logits + 0.0, expected, "logits", floor=1e-5)
        assert found["past_key_values"].get_seq_length() == wanted["past_key_values"].get_seq_length() == 14
    assert entry.record.steps_packed > 0


def test_a_step_that_is_over_leaves_nothing_behind() -> None:
    pair = PrefixPair(with_prefix(llama("sdpa")))
    given = batches(causal_batch, *[(4, 9 + number, "right") for number in range(3)])
    pair.train(given)
    gc.collect()
    gc.disable()  # what is in a cycle would stay until the next collection
    try:
        outputs = pair.compiled(**given[0])
        cache = weakref.ref(outputs.past_key_values)
        outputs.loss.backward()
        del outputs
        assert cache() is None
    finally:
        gc.enable()
    assert pair.entry.record.steps_packed == 3


def test_the_import_packs_training_and_evaluation_and_explain_says_so() -> None:
    torch._dynamo.reset()
    LEDGER.forget()
    model = with_prefix(llama("sdpa"))
    reference = copy.deepcopy(model)
    given = batches(causal_batch, *[(4, 9 + number, "right") for number in range(8)])
    assert "packed" in str(deepytorch.explain(model, **given[0]))
    handle = deepytorch.optimize(model, options={"lowering": "aot_eager"})
    try:
        for batch in given[:3]:
            model(**batch).loss.backward()
            reference(**batch).loss.backward()
        with torch.no_grad():
            for batch in given:
                assert_close(model.eval()(**batch).loss, reference.eval()(**batch).loss, "loss")
    finally:
        handle.restore()
    names = {each.name: each.steps_packed for each in LEDGER.report().regions}
    assert names["model entry of LlamaForCausalLM"] == 2
    assert names["model entry of LlamaForCausalLM, without gradients"] > 0
