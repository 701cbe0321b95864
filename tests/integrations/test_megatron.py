"""Megatron-LM: its jit hook, by the contract of its module `megatron.core.jit` and with the package; its models."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cold import run_cold

JIT = """
import torch

def noop_decorator(function):
    return function

def enable_jit_fuser():
    global jit_fuser
    jit_fuser = torch.compile

def disable_jit_fuser():
    global jit_fuser
    jit_fuser = noop_decorator

enable_jit_fuser()
"""

FUSED = """
import torch
from megatron.core.jit import jit_fuser

@jit_fuser
def swiglu(x):
    first, second = x.chunk(2, -1)
    return torch.nn.functional.silu(first) * second
"""


@pytest.mark.slow
def test_fused_functions_are_compiled_by_deepytorch(tmp_path: Path) -> None:
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").touch()
    (core / "jit.py").write_text(JIT)
    (core / "fused.py").write_text(FUSED)
    script = """
import deepytorch
import torch
from megatron.core import jit
from megatron.core.fused import swiglu
from deepytorch.integrations import megatron
x = torch.randn(4, 8, requires_grad=True)
first, second = x.chunk(2, -1)
torch.testing.assert_close(swiglu(x), torch.nn.functional.silu(first) * second)
swiglu(x).sum().backward()
assert len(deepytorch.report().to_json()["regions"]) == 1
jit.disable_jit_fuser()
assert jit.jit_fuser is jit.noop_decorator
jit.enable_jit_fuser()
assert jit.jit_fuser is megatron.compile_fused
deepytorch.disable()
assert jit.jit_fuser is torch.compile
jit.enable_jit_fuser()
assert jit.jit_fuser is torch.compile
"""
    run_cold(script, cwd=tmp_path)


GPT = """
import contextlib, logging
import torch
import torch.distributed as dist
torch.cuda.current_device = lambda: "cpu"  # Megatron asks for the device of its buffers
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_swiglu import swiglu
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import random
from megatron.core.transformer.transformer_config import TransformerConfig
class Tracker:  # of the random numbers of a GPU
    def fork(self, *_):
        return contextlib.nullcontext()
random._CUDA_RNG_STATE_TRACKER, random._CUDA_RNG_STATE_TRACKER_INITIALIZED = Tracker(), True
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
parallel_state.initialize_model_parallel()
config = TransformerConfig(
    num_layers=2, hidden_size=32, num_attention_heads=4, use_cpu_initialization=True, hidden_dropout=0.0,
    attention_dropout=0.0, bias_activation_fusion=True, gated_linear_unit=True, add_bias_linear=False,
    activation_func=torch.nn.functional.silu, masked_softmax_fusion=False, normalization="RMSNorm",
)
torch.manual_seed(0)
model = GPTModel(config, get_gpt_layer_local_spec(normalization="RMSNorm"), vocab_size=64, max_sequence_length=32)
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
ids = torch.randint(0, 64, (2, 16))
mask = torch.triu(torch.ones(16, 16, dtype=torch.bool), 1)[None, None]
for _ in range(3):
    loss = model(ids, torch.arange(16).expand(2, 16), mask, labels=ids).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {loss.item():.5f}")
x = torch.randn(4, 8, requires_grad=True)
[gradient] = torch.autograd.grad(swiglu(x).square().sum(), x)
print(f"gradient {gradient.norm().item():.5f}")
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_models_without_padding_stay_as_they_are_and_fused_functions_are_compiled() -> None:
    pytest.importorskip("megatron.core")
    ours = """
import logging, deepytorch
logging.basicConfig(level=logging.INFO)
deepytorch.configure(options={"lowering": "aot_eager"})
"""
    report = """
from deepytorch import handles
assert not handles.armed(model)
assert len(deepytorch.report().to_json()["regions"]) >= 1
"""
    found = []
    for script in (GPT, ours + GPT + report):
        done = run_cold(script)
        found.append([line for line in done.stdout.splitlines() if line.startswith(("loss", "gradient"))])
    assert len(found[0]) == 4
    assert found[0] == found[1]
    assert "models of Megatron-LM are not compiled" in done.stderr
    assert "padding stays: hardly any padding in the batch" in done.stderr


ROOT = Path(__file__).parents[2]
BEGIN = """
import logging, torch, deepytorch
from tests.integrations.megatron_runs import *
begin()
"""


