"""`deepytorch gpu-check`: its checks hold where all is well, and find what is wrong. They run on the CPU here."""

from __future__ import annotations

import json
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from deepytorch.cli import main
from deepytorch.errors import ConfigError, DataError
from deepytorch.gpu_check import page, records
from deepytorch.gpu_check.checks import attention, checks_on, loss, models
from deepytorch.gpu_check.figures.timing import in_words
from deepytorch.gpu_check.isolated import next_group, run_groups
from deepytorch.gpu_check.outcome import Failed
from deepytorch.gpu_check.packages import missing, packages_from
from deepytorch.gpu_check.plan import whole_seconds
from deepytorch.gpu_check.run import Options, gpu_check, plan_of, selected, work_of
from deepytorch.gpu_check.sources import digest_of
from tests.api import checks_that_go_wrong
from tests.api.checks_that_go_wrong import SLOW_CHECKS, STOPPED_CHECKS, TIMED_CHECKS, WRONG_CHECKS

CPU = torch.device("cpu")
WORKER = (sys.executable, checks_that_go_wrong.__file__)
DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("options", loss.KINDS.values(), ids=loss.KINDS.keys())
def test_the_loss_is_as_near_as_eagers(dtype, options):
    assert "off by" in loss.loss_is_right(CPU, dtype, options)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("options", attention.KINDS.values(), ids=attention.KINDS.keys())
def test_attention_is_as_near_as_eagers(dtype, options):
    assert "off by" in attention.attention_is_right(CPU, dtype, options)


def test_a_wrong_loss_fails(monkeypatch):
    right = loss.linear_cross_entropy
    monkeypatch.setattr(loss, "linear_cross_entropy", lambda *given, **named: right(*given, **named) * 1.001)
    with pytest.raises(Failed, match="loss is off by"):
        loss.loss_is_right(CPU, "fp32", {})


def test_wrong_attention_fails(monkeypatch):
    right = attention.varlen_attention
    wrong = lambda *given, **named: right(*given, **{**named, "scale": 0.126})  # noqa: E731
    monkeypatch.setattr(attention, "varlen_attention", wrong)
    with pytest.raises(Failed, match="output is off by"):
        attention.attention_is_right(CPU, "fp32", {"window_right": 0})


def test_failures_come_first_whatever_ends_a_process_and_a_second_call_makes_what_is_left(tmp_path):
    options = Options(device="cpu", results=tmp_path / "results.json")
    found = gpu_check(work_of(options, WRONG_CHECKS), options, worker=WORKER)
    assert [each.passed for each in found] == [False] * 5 + [None] * 2 + [True] * 4
    by_name = {(each.group, each.name): each for each in found}
    assert {name: each.passed for name, each in by_name.items()} == {
        ("fine", "first"): True, ("fine", "cannot"): None, ("fine", "wrong"): False, ("fine", "raises"): False,
        ("crashes", "ends"): False, ("crashes", "behind it"): True,
        ("hangs", "stands still"): False, ("hangs", "behind it"): True,
        ("breaks", "illegal"): False, ("breaks", "behind it"): True,
        ("absent: a rival", "wants it"): None,
    }  # fmt: skip
    assert by_name["fine", "first"].figures == {"step_ms": 2.0}
    said = {name: each.said for (_, name), each in by_name.items() if not each.passed}
    assert said["cannot"] == "no such device"
    assert said["wrong"] == "twice as much"
    assert said["raises"].startswith("RuntimeError: out of memory")
    assert "was ended by SIGSEGV" in said["ends"]
    assert "last words of a kernel" in said["ends"]
    assert "was not over within 1 s" in said["stands still"]
    assert "an illegal memory access" in said["illegal"]
    assert said["wants it"] == "no_such_package not installed; --packages takes a folder of them"
    # behind an error that leaves the device unusable another process goes on
    assert by_name["breaks", "behind it"].said != "the process that broke it"

    [row, *_] = page.report_table("", found).rows
    assert row[0] == "failed"
    assert "\ndeepytorch gpu-check --only" in row[3]
    unmade = [replace(each, group="one", passed=None, said="no time") for each in found[:2]]
    assert page.report_table("", unmade).rows == (("not made", "one", "2 checks", "no time", ""),)
    work = work_of(options, WRONG_CHECKS)
    assert work.num_known == 4
    assert {check.name for check in work.checks} == {
        "cannot", "wrong", "raises", "ends", "stands still", "illegal", "wants it"
    }  # fmt: skip
    assert work.checks[-1].group == "absent: a rival", "what failed comes first"
    assert len(work_of(replace(options, again=True), WRONG_CHECKS).checks) == len(WRONG_CHECKS)
    # other sources, and other versions
    other = [replace(check, module="deepytorch.errors") for check in WRONG_CHECKS]
    assert work_of(options, other).num_known == 0
    changed = [replace(each, versions="torch 1.0") for each in work.known.checks]
    records_of_before = replace(work.known, checks=changed)
    (tmp_path / "older.json").write_text(_json(records_of_before))
    assert work_of(replace(options, results=tmp_path / "older.json"), WRONG_CHECKS).num_known == 0


