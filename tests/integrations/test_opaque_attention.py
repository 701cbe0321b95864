"""Models whose attention is a kernel that no graph shows the inside of are packed at entry, and train the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", minversion="5")
import transformers as hf
from transformers import modeling_flash_attention_utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import deepytorch
from deepytorch import handles
from deepytorch.compiler.dynamo.sizes import marked_ahead
from deepytorch.compiler.report import LEDGER
from deepytorch.integrations import packed_attention
from deepytorch.integrations.model_entry import ModelEntry
from tests.compiler.parity import batches, causal_batch, compare_at_tokens, expect_packed, masked_lm_batch, mixture
from tests.compiler.parity import padded_because as reasons_of
from tests.compiler.test_parity_decoders import GROUPED, gemma2, llama, mistral
from tests.integrations.opaque_attention import FlashCalls, install
from tests.integrations.test_model_entry import EntryPair, declined, entry_of, taken

FLASH = ["flash_attention_2", "flash_attention_3"]
IMPLEMENTATIONS = [*FLASH, "flex_attention"]


def padded_because() -> dict[str, int]:
    return reasons_of(LEDGER.report())


@pytest.mark.parametrize(
    "implementation",
    ["flash_attention_2", *(pytest.param(name, marks=pytest.mark.slow) for name in IMPLEMENTATIONS[1:])],
)
def test_a_decoder_trains_packed_and_the_same_for_every_padding(
    implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, implementation)
    model = llama(implementation).train()
    assert model.config._attn_implementation == implementation
    pair = EntryPair(model)
    given = batches(causal_batch, *mixture([(4, 8, "none"), (1, 7, "right"), (4, 10, "left")]))
    at_pads = batches(causal_batch, (4, 9, "right"), seed=5)
    at_pads[0]["labels"] = at_pads[0]["input_ids"].clone()
    expect_packed(pair.train([*given, *at_pads], compare_at_tokens()), steps=6, padded=3)
    assert padded_because() == {
        "hardly any padding in the batch": 1,
        "a batch of one row": 1,
        "a label at a padded position is not ignored": 1,
    }


def test_packed_rows_do_not_go_through_the_kernels_and_what_stays_padded_does(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = install(monkeypatch, "flash_attention_2")
    pair = EntryPair(llama("flash_attention_2").train())
    packed, whole = batches(causal_batch, (4, 11, "right"), (4, 9, "none"))

    def counted(batch: Any) -> int:
        before = calls.count
        pair.compiled(**batch)
        return calls.count - before

    counted(packed)  # the probe, and the call that is watched
    assert counted(packed) == 0
    assert counted(whole) == 2  # one for each layer


@pytest.mark.parametrize("implementation", FLASH)
@pytest.mark.parametrize("build", [mistral, gemma2], ids=lambda build: build.__name__)
def test_windows_and_softcaps_are_those_of_the_kernels(
    build: Callable[[str], Any], implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, implementation)
    model = build(implementation).train()
    model.config.use_cache = False
    pair = EntryPair(model)
    expect_packed(pair.train(batches(causal_batch, (4, 11, "right"), (4, 13, "left"), (3, 9, "mixed"))), steps=3)


@pytest.mark.parametrize("implementation", FLASH)
def test_a_window_to_both_sides_of_an_encoder(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, implementation)
    sizes = {**GROUPED, "vocab_size": 96, "local_attention": 4, "global_attn_every_n_layers": 2, "pad_token_id": 1}
    no_dropout = {"attention_dropout": 0.0, "embedding_dropout": 0.0, "mlp_dropout": 0.0}
    config = hf.ModernBertConfig(attn_implementation=implementation, **sizes, **no_dropout)
    pair = EntryPair(hf.ModernBertForMaskedLM(config).train())
    expect_packed(pair.train(batches(masked_lm_batch, (4, 11, "right"), (4, 13, "right"))), steps=2)


def test_the_dropout_of_flash_attention_2_is_drawn_in_packed_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "flash_attention_2")
    model = llama("flash_attention_2", attention_dropout=0.3).train()
    entry = entry_of(model)
    [batch] = batches(causal_batch, (4, 11, "right"))
    losses = [entry.call(model._call_impl, (), batch).loss for _ in range(3)]
    assert (entry.record.steps_profiled, entry.record.steps_packed) == (1, 2)
    assert losses[1] != losses[2]
    model.eval()  # without it, packed and padded are the same
    with torch.no_grad():
        torch.testing.assert_close(entry.call(model._call_impl, (), batch).loss, model(**batch).loss)


@pytest.mark.parametrize("sharded", [False, True])
def test_a_dropout_that_a_kernel_does_not_have_is_left_out_as_transformers_leaves_it_out(
    sharded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, "flash_attention_3")
    model = llama("flash_attention_3", attention_dropout=0.3).train()
    if sharded:  # the probe evaluates then, without dropout, and what a step raises is the end of the training
        for module in ("model_entry", "entry_proof"):
            monkeypatch.setattr(f"deepytorch.integrations.{module}.is_sharded", lambda _: True)
    entry = entry_of(model)
    [batch] = batches(causal_batch, (4, 11, "right"))
    losses = torch.stack([entry.call(model._call_impl, (), batch).loss for _ in range(3)])
    torch.testing.assert_close(losses, model(**batch).loss.expand(3))
    assert entry.record.steps_packed == 2


def test_flex_attention_says_itself_that_it_has_no_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "flex_attention")
    model = llama("flex_attention", attention_dropout=0.3).train()
    entry = entry_of(model)
    [batch] = batches(causal_batch, (4, 11, "right"))
    with pytest.raises(ValueError, match="does not support `dropout`"):
        entry.call(model._call_impl, (), batch)
    assert entry.record.steps_packed == 0


def test_rows_in_float32_are_cast_as_transformers_casts_them_for_flash(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "flash_attention_2")
    model = llama("flash_attention_2").bfloat16().train()
    for layer in model.model.layers:  # as norms that PEFT keeps in float32 leave what comes behind them
        attend = layer.self_attn
        for name in ("q_proj", "k_proj", "v_proj"):
            getattr(attend, name).register_forward_hook(_in_float32)
    entry = entry_of(model)
    [batch] = batches(causal_batch, (4, 11, "right"))
    monkeypatch.setattr("deepytorch.integrations.padded_hooks.is_users", lambda _: False)
    losses = [entry.call(model._call_impl, (), batch).loss for _ in range(2)]
    assert entry.record.steps_packed == 1, entry.record
    torch.testing.assert_close(losses[1], losses[0].detach(), rtol=1e-2, atol=1e-2)


def _in_float32(_: Any, __: Any, output: torch.Tensor) -> torch.Tensor:
    return output.float()


def test_sinks_count_beside_the_keys_and_not_where_transformers_drops_them() -> None:
    module, rows = torch.nn.Linear(1, 1), packed_attention.Rows(torch.tensor([0, 3]).int(), torch.arange(3).int(), 3)
    query, mask = torch.randn(1, 2, 3, 8), packed_attention.encode_mask(rows)
    sinks = torch.tensor([0.5, -1.0])
    scores = (query @ query.mT / 8**0.5).masked_fill(~torch.ones(3, 3, dtype=torch.bool).tril(), -torch.inf)
    weights = torch.cat([scores, sinks.view(1, 2, 1, 1).expand(1, 2, 3, 1)], -1).softmax(-1)[..., :-1]
    found, _ = packed_attention.attend(module, query, query, query, mask, s_aux=sinks)
    torch.testing.assert_close(found, (weights @ query).transpose(1, 2))
    with pytest.raises(packed_attention.CannotPack, match="gives its attention s_aux"):
        packed_attention.attend(module, query, query, query, mask, s_aux=sinks, implementation="sdpa")


@pytest.mark.parametrize("name", ["indices", "something_new"])
def test_what_models_hand_to_their_attention_and_nobody_here_knows_is_declined(name: str) -> None:
    module, rows = torch.nn.Linear(1, 1), packed_attention.Rows(torch.tensor([0, 3]).int(), torch.arange(3).int(), 3)
    query = torch.randn(1, 2, 3, 8)
    mask = packed_attention.encode_mask(rows)
    known = dict.fromkeys(packed_attention.WITHOUT_EFFECT, True)
    packed_attention.attend(module, query, query, query, mask, **{name: None}, **known)
    with pytest.raises(packed_attention.CannotPack, match=f"gives its attention {name}"):
        packed_attention.attend(module, query, query, query, mask, **{name: torch.ones(2)})


@pytest.mark.parametrize("implementation", ["sdpa", pytest.param("flash_attention_2", marks=pytest.mark.slow)])
def test_what_a_tokenizer_gives_and_no_attention_reads_keeps_no_model_padded(
    implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, "flash_attention_2")
    pair = EntryPair(llama(implementation).train())
    given = batches(causal_batch, (4, 11, "right"), (4, 9, "right"))
    for batch in given:  # hands it on to its attention
        batch["token_type_ids"] = torch.zeros_like(batch["input_ids"])
    expect_packed(pair.train(given, compare_at_tokens()), steps=2, padded=0)


def test_flash_kernels_are_known_by_every_name_that_transformers_gives_them() -> None:
    fallback = getattr(modeling_flash_attention_utils, "FLASH_ATTN_KERNEL_FALLBACK", {})
    taken = {"flash_attention_2", "kernels-community/aiter-flash-attn", *fallback, *fallback.values()}
    assert taken <= set(packed_attention.FLASH)  # a new one may see something else: it has to be read first
    for name in taken:
        for written in (name, f"paged|{name}", f"{name}@v1.2", f"{name}:flash_attn_varlen_func", f"{name}@main:attend"):
            assert packed_attention.plain_name(written) == name
    for other in (None, "eager", "sdpa", "paged|eager", "mine", "someone/flash-attn2", "kernels-community/metal"):
        assert packed_attention.plain_name(other) is other


@pytest.mark.parametrize(
    "suffix", ["@main", *(pytest.param(each, marks=pytest.mark.slow) for each in ("", ":flash_attn_varlen_func"))]
)
def test_a_kernel_of_the_hub_is_packed_as_the_package_is(suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"kernels-community/flash-attn2{suffix}"
    install(monkeypatch, "flash_attention_2")
    for interface in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):  # as transformers registers it
        monkeypatch.setitem(interface._global_mapping, name, interface["flash_attention_2"])
    model = llama("flash_attention_2").train()
    model.config._attn_implementation = name
    pair = EntryPair(model)
    assert pair.entry is not None
    assert pair.entry.is_the_only_way
    expect_packed(pair.train(batches(causal_batch, (4, 11, "right"), (4, 9, "left"))), steps=2, padded=0)


def test_an_attention_of_the_scripts_own_is_declined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "mine", ALL_ATTENTION_FUNCTIONS["sdpa"])
    model = llama("sdpa").train()
    model.config._attn_implementation = "mine"
    entry = entry_of(model)
    [batch] = batches(causal_batch, (4, 11, "right"))
    assert "attention by mine, of which only its author knows" in declined(entry, model, batch)


def test_an_attention_that_is_set_in_the_middle_of_training_is_asked_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "flash_attention_2")
    for interface in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
        monkeypatch.setitem(interface._global_mapping, "mine", interface["sdpa"])
    model = llama("sdpa").train()
    entry = entry_of(model)
    [batch] = batches(causal_batch, (4, 11, "right"))
    steps = []
    for implementation in ("sdpa", "sdpa", "mine", "flash_attention_2", "sdpa"):
        model.set_attn_implementation(implementation)
        entry.call(model._call_impl, (), batch)
        steps.append((taken(entry), entry.record.steps_padded))
    assert steps == [(1, 0), (2, 0), (2, 1), (3, 1), (4, 1)]


def test_the_dtype_that_flash_kernels_are_given() -> None:
    rows, half, convolution = torch.ones(2), torch.nn.Linear(1, 1).half(), torch.nn.Conv1d(1, 1, 1).half()
    assert packed_attention._dtype_for_flash(rows.bfloat16(), half) is None
    assert packed_attention._dtype_for_flash(rows, half) is torch.float16
    assert packed_attention._dtype_for_flash(rows, convolution) is None  # GPT-2 has no linear layers
    with torch.autocast("cpu", torch.bfloat16):
        assert packed_attention._dtype_for_flash(rows, half) is torch.bfloat16
    convolution.config = hf.LlamaConfig(dtype=torch.float16)  # type: ignore[assignment]
    convolution.config._is_quantized = True  # type: ignore[union-attr]
    assert packed_attention._dtype_for_flash(rows, convolution) is torch.float16
    convolution.config._pre_quantization_dtype = torch.bfloat16  # type: ignore[union-attr]
    assert packed_attention._dtype_for_flash(rows, convolution) is torch.bfloat16


@pytest.mark.parametrize("waits", [True, False])
def test_what_no_graph_can_pack_is_packed_at_entry_without_a_look_at_graphs(
    waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = install(monkeypatch, "flash_attention_2")
    compiled: list[int] = []
    for implementation, expected in (("flash_attention_2", True), ("sdpa", False)):
        model = llama(implementation).train()

        def runs(module: Any, *args: Any, **given: Any) -> Any:
            compiled.append(calls.count)
            return module._call_impl(*args, **given)

        entry = handles.entry_of(model, None)
        first = None if waits else _Over(runs, entry)
        handle = handles.Handle(model, runs, entry if waits else None, first=first)
        [batch] = batches(causal_batch, (4, 11, "right"))
        handle(model, **batch)
        assert isinstance(entry, ModelEntry)
        assert (taken(entry) > 0) == expected
    assert len(compiled) == 2  # the padded call that is watched, and the one of the other model


class _Over:
    """First steps that are over."""

    def __init__(self, compiled: Callable[..., Any], entry: Any) -> None:
        self.entry, self._then = entry, (compiled, entry)

    def over(self) -> bool:
        return True

    def then(self) -> tuple[Callable[..., Any], Any]:
        return self._then

    def timed(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return run(*args, **kwargs)

    def restore(self) -> None:
        return None


def test_nothing_is_marked_for_the_compile_of_a_model_that_is_packed_at_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "flash_attention_2")
    model = llama("flash_attention_2", num_hidden_layers=1).train()
    entry = entry_of(model)
    marked: list[bool] = []

    def runs(*_: Any, **given: Any) -> Any:
        with marked_ahead(model, (), given):
            marked.append(hasattr(given["input_ids"], "_deepytorch_marked"))
        return model._call_impl(**given)

    [batch] = batches(causal_batch, (4, 11, "right"))
    for _ in range(2):  # one padded and watched, one packed
        entry.call(runs, (), batch)
    runs(**batch)
    assert marked == [False, False, True]


@pytest.mark.slow
def test_a_model_that_is_packed_at_entry_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: FlashCalls = install(monkeypatch, "flash_attention_2")
    pair = EntryPair(llama("flash_attention_2", num_hidden_layers=1).train())
    handle = deepytorch.optimize(pair.model, options={"lowering": "aot_eager", "wait": True})
    pair.compiled = pair.model
    try:
        pair.train(batches(causal_batch, (4, 11, "right"), (4, 9, "right"), (4, 10, "left")), compare_at_tokens())
    finally:
        handle.restore()
    assert LEDGER.report().total("steps_packed") == 2
    assert calls.count > 0