def run(script: str) -> str:
    """What a script prints that trains small models of `megatron_runs`."""
    pytest.importorskip("megatron.core")
    return run_cold(BEGIN + script, cwd=ROOT).stdout


@pytest.mark.slow
def test_gpt_trains_packed_as_it_does_padded() -> None:
    run("""
models = {
    "learned positions": lambda: gpt(),
    "rotary": lambda: gpt(LLAMA, position_embedding_type="rope", share_embeddings_and_output_weights=True),
    "recomputed layers": lambda: gpt(
        LLAMA | {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        position_embedding_type="rope", rotary_percent=0.5,
    ),
    "recomputed attention": lambda: gpt({
        "recompute_granularity": "selective", "recompute_modules": ["core_attn"],
        "apply_query_key_layer_scaling": True, "attention_softmax_in_fp32": True,
    }),
}
for name, make in models.items():
    for kind in ("right", "left", "mixed", "loss mask", "no mask"):
        record = packed_and_padded(make, lambda step: batch(kind, step))
        assert (record.steps_profiled, record.steps_packed) == (1, STEPS - 1), (name, kind, record)
# One row a micro batch, as Megatron-LM's own default has it.
record = packed_and_padded(models["rotary"], lambda step: batch("loss mask", step + 7, 2))
assert record.steps_packed == STEPS - 1, record
def one(step):
    given, weights = batch("loss mask", step, 2)
    return {name: value if name == "attention_mask" else value[1:] for name, value in given.items()}, weights[1:]
record = packed_and_padded(models["rotary"], one)
assert record.steps_packed == STEPS - 1, record
""")


@pytest.mark.slow
def test_bert_trains_packed_as_it_does_padded() -> None:
    run("""
for kind in ("right", "left", "mixed"):
    for positions in ("learned_absolute", "rope"):
        make = lambda: bert(head=False, position_embedding_type=positions)
        record = packed_and_padded(make, lambda step: batch(kind, step, causal=False))
        assert (record.steps_profiled, record.steps_packed) == (1, STEPS - 1), (kind, record)
record = packed_and_padded(bert, lambda step: batch("right", step, causal=False, types=True))  # with its pooler
assert (record.steps_profiled, record.steps_packed) == (1, STEPS - 1), record
record = packed_and_padded(bert, lambda step: batch("left" if step > 1 else "right", step, causal=False, types=True))
assert record.steps_packed == 1, record
assert record.padded_because == {"tokens after pads, which the model was not proved for": 2}, record
""")


@pytest.mark.slow
def test_what_is_not_packed_is_right_and_says_why() -> None:
    run("""
from megatron.core.models.gpt.gpt_model import GPTModel
def changed(**others):
    def given(step):
        arguments, weights = batch("right", step)
        return {**arguments, **others}, weights
    return given
blocks = LATER | (torch.arange(POSITIONS)[:, None] // 8 != torch.arange(POSITIONS) // 8)
prefix = LATER.clone(); prefix[:4, :4] = False
class Own(GPTModel):
    pass
def hooked():
    model = gpt()
    model.decoder.layers[0].register_forward_hook(lambda *_: None)
    return model
strange = "the attention mask hides more, or less, than pads and what comes later"
cases = [
    (gpt, changed(attention_mask=blocks[None, None]), strange),
    (gpt, changed(attention_mask=prefix[None, None], loss_mask=batch("right", 0)[1]), strange),
    (gpt, changed(attention_mask=LATER[None, None]), "hardly any padding"),
    (gpt, changed(padding_mask=torch.zeros(ROWS, POSITIONS, dtype=torch.bool)), "the argument padding_mask is given"),
    (lambda: gpt({"window_size": (4, 0)}), lambda step: batch("loss mask", step), "window_size is (4, 0)"),
    (lambda: gpt(kind=Own), lambda step: batch("loss mask", step), "modules of type Own"),
    (hooked, lambda step: batch("loss mask", step), "a hook on a module's forward"),
    (lambda: gpt({"softmax_type": "off-by-one"}), lambda step: batch("loss mask", step), "softmax_type is off-by-one"),
]
for make, given, why in cases:
    record = packed_and_padded(make, given)
    assert record.steps_packed == 0, record
    [reason] = record.padded_because
    assert why in reason, (why, record)
# A batch without a token to learn from, and one that the model was proved for, in turns.
def empty(step):
    arguments, weights = batch("loss mask", step)
    if step == 2:
        weights[1] = 0.0
    return arguments, weights
record = packed_and_padded(gpt, empty)
assert (record.steps_packed, record.padded_because) == (2, {"a row without a token": 1}), record
deepytorch.configure(options={"unpad": False})
model = gpt()
mean_loss(*reversed([model(**batch("right", 0)[0]), batch("right", 0)[1]]))[0].backward()
assert "_deepytorch_entry" not in vars(model)
""")