def _json(results):
    return json.dumps(results.to_json())


def test_what_is_known_stays_where_a_later_run_cannot_make_it(tmp_path):
    options = Options(device="cpu", results=tmp_path / "results.json")
    [check] = [each for each in WRONG_CHECKS if each.name == "first"]
    gpu_check(work_of(options, [check]), options, worker=WORKER)
    absent = replace(check, needs=("no_such_package",))
    [outcome] = gpu_check(work_of(replace(options, again=True), [absent]), options, worker=WORKER)
    assert outcome.passed is None
    assert [each.passed for each in work_of(options, [check]).known.checks] == [True]


def test_results_of_another_device_are_refused(tmp_path):
    path = tmp_path / "results.json"
    path.write_text(_json(records.DeviceResults(device="NVIDIA H100", capability="9.0", memory_gb=79, checks=[])))
    with pytest.raises(ConfigError, match="holds results of NVIDIA H100, and this is cpu: give another --results"):
        work_of(Options(device="cpu", results=path), WRONG_CHECKS)
    path.write_text("{}")
    with pytest.raises(DataError, match="lacks"):
        work_of(Options(device="cpu", results=path), WRONG_CHECKS)


def test_what_is_over_is_kept_when_it_is_stopped(tmp_path):
    options = Options(device="cpu", results=tmp_path / "results.json")

    def stop(outcome):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        gpu_check(work_of(options, STOPPED_CHECKS), options, stop, worker=WORKER)
    work = work_of(options, STOPPED_CHECKS)
    assert [each.name for each in work.known.checks] == ["at once"]
    assert [check.name for check in work.checks] == ["hangs"]


def test_what_is_timed_runs_alone_and_last_by_the_process_that_prepared_it():
    found = {(each.group, each.name): each for each in run_groups(TIMED_CHECKS, "cpu", 120, worker=WORKER)}
    assert [each.passed for each in found.values()] == [True] * len(TIMED_CHECKS)
    spans = {name: tuple(map(float, each.said.split()[:2])) for (_, name), each in found.items()}
    first, timed = spans.pop("before all"), (spans.pop("alone"), spans.pop("timed"))
    assert all(first[1] <= begin for begin, _ in spans.values())
    assert all(end <= begin for _, end in spans.values() for begin, _ in timed)
    assert timed[0][1] <= timed[1][0] or timed[1][1] <= timed[0][0]
    assert found["y, prepared", "timed"].said.endswith("True")


class Waits:
    def __init__(self, is_first=False, is_timed=False, prepares_s=0.0):
        self.is_first, self.is_timed, self.prepares_s = is_first, is_timed, prepares_s


