"""`deepytorch profile`: parts that add up, planted waits that are found, scripts that fail, and what is advised."""

from __future__ import annotations

import json
import os
import sys
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest

from deepytorch.profile.advice import RULES, advise
from deepytorch.profile.clock import BETWEEN, Clock, Scope, parts_of
from deepytorch.profile.page import page
from deepytorch.profile.places import OURS, Places
from deepytorch.profile.recorder import Recorder
from deepytorch.profile.records import (
    COMMUNICATION,
    COMPILE,
    COMPUTE,
    LOADER,
    OPTIMIZER,
    REST,
    WAITED,
    Job,
    Part,
    Rank,
    Step,
    read_ranks,
)
from deepytorch.profile.summary import EXPOSED, SLOWER, merge_traces, summarise, waited_for_others
from deepytorch.torch_internals import resolve
from tests.api.headless import Browser, browser
from tests.command_line import run

ROOT = Path(__file__).parents[2]
FORWARD = Part(COMPUTE, "forward", "region 0/0", "packed")


@pytest.fixture(autouse=True)
def _processes_find_this_tree(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.chdir(tmp_path)


# ---------------------------------------------------------------------- scripts

# No module of torch's: nothing is compiled, so that this takes a second.
SLOW_LOADER = """
import sys, time
import torch
class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 14
    def __getitem__(self, index):
        time.sleep(0.02)
        return torch.ones(4)
weight = torch.nn.Parameter(torch.ones(4, 3))
optimizers = [torch.optim.SGD([weight], lr=0.1), torch.optim.SGD([weight], lr=0.1)]
for rows in torch.utils.data.DataLoader(Rows()):
    (rows @ weight).sum().backward()
    time.sleep(0.005)
    for each in optimizers:
        each.step()
        each.zero_grad()
sys.exit(int(sys.argv[1]))
"""


def test_a_slow_loader_in_a_script_that_fails_at_its_end(monkeypatch, capfd):
    Path("train.py").write_text(SLOW_LOADER)
    assert run(monkeypatch, "profile", "--out", "found", "--json", "-", "train.py", "3") == 3
    shown = capfd.readouterr()
    answer = json.loads(shown.out)
    assert answer == json.loads(Path("found/profile.json").read_text())
    assert answer["steps"] == 14  # both optimizers step after the same backward
    assert answer["settled"]
    assert answer["steps_used"] == [2, 3, 4, *range(9, 15)]  # without the first one, and those in the trace
    parts = {(part["group"], part["what"]): part["ms"] for part in answer["parts_ms"]}
    assert sum(parts.values()) == pytest.approx(answer["step_ms"])
    assert parts[LOADER, "next batch"] > 20
    assert parts[REST, BETWEEN.what] > 5
    assert {group for group, _ in parts} == {LOADER, REST, COMPUTE, OPTIMIZER}
    assert "give the DataLoader num_workers=2" in shown.err
    assert "train.py 3 ended with status 3" in shown.err
    trace = json.loads(Path("found/trace.json").read_text())["traceEvents"]
    names = [event["name"] for event in trace if event.get("cat") == "user_annotation"]
    assert [name for name in names if name.startswith("step")] == [f"step {number}" for number in range(5, 9)]
    assert "deepytorch: data loader" in names
    assert Path("found/profile.html").read_text().startswith("<!doctype html>")


@pytest.mark.slow
def test_a_script_is_ended_after_so_many_steps_and_traced_where_asked(monkeypatch, capfd):
    Path("train.py").write_text(SLOW_LOADER)
    assert run(monkeypatch, "profile", "--stop-after", "5", "--steps", "1-2", "train.py", "3") == 0
    answer = json.loads(Path("deepytorch-profile/profile.json").read_text())
    assert answer["steps"] == 5
    assert answer["steps_used"] == [3, 4, 5]
    trace = json.loads(Path("deepytorch-profile/trace.json").read_text())["traceEvents"]
    assert {"step 1", "step 2"} == {event["name"] for event in trace if event["name"].startswith("step ")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ending", "status", "steps"), [("SIGKILL", 137, 13), ("SIGINT", 130, 14), ("SIGTERM", 143, 13)]
)
def test_a_script_that_is_interrupted_or_killed_has_a_profile(monkeypatch, capfd, ending, status, steps):
    Path("train.py").write_text(
        SLOW_LOADER.replace("sys.exit(", f"import os, signal; os.kill(os.getpid(), signal.{ending}) or (")
    )
    assert run(monkeypatch, "profile", "train.py", "0") == status
    answer = json.loads(Path("deepytorch-profile/profile.json").read_text())
    assert answer["steps"] == steps  # the last one is written when it is known that no other optimizer goes on with it
    assert f"train.py 0 ended with status {status}" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("script", "status", "words"),
    [
        ("print('no training')", 2, "made no step of an optimizer of torch.optim"),
        ("raise SystemExit(5)", 5, "ended with status 5 before its first training step"),
    ],
)
def test_a_script_without_a_training_step(monkeypatch, capfd, script, status, words):
    Path("script.py").write_text(script)
    assert run(monkeypatch, "profile", "script.py") == status
    shown = capfd.readouterr()
    assert words in " ".join((shown.out + shown.err).split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["missing.py"], "'missing.py' does not exist"),
        (["--steps", "9-4", "script.py"], "expected two numbers"),
        (["no-such-command"], "no-such-command is no command here"),
    ],
)
def test_what_cannot_be_profiled_is_said_before_anything_runs(monkeypatch, capfd, arguments, words):
    assert run(monkeypatch, "profile", *arguments) == 2
    assert words in " ".join(capfd.readouterr().err.split())