@pytest.mark.slow
def test_pads_that_are_looked_at_are_those_of_the_padded_step() -> None:
    run("""
import tests.integrations.megatron_runs as runs
plain = runs.mean_loss
calls = []
def looking(weights, outputs):
    calls.append(1)
    loss, losses = plain(weights, outputs)
    return (loss + 0.1 * outputs.mean() if len(calls) > first else loss), losses
runs.mean_loss = looking
for first, expected in ((0, (0, 0)), (4, (2, 1))):  # from the first step on, and from the third one on
    calls.clear()
    record = packed_and_padded(gpt, lambda step: batch("loss mask", step))
    assert (record.steps_packed, record.steps_replayed) == expected, record
    assert record.steps_profiled == 1
# Logits of a call without labels: the loss is the script's.
def own(weights, logits):
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2).float(), labels, reduction="none")
    return plain(weights, losses)
runs.mean_loss = own
labels = batch("loss mask", 0)[0]["labels"]
def given(step):
    arguments, weights = batch("loss mask", step)
    return {name: value for name, value in arguments.items() if name != "labels"}, weights
record = packed_and_padded(gpt, given)
assert record.steps_packed == STEPS - 1, record
""")


@pytest.mark.slow
def test_half_precision_and_dropout() -> None:
    """Dropout draws other numbers packed than padded: over many draws the losses are the same."""
    run("""
from megatron.core.transformer.module import Float16Module
half = {"bf16": True, "params_dtype": torch.bfloat16}
model, other = (Float16Module(each.config, each) for each in (gpt(half), gpt(half)))
for step in range(3):
    given, weights = batch("loss mask", step)
    loss = mean_loss(weights, model(**given))[0]
    with deepytorch.paused():
        expected = mean_loss(weights, other(**given))[0]
    loss.backward()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=5e-3, atol=0.0)
assert record_of(model.module).steps_packed == 2, record_of(model.module)

model = gpt({"attention_dropout": 0.3, "hidden_dropout": 0.2})
given, weights = batch("loss mask", 0)
means = []
for block in (contextlib.nullcontext, deepytorch.paused):
    losses = []
    for _ in range(100):
        with block():
            losses.append(mean_loss(weights, model(**given))[0])
            losses[-1].backward()
    losses = torch.stack(losses).detach()
    assert losses.std() > 0
    means.append((losses.mean(), losses.std()))
assert record_of(model).steps_packed == 99, record_of(model)
(one, spread), (two, other_spread) = means
assert (one - two).abs() < 4 * spread / 50**0.5
assert 0.6 < spread / other_spread < 1.6
torch.manual_seed(3)
first = mean_loss(weights, model(**given))[0]
torch.manual_seed(3)  # drawn again: in eager from now on
again = mean_loss(weights, model(**given))[0]
with deepytorch.paused():
    torch.manual_seed(3)
    expected = mean_loss(weights, model(**given))[0]
assert again == expected
""")


