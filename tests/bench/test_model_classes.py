"""`deepytorch bench models`: what is built, how numbers are judged, and what a file of lines is good for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from deepytorch.bench.benchmark import Cell, Place, Setup
from deepytorch.bench.model_classes import worker
from deepytorch.bench.model_classes.batches import IGNORED, Batch, batches_of
from deepytorch.bench.model_classes.benchmark import ModelJob, Models, ModelsOptions
from deepytorch.bench.model_classes.catalog import ModelClass, NotBuilt, build_small, forward_arguments, model_classes
from deepytorch.bench.model_classes.judge import judge
from deepytorch.bench.model_classes.tables import counts_of, reasons_of, tables_of
from deepytorch.bench.model_classes.training import move_by_last_bit, train
from deepytorch.bench.results import Results, Row, read_result
from deepytorch.bench.table import markdown_of
from deepytorch.errors import ConfigError, ParityError
from tests.command_line import run


class Rows(torch.nn.Module):
    """A model by tokens alone, or one whose forward lets a bit of each row into the next one."""

    def __init__(self, mixes: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = torch.nn.Embedding(100, 8), torch.nn.Linear(8, 100)
        self.mixes = mixes

    def forward(self, input_ids, attention_mask, labels):
        hidden = self.embed(input_ids)
        hidden = hidden + self.mixes * hidden.roll(1, 0)
        logits = self.head(hidden)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
        return {"loss": loss, "logits": logits}


def batches() -> list[Batch]:
    class Config:
        pad_token_id, is_encoder_decoder = 0, False

    return batches_of("masked", Config(), ("input_ids", "attention_mask", "labels"))


def runs(mixes: float):
    moved = Rows()
    move_by_last_bit(moved)
    return train(Rows(), batches()), train(moved, batches()), train(Rows(mixes), batches())


def test_a_model_that_mixes_rows_is_wrong_however_little_and_the_same_one_is_equal() -> None:
    same = judge(*runs(0.0))
    assert same.is_equal
    assert same.difference == 0.0
    for mixes in (1.0, 1e-3):
        found = judge(*runs(mixes))
        assert not found.is_equal
        assert found.allowed < 1e-3
        assert found.difference > 10 * found.own


def test_what_eager_is_sensitive_to_is_allowed_ten_times() -> None:
    def step(value: float) -> list[dict[str, torch.Tensor]]:
        return [{"loss": torch.tensor(value)}]

    assert judge(step(1.0), step(1.01), step(1.09)).is_equal
    assert not judge(step(1.0), step(1.01), step(1.11)).is_equal
    assert not judge(step(1.0), step(1.0), step(1.0001)).is_equal
    assert judge(step(1.0), step(1.0), step(1.000001)).is_equal


def test_missing_gradients_and_numbers_that_are_not_finite_are_wrong() -> None:
    eager, moved, ours = runs(0.0)
    name = next(name for name in ours[1] if name.startswith("gradient"))
    gradient = ours[1].pop(name)
    found = judge(eager, moved, ours)
    assert (found.is_equal, found.what) == (False, f"{name}, step 2")
    ours[1][name] = torch.full_like(gradient, torch.nan)
    assert not judge(eager, moved, ours).is_equal
    ours[1][name] = gradient
    ours[0]["gradient of another"] = gradient
    assert not judge(eager, moved, ours).is_equal
    for numbers in (eager, moved, ours):
        numbers[0]["gradient of another"] = torch.full_like(gradient, torch.nan)
    assert judge(eager, moved, ours).is_equal


def test_batches_have_rows_of_uneven_lengths_and_no_label_at_a_pad() -> None:
    model = build_small(ModelClass("causal", "llama", "LlamaForCausalLM"))
    found = batches_of("causal", model.config, forward_arguments(model))
    assert [each.side for each in found] == [*["right"] * 4, "left", "mixed"]
    for batch in found:
        mask, labels = batch.mask, batch.arguments["labels"]
        assert len(set(mask.sum(1).tolist())) == len(mask)
        assert torch.equal(batch.arguments["attention_mask"], mask.long())
        assert (labels[~mask] == IGNORED).all()
        assert (labels[:, 1:][~mask[:, :-1]] == IGNORED).all()  # what is told from a pad
        assert (labels != IGNORED).sum() > 20
    assert found[4].mask[:, -1].all()
    assert not found[4].mask[:, 0].all()
    assert found[5].mask[0, 0]
    assert found[5].mask[1, -1]
    assert [each.side for each in batches_of("token", model.config, ())] == ["right"] * 4


def test_models_are_small_and_keep_each_kind_of_their_layers() -> None:
    for task, family, name, kinds in (
        ("causal", "qwen3_next", "Qwen3NextForCausalLM", {"linear_attention", "full_attention"}),
        ("causal", "gemma3_text", "Gemma3ForCausalLM", {"sliding_attention", "full_attention"}),
        ("question", "distilbert", "DistilBertForQuestionAnswering", set()),
        ("seq2seq", "t5", "T5ForConditionalGeneration", set()),
    ):
        model = build_small(ModelClass(task, family, name))
        assert sum(each.numel() for each in model.parameters()) < 1_000_000
        assert set(getattr(model.config, "layer_types", None) or ()) == kinds
        assert not any(each.p for each in model.modules() if isinstance(each, torch.nn.Dropout))
        assert model.training
    with pytest.raises(NotBuilt, match="AttributeError"):
        build_small(ModelClass("causal", "llama", "NoSuchModel"))


def test_classes_are_listed_once_a_task_and_found_by_class_or_family() -> None:
    found = model_classes()
    assert len({(each.task, each.name) for each in found}) == len(found) > 400
    assert [each.name for each in model_classes(("causal",), ("llama",))] == ["LlamaForCausalLM"]
    assert [each.family for each in model_classes(("causal",), ("GPT2LMHeadModel",))] == ["gpt2"]
    with pytest.raises(ConfigError, match="lama3 is no class or family of causal"):
        model_classes(("causal",), ("lama3",))
    with pytest.raises(ConfigError, match='task has "cause"'):
        ModelsOptions(task=("cause",))


def test_models_by_the_command_two_at_a_time_and_none_of_them_again(monkeypatch, capsys, tmp_path: Path) -> None:
    out = tmp_path / "models.json"
    command = [
        "bench",
        "models",
        "--lowering",
        "eager",
        "--out",
        str(out),
        "--only",
        "OPTForCausalLM,CpmAntForCausalLM",
    ]
    assert run(monkeypatch, *command, "--task", "causal", "--jobs", "2") == 0
    assert "causal: OPTForCausalLM" in capsys.readouterr().out
    results = read_result(Results, out)
    opt, cpm = (results.having(**{"class": name})[0] for name in ("OPTForCausalLM", "CpmAntForCausalLM"))
    texts, figures = opt.texts, opt.figures
    assert opt.key == {"task": "causal", "class": "OPTForCausalLM"}
    assert (texts["outcome"], texts["where"], texts["notes"]) == ("equal", "in graph", "")
    assert texts["steps"].split()[1:] == ["graph"] * 5
    assert texts["sides"].split()[2:] == ["right", "right", "left", "mixed"]
    assert 0.0 < figures["own_rel_diff"] < 1e-5
    assert figures["rel_diff"] <= figures["allowed_rel_diff"]
    assert figures["eager_s"] + figures["import_s"] < figures["processes_s"]
    assert results.versions.keys() >= {"torch", "transformers"}
    assert (cpm.texts["outcome"], cpm.texts["where"]) == ("equal", "declined")
    assert "no attention was found" in cpm.texts["reasons"]
    with monkeypatch.context() as patch:
        patch.setattr("deepytorch.bench.run.Ranks", None)  # nothing is started
        assert run(patch, *command) == 0
    assert read_result(Results, out).rows == results.rows
    assert run(monkeypatch, *command, "--lowering", "inductor") == 2
    assert "lowering eager, asked for lowering inductor" in " ".join(capsys.readouterr().err.split())


def test_a_model_that_is_late_or_dies_or_is_not_built_is_a_row(tmp_path: Path) -> None:
    """A limit below 0 is an error of the process."""
    found = {}
    for name, limit in (("BertForMaskedLM", 0.001), ("NoSuchModel", 60), ("AlbertForMaskedLM", -1)):
        job = ModelJob(models=(("masked", "bert", name),), lowering=None, limit=limit, scratch=tmp_path)
        setups = [Setup(name="eager", job=job), Setup(name="deepytorch", job=replace(job, lowering="eager"))]
        cell = Cell(key={"task": "masked"}, setups=setups, place=Place(), rows=[name], row_key="class")
        answers = {each.name: [worker.run(each.job, None)] for each in setups}
        [made] = Models().rows(ModelsOptions(), cell, answers)
        assert made.key == {"task": "masked", "class": name}
        found[name] = made.texts["outcome"], made.texts["error"].partition(":")[0]
    assert found == {
        "BertForMaskedLM": ("eager fails", "not over in 0.001 seconds"),
        "NoSuchModel": ("not built", "AttributeError"),
        "AlbertForMaskedLM": ("eager fails", "exit status 1"),
    }


def row(name: str, outcome: str = "equal", where: str = "in graph", task: str = "causal", **given: Any) -> Row:
    texts = {
        "outcome": outcome,
        "where": where,
        "notes": "",
        "reasons": "",
        "error": "",
        "deepytorch": "0.1, commit 1a2b",
    }
    texts |= {key: value for key, value in given.items() if isinstance(value, str)}
    figures = {"rel_diff": 1e-7, "own_rel_diff": 2e-7, "listed": 20.0}
    figures = {key: value for key, value in (figures | given).items() if isinstance(value, float)}
    return Row(key={"task": task, "class": name}, figures=figures, texts=texts)


ROWS = [
    row("A"),
    row("B", where="at entry", reasons="not in 3 graphs"),
    row("C", where="declined", reasons="C: size 12 | is read\nC: size 14 | is read\na loop"),
    row("D", where="declined", reasons="D: size 13 | is read", notes="no attention mask"),
    row("E", outcome="wrong", where="in part", rel_diff=0.5, reasons="a loop"),
    row("F", outcome="not built", error="too large"),
    row("G", outcome="fails", where="declined", rel_diff=None, error="ValueError: no"),
    row("H", task="masked", notes="eager's numbers are not all finite"),
]


def test_tables_are_made_of_rows() -> None:
    counts = counts_of(ROWS)
    assert counts[0] == ("causal", "7", "6", "4", "1", "1", "1", "1", "1", "3", "5", "40%")
    assert counts[-1] == ("all", "8", "7", "5", "1", "1", "2", "1", "1", "3", "6", "50%")
    assert reasons_of(ROWS)[:2] == [("a loop", ["C", "E"]), ("the class: size N | is read", ["C", "D"])]
    results = Results(
        benchmark="models", command="", options={"lowering": "eager"}, machine="", versions={}, date="", rows=ROWS
    )
    made = "\n".join(line for table in tables_of(results) for line in markdown_of(table))
    assert "8 of 20 classes were run. Lowering eager, fp32, one thread; deepytorch 0.1, commit 1a2b." in made
    assert "|  | causal | masked | all |" in made
    assert "| with a mask | 5 | 1 | 6 |" in made
    assert "at least 1e-05 (loss), 2e-05 (output), 1e-04 (gradient), 1e-04 (weight)" in made
    assert "| B | equal (1e-07) | 2e-07 | at entry | 0.0 |  |" in made
    assert "| D | equal (1e-07) | 2e-07 | declined | 0.0 | no attention mask; D: size 13 \\| is read |" in made
    assert "| E | wrong (5e-01) | 2e-07 | in part | 0.0 | a loop |" in made
    assert "| F | not built |  |  |  | too large |" in made
    assert "| G | fails | 2e-07 | declined | 0.0 | ValueError: no |" in made
    assert "| H | equal (1e-07) | 2e-07 | in graph | 0.0 | eager's numbers are not all finite |" in made
    assert "**Masked language models**" in made
    assert "Question answering" not in made
    with pytest.raises(ParityError, match="with the import alone: E, G"):
        Models().verdict(results)