def test_most_check_what_is_right_and_some_prepare_what_is_timed_the_longest_first():
    first, right, short, long = Waits(is_first=True), Waits(), Waits(is_timed=True), Waits(False, True, 9.0)
    assert next_group([right, first], []) is first
    assert next_group([right, first], [right]) is None
    assert next_group([right], [first]) is None
    waiting = [right, short, long]
    assert next_group(waiting, [right] * 4, 8) is right
    assert next_group(waiting, [right] * 5, 8) is long
    assert next_group(waiting, [right] * 8, 8) is None
    assert next_group([short, long], [right], 8) is long
    assert next_group(waiting, [right], 2) is right
    assert next_group([], [], 8) is None


def test_what_is_not_over_in_time_is_told_as_not_made():
    found = list(run_groups(SLOW_CHECKS, "cpu", 1.0, worker=WORKER))
    assert [(each.passed, each.said) for each in found] == [(None, "not over within 1 s")] * 2


def test_a_process_that_cannot_begin_is_told_for_each_of_its_checks():
    worker = (sys.executable, "-c", "raise SystemExit('no torch here')")
    found = list(run_groups(SLOW_CHECKS, "cpu", 30, worker=worker))
    assert [each.passed for each in found] == [False, False]
    assert all("ended with status 1" in each.said and "no torch here" in each.said for each in found)


def test_a_group_that_there_is_not_is_refused():
    with pytest.raises(ConfigError, match="no group 'speeed'; expected some of: machine code; linear"):
        selected(Options(device="cpu", only=["speeed"]))


def test_checks_are_chosen_by_subject_group_or_name_and_figures_left_out_where_it_has_to_be_quick():
    def groups(**options):
        return list(dict.fromkeys(check.group for check in selected(Options(device="cpu", **options))))

    assert groups(only=["parity"]) == ["parity: llama", "parity: bert", "parity: t5"]
    assert groups(only=["attention: fp16", "packing"]) == ["attention: fp16", "packing"]
    [check] = selected(Options(device="cpu", only=["attention: fp16/fp16, bias"]))
    assert check.key == ("attention: fp16", "fp16, bias")
    assert groups(quick=True)
    assert not [name for name in groups(quick=True) if name.startswith(("speed", "step", "packed step"))]
    keys = [check.key for check in checks_on("cpu")]
    assert len(set(keys)) == len(keys)