def ranks(case: str, folder: Path) -> list[tuple[list[Any], list[Any], dict[str, Any]]]:
    """What each of two ranks has found without the import and with it, and what it reports of the latter."""
    pytest.importorskip("megatron.core")
    script = f"""
import sys, deepytorch
from tests.integrations.megatron_runs import train_ranks
train_ranks({case!r}, sys.argv[1])
"""
    found = []
    for name in ("off", "on"):
        env = {"DEEPYTORCH": name, "PYTHONPATH": str(ROOT), "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
        run_cold(script, str(folder / name), num_ranks=2, env=env, timeout=120.0)
        found.append([torch.load(folder / f"{name}.{rank}") for rank in range(2)])
    return [(off[0], *on) for off, on in zip(*found, strict=True)]


def assert_equal(expected: Sequence[Any], found: Sequence[Any]) -> None:
    """Losses, losses of tokens, gradients and weights agree, in every step."""
    for one, other in zip(expected, found, strict=True):
        for each, its in zip(one, other, strict=True):
            scale = each.abs().max().item()
            torch.testing.assert_close(its, each, rtol=1e-3, atol=2e-5 * scale)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", ["tensor parallel", "sequence parallel", "data parallel", "distributed optimizer", "late", "unlike batches"]
)
def test_two_ranks_train_packed_as_they_do_padded(case: str, tmp_path: Path) -> None:
    for expected, found, report in ranks(case, tmp_path):
        assert_equal(expected, found)
        assert report["ours"] or sys.platform != "linux", "the group is not deepytorch's"
        if case == "unlike batches":
            assert report["packed"] == 0
            assert report["padded"] == {"tensor-parallel ranks would run this batch differently": 8}
        elif case == "late":  # the last of eight calls runs padded after the look
            assert (report["packed"], list(report["padded"].values())) == (6, [1])
        else:
            assert (report["packed"], report["padded"]) == (7, {})
        assert bool(report["told"]) == (case == "late")


PIPELINES = {
    "pipeline": 12,
    "shared embeddings": 9,
    "freed outputs": 6,
    "masked rows": 6,
    "BERT": 6,
    "half precision": 6,
}


@pytest.mark.slow
@pytest.mark.parametrize("case", PIPELINES)
def test_two_stages_of_a_pipeline_train_packed_as_they_do_padded(case: str, tmp_path: Path) -> None:
    """In the first step one micro batch is profiled, and the others wait for the stages to agree."""
    packed = PIPELINES[case]
    for expected, found, report in ranks(case, tmp_path):
        assert (report["packed"], report["padded"]) == (
            packed,
            {"the stages of the pipeline have not agreed yet": packed // 3 - 1},
        )
        if case != "half precision":
            assert_equal(expected, found)
            continue
        for one, other in zip(expected, found, strict=True):
            for each, its in zip(one, other, strict=True):
                assert (its - each).float().norm() <= 0.03 * each.float().norm()


@pytest.mark.slow
def test_hidden_states_that_a_script_looks_at_keep_all_stages_padded(tmp_path: Path) -> None:
    reports = []
    for expected, found, report in ranks("one stage looks", tmp_path):
        assert_equal(expected, found)
        reports.append(report)
    assert [each["packed"] for each in reports] == [0, 0]
    assert "looks at padded positions of 'hidden states'" in next(iter(reports[0]["padded"]))
    assert reports[1]["padded"]["another stage of the pipeline stays padded"] == 6


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_positions_that_were_left_out_are_told_from_any_number(dtype: torch.dtype, num_rows: int) -> None:
    from deepytorch.integrations.megatron_pipeline import LEFT_OUT, with_left_out
    from deepytorch.integrations.packed_attention import Rows
    from deepytorch.integrations.packed_batch import Side

    tokens = torch.arange(6).repeat(num_rows, 1) < torch.tensor([[4], [6], [1]])[:num_rows]
    indices = tokens.flatten().nonzero()[:, 0]
    side = Side(Rows(torch.empty(0), torch.empty(0), 6), indices, num_rows, 6)
    values = torch.randn(1, len(indices), 8, dtype=dtype)
    values[0, 0] = torch.nan
    values[0, 1] = torch.inf - torch.tensor(torch.inf, dtype=dtype)
    packed = values.clone().requires_grad_()
    wire = with_left_out(packed, side)
    assert wire.is_contiguous()
    assert not wire._is_view()
    bits, number = LEFT_OUT[dtype]
    left_out = torch.empty_like(wire).copy_(wire.detach())[..., 0].view(bits) == number
    assert torch.equal(left_out.T, ~tokens)
    torch.testing.assert_close(wire.transpose(0, 1)[tokens], values[0], equal_nan=True)
    gradient = torch.randn_like(wire).masked_fill(left_out[..., None], torch.nan)
    wire.data = torch.empty(1, dtype=dtype)  # as Megatron-LM frees what it has sent
    torch.autograd.Variable._execution_engine.run_backward((wire,), (gradient,), False, False, (), True, True)
    assert torch.equal(packed.grad[0], gradient.transpose(0, 1)[tokens])
