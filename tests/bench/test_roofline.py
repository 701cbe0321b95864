"""`deepytorch bench roofline`: its arithmetic is that of the models, counted; its times follow from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from deepytorch.bench.roofline import GPUS, SHAPES, Gpu, Shape, Work, collectives, roofline, row_lengths, step_of
from deepytorch.cli import app
from deepytorch.errors import ConfigError

ROOT = Path(__file__).parents[2]
SMALL: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 160,
}  # fmt: skip
LLAMA = Shape("llama", 64, 2, 4, 2, 16, 96, 160)
BERT = Shape("bert", 64, 2, 4, 4, 16, 96, 160, causal=False, gated=False, tied=True)


def model_of(shape: Shape) -> Any:
    if shape.causal:
        config = hf.LlamaConfig(**SMALL, num_key_value_heads=2, attn_implementation="eager")
        return hf.LlamaForCausalLM(config)
    return hf.BertForMaskedLM(hf.BertConfig(**SMALL, attn_implementation="eager"))


@pytest.mark.parametrize("shape", [LLAMA, BERT], ids=lambda shape: shape.name)
def test_a_padded_steps_arithmetic_is_that_of_the_model(shape: Shape) -> None:
    model, rows, positions = model_of(shape), 3, 20
    ids = torch.zeros(rows, positions, dtype=torch.int64)
    with FlopCounterMode(display=False) as counted:
        loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss
    step = step_of(shape, [positions] * rows, packed=False)
    assert counted.get_total_flops() == sum(work.flops for work in step.forward)
    with FlopCounterMode(display=False) as counted:
        loss.backward()
    again = next(work for work in step.forward if work.kind == "attention").flops / 2  # scores, which eager has kept
    assert counted.get_total_flops() == sum(work.flops for work in step.backward) - again


@pytest.mark.parametrize("shape", [LLAMA, BERT], ids=lambda shape: shape.name)
def test_parameters_are_the_models_matrices(shape: Shape) -> None:
    model = model_of(shape)
    left_out = ("position_embeddings", "token_type_embeddings")
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and not any(n in name for n in left_out)]
    assert shape.parameters == sum(p.numel() for p in matrices)
    assert shape.tensors == len(matrices)


@pytest.mark.parametrize(("name", "billions"), [("Llama-3-8B", 8.03), ("Qwen2.5-0.5B", 0.494), ("BERT-base", 0.1095)])
def test_shapes_are_as_large_as_the_models_of_that_name(name: str, billions: float) -> None:
    shape = next(each for each in SHAPES if each.name == name)
    assert shape.parameters / 1e9 == pytest.approx(billions, rel=0.01)


def test_packed_rows_cost_what_their_tokens_do() -> None:
    lengths = [8, 16, 4]
    padded, packed = (step_of(LLAMA, lengths, packed=each) for each in (False, True))
    assert (padded.tokens, packed.tokens) == (48, 28)
    assert (padded.pairs, packed.pairs) == (3 * 256, 36 + 136 + 10)
    assert step_of(BERT, lengths, packed=True).pairs == 64 + 256 + 16
    linear = [next(work for work in step.forward if work.kind == "linear layers") for step in (padded, packed)]
    assert linear[1].flops / linear[0].flops == pytest.approx(28 / 48)
    assert packed.optimizer == padded.optimizer
    assert packed.launches == padded.launches
    for gpu in GPUS:
        assert packed.seconds(gpu) < padded.seconds(gpu)


def test_a_kernel_is_held_up_by_the_slower_of_the_two() -> None:
    gpu = Gpu("of the test", tflops=100, bandwidth=2)
    assert Work("product", 1e12, 1e9, 1).seconds(gpu) == pytest.approx(0.01)
    assert Work("norm", 1e9, 1e12, 1).seconds(gpu) == pytest.approx(0.5)


@pytest.mark.parametrize(("rows", "real"), [(16, 0.5), (8, 0.3), (4, 1.0), (32, 0.9)])
def test_rows_fill_the_share_that_is_asked_for(rows: int, real: float) -> None:
    lengths = row_lengths(rows, 1024, real)
    assert len(lengths) == rows
    assert max(lengths) == 1024
    assert sum(lengths) / (rows * 1024) == pytest.approx(real, abs=0.005)


@pytest.mark.parametrize("real", [0.0, 0.05, 1.2, float("nan")])
def test_a_share_that_rows_cannot_have_is_refused(real: float) -> None:
    with pytest.raises(ConfigError, match="expected more than"):
        row_lengths(16, 1024, real)


def test_gradients_leave_in_buckets_of_25_mib() -> None:
    llama = SHAPES[0]
    assert collectives(llama) == -(-llama.parameters * 2 // (25 << 20)) == 613


def test_measured_steps_stand_beside_and_unknown_ones_are_refused() -> None:
    lengths = row_lengths(8, 256, 0.5)
    rows = roofline(lengths, {"BERT-base on H200": {"packed_ms": 12.5}})
    assert [row.measured_packed_ms for row in rows if row.measured_packed_ms] == [12.5]
    with pytest.raises(ConfigError, match="'BERT on H200'"):
        roofline(lengths, {"BERT on H200": {}})


def test_the_page_is_what_the_command_writes(tmp_path: Path) -> None:
    page = tmp_path / "roofline.md"
    found = CliRunner().invoke(app, ["bench", "roofline", "--markdown", str(page), "--json", "-"])
    assert found.exit_code == 0, found.output
    assert page.read_text() == (ROOT / "docs" / "roofline.md").read_text()
    rows = json.loads(found.stdout)["rows"]
    assert len(rows) == len(SHAPES) * len(GPUS)
    assert all(row["packed_ms"] < row["padded_ms"] for row in rows)