def test_a_timed_check_that_is_left_is_prepared_again():
    options = Options(device="cpu", only=["packed step: deepytorch"])
    before = selected(options)
    outcomes = [records.dated(check, check.outcome(True, "", 1.0)) for check in before[:-1]]
    assert before[-1].is_timed
    known = replace(records.of_device("cpu"), checks=outcomes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deepytorch.gpu_check.run.read_results", lambda path, fresh: known)
        left = work_of(replace(options, results=Path("some"))).checks
    assert [check.name for check in left] == ["first step", before[-1].name]


def test_a_digest_changes_with_all_that_a_module_imports(tmp_path, monkeypatch):
    root = tmp_path / "deepytorch"
    (root / "csrc").mkdir(parents=True)
    (root / "one.py").write_text("def f():\n    from deepytorch.two import x\n")
    (root / "two.py").write_text("NAMES = {'a': 'deepytorch.native:f'}\n")
    (root / "native.py").write_text("")
    (root / "csrc" / "it.cpp").write_text("int a;")
    (root / "other.py").write_text("")
    monkeypatch.setattr("deepytorch.gpu_check.sources._ROOT", root)

    def now():
        from deepytorch.gpu_check import sources

        sources._imported.cache_clear()
        return digest_of.__wrapped__("deepytorch.one")

    before = now()
    (root / "other.py").write_text("a = 1")
    assert now() == before
    (root / "csrc" / "it.cpp").write_text("int b;")
    assert (after := now()) != before
    (root / "two.py").write_text("")
    assert now() not in (before, after)


def test_kernels_sources_are_those_of_their_subject():
    assert digest_of("deepytorch.gpu_check.checks.loss") != digest_of("deepytorch.gpu_check.checks.packing")


def test_the_whole_plan_fits_where_eight_groups_run_together():
    plan, seconds = plan_of(Options(results=DOCS / "results" / "gpu-h100.json"))
    assert {"loss_is_right", "attention_is_right"} <= {each.check.run.func.__name__ for each in plan}
    assert any(each.measured for each in plan)
    assert seconds > 0
    assert whole_seconds(plan, 8) < 480
    assert whole_seconds(plan, 1) > whole_seconds(plan, 8)


def test_packages_come_from_wheels_and_folders(tmp_path):
    with zipfile.ZipFile(tmp_path / "a_rival-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("a_rival_of_ours/__init__.py", "")
    (tmp_path / "another_rival_of_ours").mkdir()
    (tmp_path / "another_rival_of_ours" / "__init__.py").write_text("")
    needs = ("a_rival_of_ours", "another_rival_of_ours")
    assert (
        missing(needs) == "a_rival_of_ours and another_rival_of_ours not installed; --packages takes a folder of them"
    )
    with packages_from(tmp_path):
        assert missing(needs) is None
    assert missing(needs) is not None
    with pytest.raises(ConfigError, match="no folder"), packages_from(tmp_path / "nowhere"):
        pass


def test_the_page_is_what_the_result_files_say(tmp_path):
    made = tmp_path / "gpu.md"
    made.write_text((DOCS / "gpu.md").read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / "results").symlink_to(DOCS / "results")
    page.rewrite(made, checks_on("cuda"))
    text = made.read_text(encoding="utf-8")
    assert text == (DOCS / "gpu.md").read_text(encoding="utf-8"), "deepytorch gpu-check --page docs/gpu.md"
    assert "21.42" in text
    made.write_text("no such part")
    with pytest.raises(ConfigError, match="has no part between"):
        page.rewrite(made, [])


def test_devices_have_short_names():
    names = ("NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA A100-SXM4-80GB", "NVIDIA GeForce RTX 4090", "Tesla V100")
    assert [records.short_name(name) for name in names] == ["H100", "H200", "A100", "GeForce-RTX-4090", "V100"]
    assert records.short_name("NVIDIA H100 80GB HBM3 MIG 1g.10gb") == "H100-80GB-HBM3-MIG-1g.10gb"


def test_figures_in_words():
    figures = {"step_ms": 21.416, "tflop_per_s": 603.2, "peak_mb": 2165.9, "limit_efficiency": 0.61, "calls": 3300.0}
    assert in_words(figures) == "21.4 ms, 603 TFLOP/s, peak 2,166 MB, 61 % of the limit, calls 3,300"


def command(monkeypatch, *arguments):
    """Run the command line in this process; return its exit status."""
    monkeypatch.setattr(sys, "argv", ["deepytorch", "gpu-check", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    return end.value.code


def test_the_command_shows_a_plan(monkeypatch, capsys):
    assert command(monkeypatch, "--device", "cpu", "--plan", "--only", "packing") == 0
    shown = capsys.readouterr().out
    assert "facts of 5 rows of 61" in shown
    assert "s are expected of 480 s" in shown


def test_the_command_says_what_is_over_when_it_is_stopped(monkeypatch, capsys, tmp_path):
    def stops(work, options, told, notify):
        told(work.checks[0].outcome(False, "wrong\nin line 7", 1.0))
        raise KeyboardInterrupt

    monkeypatch.setattr("deepytorch.gpu_check.run.gpu_check", stops)
    results, out = tmp_path / "results.json", tmp_path / "out.json"
    given = ("--device", "cpu", "--results", str(results), "--json", str(out))
    assert command(monkeypatch, *given, "--only", "packing") == 130
    shown = capsys.readouterr().out
    assert "Stopped: the same command goes on from here." in shown
    assert "in line 7" in shown
    assert [each["said"] for each in json.loads(out.read_text())["checks"]] == ["wrong\nin line 7"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_no_gpu_is_said():
    with pytest.raises(ConfigError, match="no CUDA device"):
        work_of(Options())


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.timeout(900, func_only=True)
def test_models_train_as_eager_does():
    for model in models.MODELS:
        assert "off by" in models.trains_as_eager(CPU, model, "fp32")
