"""`deepytorch bench models`: what is built, how numbers are judged, and what a file of lines is good for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from deepytorch.bench.model_classes.batches import IGNORED, Batch, batches_of
from deepytorch.bench.model_classes.catalog import ModelClass, NotBuilt, build_small, forward_arguments, model_classes
from deepytorch.bench.model_classes.judge import judge
from deepytorch.bench.model_classes.page import counts_of, page, reasons_of
from deepytorch.bench.model_classes.run import Line, ModelsOptions, _Server, read_lines, run_models
from deepytorch.bench.model_classes.training import move_by_last_bit, train
from deepytorch.cli import app
from deepytorch.errors import ConfigError, DataError


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
    assert len({each.key for each in found}) == len(found) > 400
    assert [each.name for each in model_classes(("causal",), ("llama",))] == ["LlamaForCausalLM"]
    assert [each.family for each in model_classes(("causal",), ("GPT2LMHeadModel",))] == ["gpt2"]
    with pytest.raises(ConfigError, match="lama3 is no class or family of causal"):
        model_classes(("causal",), ("lama3",))
    with pytest.raises(ConfigError, match='tasks has "cause"'):
        ModelsOptions(out=Path("x"), tasks=("cause",))


COMMAND = ("bench", "models", "--task", "causal,masked", "--lowering", "eager")


def test_two_models_by_the_command_and_only_what_is_new_when_it_runs_again(tmp_path: Path) -> None:
    out, made = tmp_path / "lines.jsonl", tmp_path / "models.md"
    command = [*COMMAND, "--out", str(out), "--page", str(made), "--only"]
    shown = CliRunner().invoke(app, [*command, "OPTForCausalLM"], catch_exceptions=False)
    assert shown.exit_code == 0, shown.output
    [first] = read_lines(out)
    assert (first.outcome, first.how, first.has_mask) == ("equal", "in graph", True)
    assert first.steps[1:] == ["graph"] * 5
    assert first.sides[2:] == ["right", "right", "left", "mixed"]
    assert first.own is not None
    assert 0.0 < first.own < 1e-5
    assert first.versions.keys() >= {"torch", "transformers", "deepytorch"}
    shown = CliRunner().invoke(app, [*command, "OPTForCausalLM", "--only", "YosoForMaskedLM"], catch_exceptions=False)
    assert shown.exit_code == 0, shown.output
    assert "OPTForCausalLM" not in shown.output
    assert "masked: YosoForMaskedLM" in shown.output
    assert len(out.read_text().splitlines()) == 2
    [opt, yoso] = read_lines(out)
    assert opt == first
    assert (yoso.outcome, yoso.how) == ("equal", "declined")
    assert any("FlashAttention" in reason for reason in yoso.reasons)
    assert "| OPTForCausalLM | equal (" in made.read_text()


def test_a_model_that_is_not_over_in_time_is_a_line_and_the_next_one_runs(tmp_path: Path) -> None:
    options = ModelsOptions(out=tmp_path / "lines", tasks=("masked",), only=("bert", "albert"), timeout_s=0.001)
    found = list(run_models(options))
    assert [(line.outcome, line.error) for line in found] == [("eager fails", "not over in 0.001 seconds")] * 2


def test_a_job_that_dies_leaves_the_server_alive(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with _Server() as server:
        given = {"environment": {"DEEPYTORCH": "off"}, "log": str(log), "timeout_s": 60}
        assert server.run(arguments={}, **given) == 1
        assert "KeyError: 'folder'" in log.read_text()
        which = ["masked", "bert", "NoSuchModel"]
        assert server.run(arguments={"folder": str(tmp_path), "part": "eager", "which": which}, **given) == 0
    assert json.loads((tmp_path / "eager.json").read_text())["outcome"] == "not built"


def line(name: str, outcome: str = "equal", how: str = "graph", task: str = "causal", **given) -> Line:
    given = {
        "has_mask": True,
        "sides": [*["right"] * 4, "left"],
        "difference": 1e-7,
        "own": 2e-7,
        "lowering": "eager",
    } | given
    return Line(
        task=task, family="x", name=name, outcome=outcome, steps=["eager", "profiled", how, how, "padded"], **given
    )


def test_a_page_is_made_of_lines() -> None:
    lines = [
        line("A", how="graph"),
        line("B", how="entry", reasons=["not in 3 graphs"]),
        line("C", how="padded", reasons=["C: size 12 | is read"]),
        line("D", how="padded", reasons=["D: size 13 | is read"], has_mask=False),
        line("E", outcome="wrong", how="part", difference=0.5, reasons=["a loop"]),
        line("F", outcome="not built", error="too large"),
        line("G", outcome="fails", how="padded", difference=None, error="ValueError: no"),
        line("H", task="masked", finite=False),
    ]
    rows = counts_of(lines)
    assert rows[0] == ("Causal language models", "7", "6", "4", "1", "1", "1", "1", "1", "3", "40% of 5")
    assert rows[-1] == ("all", "8", "7", "5", "1", "1", "2", "1", "1", "3", "50% of 6")
    assert reasons_of(lines)[0] == ("the class: size N | is read", ["C", "D"])
    made = page(lines, 20)
    assert "8 of 20 classes were run." in made
    assert "| B | equal (1e-07) | 2e-07 | at entry | 0.0 |  |" in made
    assert "| C | equal (1e-07) | 2e-07 | declined | 0.0 | C: size 12 \\| is read |" in made
    assert "| E | wrong (5e-01) | 2e-07 | in part | 0.0 | a loop |" in made
    assert "| F | not built |  |  |  | too large |" in made
    assert "| G | fails | 2e-07 | declined | 0.0 | ValueError: no |" in made
    assert "| H | equal (1e-07) | 2e-07 | in graph | 0.0 | eager's numbers are not all finite |" in made
    assert "## Masked language models" in made
    assert "## Question answering" not in made


def test_the_last_line_of_a_model_counts_and_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    texts = [json.dumps(each.to_json()) for each in (line("A", "wrong"), line("B", task="masked"), line("A"))]
    file.write_text("\n".join(texts))
    assert [(each.name, each.outcome) for each in read_lines(file)] == [("A", "equal"), ("B", "equal")]
    file.write_text("{}\nno JSON")
    with pytest.raises(DataError):
        read_lines(file)
    assert read_lines(tmp_path / "none") == []
