"""Steps back to back: nobody waits in between, and who is left out is named."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import deepytorch
from deepytorch.bench import back_to_back, rivals, unpad_steps
from deepytorch.bench.back_to_back import Clock, Trainee, train_in_turns, trainees
from deepytorch.bench.training_step import ModelSetup, Precision
from deepytorch.bench.unpad import PRECISIONS, UnpadOptions, rows_of
from deepytorch.bench.unpad_steps import measure
from deepytorch.compiler.report import LEDGER
from deepytorch.errors import ConfigError, ParityError

CPU = Precision(torch.device("cpu"))


def regression(value: float = 1.0) -> tuple[Trainee, list[str]]:
    """A model of one weight on two batches, and what is done in its order."""
    said: list[str] = []
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, value)

    def loss(batch):
        said.append("step")
        return model(batch["x"]).square().mean()

    setup = ModelSetup("regression", model, loss)
    return trainees({"it": setup}, {"it": [{"x": torch.ones(2, 1)}, {"x": torch.ones(3, 1)}]})["it"], said


def test_every_step_is_timed_and_none_waits_for_the_one_before(monkeypatch):
    events = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing
            self.number = len(events)
            events.append("marked")

        def record(self, stream):
            assert stream == "the current one"

        def synchronize(self):
            events.append(f"waited for {self.number}")

        def elapsed_time(self, end):
            return 1000.0 * (end.number - self.number)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the current one")
    clock = Clock(torch.device("cuda"))
    for _ in range(4):
        clock.mark()
    assert clock.seconds() == [1.0, 1.0, 1.0]
    assert events == ["marked"] * 4 + ["waited for 3"]


def test_a_pass_trains_on_every_batch_and_moves_the_weights():
    trainee, said = regression()
    seconds = trainee.train(CPU)
    assert len(seconds) == 2
    assert all(each > 0 for each in seconds)
    assert said == ["step", "step"]
    assert 0.99 < trainee.setup.model.weight.item() < 1.0


def test_a_pass_in_which_something_compiled_is_run_again(monkeypatch):
    compilations = iter([0, 1, *[1] * 6])  # before and after each step: the first of the first pass compiles
    monkeypatch.setattr(back_to_back, "num_compilations", lambda: next(compilations))
    trainee, said = regression()
    assert len(trainee.train(CPU)) == 2
    assert said == ["step"] * 4


def test_a_loss_that_is_not_a_number_ends_it():
    trainee, _ = regression(torch.nan)
    with pytest.raises(ParityError, match="The loss in regression is nan"):
        trainee.train(CPU)


def test_passes_take_turns_after_one_that_is_not_timed():
    (one, said), (other, others) = regression(), regression()
    told = []
    seconds = train_in_turns({"one": one, "other": other}, 3, CPU, told.append)
    assert {name: [len(times) for times in batches] for name, batches in seconds.items()} == {
        "one": [3, 3],
        "other": [3, 3],
    }
    assert said == others == ["step"] * 8
    assert [text.rpartition(", ")[2] for text in told[2:]] == ["one", "other", "other", "one", "one", "other"]


def test_setups_with_the_same_model_share_its_optimizer():
    setup = regression()[0].setup
    made = trainees({"a": setup, "b": setup}, {"a": [], "b": []})
    assert made["a"].optimizer is made["b"].optimizer


# ---------------------------------------------------------------- the whole measurement


@pytest.mark.slow
def test_back_to_back_measures_grouped_rows_too_and_says_what_it_does_not(job, monkeypatch):
    monkeypatch.setattr(rivals, "find_spec", lambda name: None)
    found = {row.key["setup"]: row for row in rows_of(measure(job(back_to_back=True)))}
    assert set(found) == {"eager", "inductor", "deepytorch", "handpacked", "grouped"}
    assert {name for name, row in found.items() if row.series} == {"eager", "inductor", "handpacked"}
    assert "ratio" in found["grouped"].figures
    texts = found["deepytorch"].texts
    assert texts["timing"] == "back to back"
    assert texts["not measured"] == "flattened, flash-attn and liger-kernel not installed"
    assert found["deepytorch"].figures["loss_rel_diff"] < 1e-6  # compared before any weight has moved
    tokens = [row.figures["tokens_per_s"] * row.figures["step_s"] for row in found.values()]
    assert tokens == pytest.approx(tokens[:1] * 5)  # every setup has trained on as many


@pytest.mark.slow
def test_packed_steps_train_without_a_recompile(job, monkeypatch):
    monkeypatch.delitem(vars(deepytorch), "report")  # its own counters
    LEDGER.forget()
    made = unpad_steps.compiled_setup

    def operator_by_operator(name, model, backend, loss="model"):
        if backend != "deepytorch":
            return made(name, model, backend, loss)
        compiled = torch.compile(model, backend=backend, options={"lowering": "aot_eager"})
        return ModelSetup(name, model, lambda batch: compiled(**batch).loss)

    monkeypatch.setattr(unpad_steps, "compiled_setup", operator_by_operator)
    monkeypatch.setattr(unpad_steps, "start_compiler", lambda *_: None)
    found = {row.key["setup"]: row.figures for row in rows_of(measure(job(backend="deepytorch", back_to_back=True)))}
    ours = found["deepytorch"]
    passes = 4  # the first, the compared one, one that is not timed, one that is
    # one was watched
    assert (ours["steps_packed"], ours["steps_padded"], ours["recompiles"]) == (passes * 2 - 1, 0, 0)
    assert ours["loss_rel_diff"] < 1e-5
    assert ours["grad_rel_diff"] < 1e-4


def test_one_by_one_names_what_it_leaves_out(job):
    found = unpad_steps.rivals_not_run(job("bert"), CPU)
    assert set(found) == {"handpacked", "flattened", "grouped"}
    assert UnpadOptions(device="cuda:1").trains
    assert not UnpadOptions().trains


def test_weights_in_bf16_run_without_autocast(job):
    precision = Precision.parse("cpu", *PRECISIONS["bf16"])
    setups = unpad_steps.build_setups(job(precision="bf16"), precision)
    assert {each.dtype for setup in setups.values() for each in setup.model.parameters()} == {torch.bfloat16}
    with precision.autocast():
        assert not torch.is_autocast_enabled("cpu")
    with Precision.parse("cpu", *PRECISIONS["mixed"]).autocast():
        assert torch.is_autocast_enabled("cpu")


def test_weights_in_another_dtype_than_the_steps_are_refused():
    with pytest.raises(ConfigError, match="weights is bf16 and dtype fp32"):
        Precision.parse("cpu", "float32", "bfloat16")