LATE_RANK = """
import os, time
import torch
import deepytorch
from transformers import LlamaConfig, LlamaForCausalLM

deepytorch.configure(options={"lowering": "aot_eager"})
rank = int(os.environ["RANK"])
torch.set_num_threads(1)
torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4)
model = torch.nn.parallel.DistributedDataParallel(LlamaForCausalLM(config))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(24):
    ids = torch.randint(3, 64, (4, 16))
    mask = (torch.arange(16) < torch.tensor([[16], [9], [5], [12]])).long()
    if rank == 1:
        time.sleep(0.1)
    model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_ranks_wait_for_one_that_is_late(monkeypatch, capfd):
    Path("train.py").write_text(LATE_RANK)
    launched = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py"]
    assert run(monkeypatch, "profile", *launched) == 0
    answer = json.loads(Path("deepytorch-profile/profile.json").read_text())
    assert answer["settled"]
    waited = []
    for rank in answer["ranks"]:
        parts = {part["what"]: part["ms"] for part in rank["parts_ms"]}
        assert sum(parts.values()) <= sum(part["ms"] for part in rank["parts_ms"])
        waited.append(parts[SLOWER.what])
    assert waited[0] > 80 > waited[1]
    assert answer["pads"] == pytest.approx(22 / 64)
    assert answer["pads_computed"] == 0.0
    assert {part["form"] for part in answer["parts_ms"] if part["region"]} == {"packed"}
    shown = " ".join(capfd.readouterr().out.split())
    assert "Ranks wait for rank 1" in shown
    assert f"What takes longer there: {BETWEEN.what}" in shown
    trace = json.loads(Path("deepytorch-profile/trace.json").read_text())["traceEvents"]
    names = {event["name"] for event in trace}
    settled = {"read the batch", "pack", "run packed", "unpack", "gradients into buckets", "collective"}
    assert {f"deepytorch: {name}" for name in settled} <= names
    assert {event["pid"] // 1000 for event in trace if event["name"] == "step 8"} <= {0, 1}


# ---------------------------------------------------------------------- the clock, and what it times


def test_each_moment_belongs_to_the_innermost_scope():
    clock, outer, inner = Clock(), Scope(FORWARD), Scope(OURS)
    began = time.perf_counter()
    clock.begin()
    clock.enter(outer)
    time.sleep(0.01)
    clock.enter(inner)
    time.sleep(0.02)
    clock.leave(outer)  # an error has gone through the inner one, which nobody left
    marks = clock.cut()
    whole = time.perf_counter() - began
    outer.part = outer.part._replace(form="padded")
    parts, waits = parts_of(marks)
    assert parts.keys() == {FORWARD._replace(form="padded"), OURS, BETWEEN}
    assert 0.01 <= parts[outer.part] < parts[OURS]
    assert parts[OURS] >= 0.02
    assert sum(parts.values()) == pytest.approx(marks[-1][0] - marks[0][0])
    assert sum(parts.values()) <= whole
    assert waits == []


def test_everything_that_is_timed_is_there(tmp_path, monkeypatch):
    places, asked = Places(Recorder(Job(folder=tmp_path))), []
    monkeypatch.setattr(places, "_around", lambda module, name, make: asked.append(f"{module}.{name}"))
    monkeypatch.setattr(
        places, "_put", lambda owner, name, make: asked.append(f"{owner.__module__}.{owner.__name__}.{name}")
    )
    monkeypatch.setattr("deepytorch.profile.places.wrap_engine_run_backward", lambda make: None)
    places.attach()
    assert len(asked) > 40
    for name in asked:
        assert callable(resolve(name)), name


# ---------------------------------------------------------------------- ranks together


def test_the_last_rank_waits_for_the_transfer_alone():
    assert waited_for_others([[0.5, 0.1], [0.1, 0.3]]) == pytest.approx([0.4, 0.2])
    assert waited_for_others([[0.5, 0.1], [0.2]]) == pytest.approx([0.4, 0.0])  # only sums can be compared
    assert waited_for_others([[], []]) == [0, 0]


def ranks_of(*parts, num_steps=6, **values):
    """One rank for each of these parts in seconds, whose steps are all alike."""
    found = []
    for number, own in enumerate(parts):
        waited = own.pop(Part(COMMUNICATION, WAITED), None)
        steps = []
        for step in range(1, num_steps + 1):
            with_waits = own if waited is None else {**own, Part(COMMUNICATION, WAITED): waited}
            steps.append(Step(step, dict(with_waits), () if waited is None else (waited,), **values))
        found.append(Rank(rank=number, steps=steps, report={"regions": []}, workers=0))
    return found


def test_parts_of_two_ranks_add_up_to_their_steps():
    waited = Part(COMMUNICATION, WAITED)
    ranks = ranks_of({FORWARD: 0.1, waited: 0.06}, {FORWARD: 0.11, BETWEEN: 0.04, waited: 0.01})
    ranks[0].steps[3].settled = False
    ranks[1].steps[4].traced = True
    profile = summarise("train.py", ranks)
    assert (profile.used, profile.settled) == ([2, 3, 6], True)
    assert [means.get(SLOWER) for means in profile.means] == pytest.approx([0.05, 0.0])
    assert [means[EXPOSED] for means in profile.means] == pytest.approx([0.01, 0.01])
    assert profile.seconds == pytest.approx(0.16)
    assert profile.slowest == 1
    (advice,) = [each for each in advise(profile) if each.about == "slower ranks"]
    assert "rank 1" in advice.text
    assert BETWEEN.what in advice.text


def test_steps_that_are_not_settled_are_shown_where_there_are_no_others():
    profile = summarise("train.py", ranks_of({Part(COMPILE, "trace"): 1.0}, num_steps=2, settled=False))
    assert (profile.used, profile.settled) == ([1, 2], False)
    assert "compiling" in [each.about for each in advise(profile)]


def test_a_process_that_was_killed_has_the_steps_that_it_wrote(tmp_path):
    step = Step(1, {FORWARD: 0.25}, (0.5,), positions=8, pads=2)
    lines = [json.dumps({"kind": "rank", "rank": 3, "host": "one"}), json.dumps({"kind": "step", **step.to_json()})]
    (tmp_path / "17.jsonl").write_text("\n".join([*lines, '{"kind": "st']))
    (rank,) = read_ranks(tmp_path)
    assert (rank.rank, rank.host, rank.steps[0].parts) == (3, "one", {FORWARD: 0.25})
    assert rank.trace is None


def test_traces_of_ranks_become_one_on_one_axis(tmp_path):
    ranks = []
    for number in range(2):
        path = tmp_path / f"{number}.trace"
        events = [
            {"ph": "M", "name": "process_name", "pid": 7, "args": {"name": "python"}},
            {"ph": "X", "name": "add", "pid": 7, "tid": 7, "ts": 5.0, "dur": 1.0},
        ]
        path.write_text(json.dumps({"baseTimeNanoseconds": 1000 * number, "traceEvents": events}))
        ranks.append(Rank(rank=number, trace=path))
    assert merge_traces(ranks, tmp_path / "trace.json")
    named, added, named_too, added_too = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert (added["pid"], added_too["pid"]) == (named["pid"], named_too["pid"]) == (0, 1000)
    assert (added["ts"], added_too["ts"]) == (5.0, 6.0)
    assert named_too["args"]["name"].startswith("rank 1: python")
    assert not merge_traces([Rank()], tmp_path / "none.json")


# ---------------------------------------------------------------------- advice, and the page


@pytest.mark.parametrize(
    ("parts", "values", "about", "words"),
    [
        ({FORWARD: 0.9, Part(LOADER, "next batch"): 0.1}, {}, "data loader", "num_workers=2"),
        ({FORWARD: 0.9, OURS: 0.1}, {}, "host", "A larger batch"),
        ({FORWARD: 0.8, Part(OPTIMIZER, "step"): 0.2}, {}, "optimizer", "accumulated gradients"),
        ({FORWARD: 0.8, BETWEEN: 0.2}, {}, "the script", "a loader of its own"),
        ({FORWARD: 0.9, Part(COMMUNICATION, WAITED): 0.1}, {}, "exposed communication", "send_bf16"),
        ({Part(COMPUTE, "forward, first steps in eager"): 1.0}, {}, "in eager", "operator by operator"),
        (
            {FORWARD._replace(form="padded"): 1.0},
            {"positions": 10, "pads": 4, "pads_computed": 4},
            "padding left",
            "about 400.0 ms a step",
        ),
        ({FORWARD: 1.0}, {"num_steps": 20, "settled": False}, "still compiling", "recompiles"),
    ],
)
def test_each_rule_speaks_above_its_threshold(parts, values, about, words):
    (rule,) = [rule for rule in RULES if rule.about == about]
    profile = summarise("train.py", ranks_of(dict(parts), **values))
    assert rule.share(profile) > rule.above
    (advice,) = [each for each in advise(profile) if each.about == about]
    assert words in advice.text


def test_a_step_of_compiled_computation_has_no_advice():
    parts = {FORWARD: 0.96, OURS: 0.02, Part(LOADER, "next batch"): 0.02}
    profile = summarise("train.py", ranks_of(parts, positions=10, pads=4))
    assert advise(profile) == []
    assert "Nothing stands out" in page(profile, None)


def test_padding_that_is_left_comes_with_the_reason_in_the_report():
    ranks = ranks_of({FORWARD: 1.0}, positions=10, pads=4, pads_computed=4)
    region = {"name": "region 0/0", "outcome": "packed", "padded_because": {"pads are looked at": 6}}
    ranks[0].report = {"regions": [{**region, "declined": [], "trials": [], "fallbacks": []}]}
    (advice,) = [each for each in advise(summarise("train.py", ranks)) if each.about == "padding left"]
    assert "region 0/0 (packed): 6 x pads are looked at." in advice.text


@pytest.fixture
def shown():
    """A page of two ranks, with a name in it that HTML has a meaning for."""
    strange = Part(COMPUTE, "forward", "region <0/0> & more", "packed")
    parts = {strange: 0.5, Part(LOADER, "next batch"): 0.2, OURS: 0.3}
    return page(summarise("train.py --name '<b>'", ranks_of(parts, dict(parts))), "trace.json")


def test_the_page_is_whole_and_loads_nothing(shown):
    opened, links = [], []

    class Reader(HTMLParser):
        def handle_starttag(self, tag, attributes):
            self.handle_startendtag(tag, attributes)
            if tag != "meta":
                opened.append(tag)

        def handle_startendtag(self, tag, attributes):
            links.extend(value for name, value in attributes if name in ("src", "href"))

        def handle_endtag(self, tag):
            assert opened.pop() == tag

    Reader().feed(shown)
    assert opened == []
    assert links == ["trace.json"]
    assert "url(" not in shown
    assert "&lt;0/0&gt; &amp; more" in shown
    assert "prefers-color-scheme: dark" in shown


@pytest.mark.skipif(browser() is None, reason="no Chromium or Chrome is installed")
@pytest.mark.parametrize("width", [380, 1000])
def test_a_browser_draws_the_page_in_light_and_dark(shown, width):
    with Browser() as opened:
        colors = []
        for scheme in ("light", "dark"):
            opened.show(shown, width, scheme)
            assert opened.requests == []
            assert opened.value("document.querySelectorAll('rect').length") > 2 * 3
            assert opened.value("document.documentElement.scrollWidth") <= width
            colors.append(opened.value("getComputedStyle(document.body).backgroundColor"))
        assert colors[0] != colors[1]
