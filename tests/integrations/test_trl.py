"""TRL's fused head over a Llama: what lies below it is compiled and packed, and the head sees tokens alone."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import deepytorch
from deepytorch import autowrap, handles
from deepytorch.compiler.report import LEDGER
from deepytorch.integrations.trl import OnTokens
from deepytorch.switch import SWITCH
from tests.cold import run_cold

pytest.importorskip("transformers")
utils = pytest.importorskip("trl.trainer.utils")
if not hasattr(utils, "add_fused_lm_head"):
    pytest.skip("this TRL has another head", allow_module_level=True)

from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

OPTIONS = {"lowering": "aot_eager"}
ROWS, POSITIONS, VOCAB, STEPS = 4, 24, 96, 4


@pytest.fixture(autouse=True)
def as_imported(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What the import does to TRL, and nothing known of other tests."""
    monkeypatch.setattr(utils, "_ChunkedLogProbFunction", OnTokens(utils._ChunkedLogProbFunction))
    LEDGER.forget()
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def llama() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, **sizes)).train()


def with_fused_head(model: Any) -> Any:
    utils.add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    return model


def mask_of(padding: str, generator: torch.Generator) -> torch.Tensor:
    columns = torch.arange(POSITIONS)[None]
    lengths = torch.randint(2, POSITIONS // 2, (ROWS, 1), generator=generator)
    lengths[0] = POSITIONS
    right = columns < lengths
    odd = torch.arange(ROWS)[:, None] % 2 == 1
    return {
        "right": right,
        "mixed": torch.where(odd, right.flip(1), right),
        "holes": right & ((columns + lengths) % 3 != 1),
        "one token": columns < torch.where(odd, 1, POSITIONS),
        "none": torch.ones(ROWS, POSITIONS, dtype=torch.bool),
    }[padding].long()


def batches(padding: str) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(STEPS):
        ids, mask = torch.randint(3, VOCAB, (ROWS, POSITIONS), generator=generator), mask_of(padding, generator)
        labels = ids.masked_fill((mask == 0) | (mask.cumsum(-1) <= 2), -100)  # a prompt of two tokens
        found.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return found


def train(model: Any, padding: str) -> tuple[list[float], list[torch.Tensor]]:
    """Losses, as DPO and SFT make them of scores, and the last gradients."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for batch in batches(padding):
        optimizer.zero_grad()
        outputs = model(**batch, fused_lm_head=True)
        chosen, rejected = outputs.log_probs.sum(-1).chunk(2)
        entropy = (outputs.entropy * outputs.label_mask).sum() / outputs.label_mask.sum().clamp(min=1)
        loss = outputs.loss - nn.functional.logsigmoid(0.1 * (chosen - rejected)).mean() + 0.01 * entropy
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [each.grad.clone() for each in model.parameters()]


@pytest.mark.parametrize("padding", ["right", "mixed", "holes", "one token", "none"])
def test_what_lies_below_the_fused_head_is_packed_and_trains_as_in_eager(padding: str) -> None:
    model = with_fused_head(llama())
    reference = with_fused_head(llama())
    with deepytorch.paused():
        expected, gradients = train(reference, padding)
    handle = deepytorch.optimize(model, options=OPTIONS)
    found, ours = train(model, padding)
    handle.restore()
    assert found == pytest.approx(expected, rel=2e-6, abs=1e-6)
    for mine, theirs in zip(ours, gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=2e-6)
    [record] = LEDGER.report().regions
    assert record.outcome == "packed", record.declined
    assert not record.name.startswith("model entry")
    # The first is watched. A token behind a hole is predicted from a pad, whose hidden state eager computes as well.
    assert (record.steps_packed, record.steps_padded) == {
        "none": (0, STEPS),
        "holes": (0, STEPS - 1),
    }.get(padding, (STEPS - 1, 0))


def test_the_import_compiles_the_backbone_in_the_models_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SWITCH, "enabled", True)
    monkeypatch.setitem(autowrap._SETTINGS, "options", OPTIONS)
    model = with_fused_head(llama())
    autowrap.watch(torch.optim.SGD(model.parameters(), lr=0.1))
    [batch, *_] = batches("right")
    model(**batch, fused_lm_head=True).loss.backward()
    assert handles.armed(model)
    assert model._compiled_call_impl is None
    assert model.model._compiled_call_impl is not None


@pytest.fixture
def accelerate() -> Iterator[Any]:
    """Its one state of the process as at the start, whatever tests ran before in the same process."""
    found = pytest.importorskip("accelerate")
    found.state.AcceleratorState._reset_state(reset_partial_state=True)
    yield found
    found.state.AcceleratorState._reset_state(reset_partial_state=True)


def test_the_head_is_found_behind_accelerates_mixed_precision(accelerate: Any) -> None:
    model = with_fused_head(llama())
    model = accelerate.Accelerator(mixed_precision="bf16", cpu=True).prepare_model(model)
    assert autowrap.backbone_of(model) is model.model
    handle = deepytorch.optimize(model, options=OPTIONS)
    [batch, *_] = batches("right")
    losses = []
    for _ in range(3):
        loss = model(**batch, fused_lm_head=True).loss
        loss.backward()
        losses.append(loss.item())
    handle.restore()
    with deepytorch.paused():
        expected = model(**batch, fused_lm_head=True).loss.item()
    assert losses == pytest.approx([expected] * 3, rel=1e-2)  # of bf16
    [record] = LEDGER.report().regions
    assert record.steps_packed == 2, record


def test_a_model_without_the_head_is_compiled_whole() -> None:
    assert autowrap.backbone_of(llama()) is None


def test_of_two_models_with_the_head_in_one_module_neither_is_taken() -> None:
    both = nn.ModuleList([with_fused_head(llama()), with_fused_head(llama())])
    assert autowrap.backbone_of(both) is None
    assert autowrap.backbone_of(both[0]) is both[0].model


def test_the_head_is_found_below_adapters() -> None:
    peft = pytest.importorskip("peft")
    model = llama()
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    with_fused_head(adapted.get_base_model())
    assert autowrap.backbone_of(adapted) is model.model


def test_a_forward_of_somebody_else_on_the_model_is_no_head_of_trls() -> None:
    model = llama()
    original = model.forward
    model.forward = lambda *args, **kwargs: original(*args, **kwargs)
    assert autowrap.backbone_of(model) is None


def test_explain_asks_the_backbones_entry_with_what_the_backbone_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autowrap, "needs_entry", lambda *_: True)  # as where its graph cannot be packed
    model = with_fused_head(llama())
    [batch, *_] = batches("right")
    entry, *_ = deepytorch.explain(model, **batch, fused_lm_head=True).to_json()["regions"]
    assert entry["name"].startswith("model entry")
    assert entry["outcome"] == "packed", entry["declined"]


def test_explain_says_what_training_will_do() -> None:
    model = with_fused_head(llama())
    before = copy.deepcopy(model.state_dict())
    [batch, *_] = batches("right")
    explanation = deepytorch.explain(model, **batch, fused_lm_head=True)
    [region] = explanation.to_json()["regions"]
    assert region["outcome"] == "packed"
    assert not region["name"].startswith("model entry")
    assert not handles.armed(model)
    assert model.model._compiled_call_impl is None
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


RANKS = """
import os, sys
import torch, torch.distributed as dist
if os.environ.get("DEEPYTORCH") != "off":
    import deepytorch
    deepytorch.configure(options={"lowering": "aot_eager"})
from transformers import LlamaConfig, LlamaForCausalLM
import trl.trainer.utils as utils
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
model = LlamaForCausalLM(LlamaConfig(vocab_size=96, tie_word_embeddings=sys.argv[1] == "tied", **sizes)).train()
utils.add_fused_lm_head(model)
ddp = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
generator = torch.Generator().manual_seed(rank)
for _ in range(5):
    ids = torch.randint(3, 96, (4, 24), generator=generator)
    mask = torch.arange(24)[None] < torch.randint(3, 24, (4, 1), generator=generator)
    labels = ids.masked_fill(~mask, -100)
    ddp(input_ids=ids, attention_mask=mask.long(), labels=labels, fused_lm_head=True).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
packed = deepytorch.report().to_json()["steps_packed"] if os.environ.get("DEEPYTORCH") != "off" else 0
sums = [each.double().square().sum().item() for each in model.parameters()]
sys.stdout.write(f"FOUND {rank} {packed} {sums}\\n")
sys.stdout.flush()
dist.destroy_process_group()
os._exit(0)  # stock ranks abort now and then when Python takes them down ("terminate called without ...")
"""


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["tied", "untied"])
def test_ranks_train_as_under_ddp(weights: str) -> None:
    """The head's weight is outside of the graph, or, tied to the embeddings, in it and outside."""

    def run(**environment: str) -> dict[int, tuple[int, list[float]]]:
        done = run_cold(RANKS, weights, num_ranks=2, env=environment, timeout=280)
        lines = [line.split(" ", 3) for line in done.stdout.splitlines() if line.startswith("FOUND")]
        return {int(rank): (int(packed), json.loads(sums)) for _, rank, packed, sums in lines}

    found, expected = run(), run(DEEPYTORCH="off")
    assert found.keys() == expected.keys() == {0, 1}
    for rank, (packed, sums) in found.items():
        assert packed == 4  # the first is watched
        assert sums == pytest.approx(expected[rank][1], rel=1e-6)
