"""`deepytorch bench comm`: right figures in known columns, wrong results counted, choices explained."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepytorch.bench import collectives
from deepytorch.bench import run as running
from deepytorch.bench.choices import settings
from deepytorch.bench.comm import Comm, CommOptions, parse_sizes
from deepytorch.bench.comm_patterns import TILE, Buffers, Pattern
from deepytorch.bench.comm_show import bus_factor, itemsize_of, limit
from deepytorch.bench.jobs import DTYPES, OPS
from deepytorch.bench.launch import Ranks
from deepytorch.bench.results import Results, Row, read_result
from deepytorch.bench.run import run_benchmark
from deepytorch.comm.algorithms.base import Choice
from deepytorch.errors import ConfigError, DeepytorchError, ParityError
from tests.bench.trained import results
from tests.command_line import run
from tests.processes import children_of, is_running

ROOT = Path(__file__).parents[2]
GLOO = Row(
    key={
        "op": "all_reduce",
        "dtype": "float32",
        "redop": "sum",
        "ranks": 4,
        "hosts": 1,
        "rate": None,
        "flow_rate": None,
        "bytes": 4096,
        "setup": "gloo",
    },
    figures={
        "time_us": 20.0,
        "first_quartile_us": 20.0,
        "third_quartile_us": 20.0,
        "algbw_gb_per_s": 0.2048,
        "busbw_gb_per_s": 0.3072,
        "wrong": 0,
        "iterations": 7,
        "copy_gb_per_s": 4.0,
        "gloo_ratio": 1.0,
        "copy_efficiency": 0.1024,
        "predicted_us": 30.0,
    },
    texts={"algorithm": "default"},
)


def options(**changes: Any) -> CommOptions:
    """Gloo alone, as short as it gets."""
    return CommOptions(**{"backends": ("gloo",), "sizes": "1K", "rounds": 2, "min_time_ms": 2.0} | changes)


def result(*rows: Row) -> Results:
    return results("comm", rows)


def changed(row: Row, figures: dict[str, float] | None = None, **key: Any) -> Row:
    return replace(row, key=row.key | key, figures=row.figures | (figures or {}))


@pytest.mark.parametrize(
    "text, sizes",
    [
        ("1K:8K", (1024, 2048, 4096, 8192)),
        ("1K:64K:4", (1024, 4096, 16384, 65536)),
        ("1K:7K", (1024, 2048, 4096)),
        ("512,3M, 1GiB", (512, 3 << 20, 1 << 30)),
        ("1kb:2kb,2K,64", (1024, 2048, 64)),
    ],
)
def test_sizes_are_ranges_factors_and_lists(text, sizes):
    assert parse_sizes(text) == sizes


@pytest.mark.parametrize("text", ["", "1X", "0", "8K:1K", "1K:2K:1", "1K:2K:x", "1:2:3:4", "5G", "-1K", "1.5K"])
def test_sizes_that_make_no_sense_are_refused(text):
    with pytest.raises(ConfigError, match="size"):
        parse_sizes(text)


def test_each_setup_has_a_name_of_its_own() -> None:
    groups = CommOptions(
        backends=("deepytorch", "gloo", "gloo"),
        algorithms=("auto", "shared_memory"),
        compress=("none", "bf16"),
        allocated=True,
    ).groups()
    assert [group.name for group in groups] == [
        "deepytorch",
        "deepytorch+allocated",
        "deepytorch+bf16",
        "deepytorch+bf16+allocated",
        "deepytorch:shared_memory",
        "deepytorch:shared_memory+allocated",
        "deepytorch:shared_memory+bf16",
        "deepytorch:shared_memory+bf16+allocated",
        "gloo",
        "gloo#2",
    ]
    assert {group.algorithm for group in groups} == {None, "shared_memory"}


@pytest.mark.parametrize(
    "wrong",
    [
        {"ranks": 1},
        {"ranks": 0},
        {"rounds": 0},
        {"min_time_ms": 0.0},
        {"min_time_ms": math.nan},
        {"rate": "200mbit"},
        {"ops": ("reduce",)},
        {"ops": ()},
        {"sizes": "1X"},
        {"backends": ("nccl",)},
        {"backends": ("deepytorch", "deepytorch")},
        {"dtype": "fp32"},
        {"redop": "prod"},
        {"redop": "avg", "dtype": "int32"},
        {"algorithms": ("shared_memory",)},
        {"backends": ("deepytorch",), "algorithms": ("magic",)},
        {"backends": ("deepytorch",), "compress": ("fp4",)},
        {"explain": True},
        {"backends": ("deepytorch",), "explain": True, "ops": ("barrier",)},
    ],
)
def test_options_that_cannot_be_run_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"expected|give|take|add|differ|leave"):
        options(**wrong)


def test_each_rank_has_as_many_elements_and_at_least_one() -> None:
    cells = Comm().cells(options(ranks=3, ops=("broadcast", "reduce_scatter"), redop="avg", sizes="1,4,4096"))
    assert [(cell.key["op"], cell.key["redop"], cell.key["bytes"]) for cell in cells] == [
        *(("broadcast", "none", 12), ("broadcast", "none", 4092)),
        *(("reduce_scatter", "avg", 12), ("reduce_scatter", "avg", 4092)),
    ]
    assert [cell.setups[0].job.count for cell in cells] == [3, 1023, 3, 1023]
    assert all(itemsize_of(name) == getattr(torch, name).itemsize for name in DTYPES)


# What goes in and what has to come out


def _exchange(pattern: Pattern, op: str, count: int) -> list[Buffers]:
    """Fill the buffers of every rank and carry `op` out in one process, in wide numbers."""
    ranks = pattern.ranks
    sides = {"reduce_scatter": (count, count // ranks), "all_gather": (count // ranks, count)}.get(op, (count, count))
    buffers = []
    for rank in range(ranks):
        output = torch.full((sides[1],), 77, dtype=pattern.dtype)
        shared = op in ("all_reduce", "broadcast")
        buffers.append(Buffers(output if shared else torch.empty(sides[0], dtype=pattern.dtype), output))
        pattern.fill(buffers[-1], rank)
    inputs = torch.stack([each.input for each in buffers]).double()
    reduced = {"sum": inputs.sum(0), "avg": inputs.mean(0), "min": inputs.amin(0), "max": inputs.amax(0)}[pattern.redop]
    for rank, each in enumerate(buffers):
        if op == "all_reduce":
            each.output.copy_(reduced)
        elif op == "reduce_scatter":
            each.output.copy_(reduced.chunk(ranks)[rank])
        elif op == "all_to_all":
            each.output.copy_(torch.cat([one.chunk(ranks)[rank] for one in inputs]))
        else:
            each.output.copy_(inputs.flatten() if op == "all_gather" else inputs[0])
    return buffers


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("redop", ["sum", "min", "max", "avg"])
def test_right_results_are_exact_in_every_dtype(dtype, redop):
    if redop == "avg" and not getattr(torch, dtype).is_floating_point:
        pytest.skip("an average of whole numbers is none")
    for ranks in (2, 3, 8):
        pattern = Pattern(getattr(torch, dtype), redop, ranks)
        for op in OPS:
            buffers = _exchange(pattern, op, 24 * 5_000)
            assert [pattern.num_wrong(op, each, rank) for rank, each in enumerate(buffers)] == [0] * ranks


def test_every_wrong_element_is_counted():
    pattern = Pattern(torch.float32, "sum", 2)
    (first, _) = _exchange(pattern, "all_reduce", 3 * TILE + 10)
    first.output[[0, 5, TILE, 3 * TILE + 9]] += 1
    first.output[7] = math.nan
    assert pattern.num_wrong("all_reduce", first, 0) == 5


def test_a_nan_in_an_average_that_is_compared_with_a_tolerance_is_wrong():
    pattern = Pattern(torch.bfloat16, "avg", 3)
    (first, *_) = _exchange(pattern, "all_reduce", 999)
    first.output[7] = math.nan
    first.output[8] += 40
    assert pattern.num_wrong("all_reduce", first, 0) == 2


@pytest.mark.parametrize("op", [op for op in OPS if op != "barrier"])
def test_a_chunk_at_another_place_and_the_result_of_an_earlier_run_show(op):
    pattern = Pattern(torch.float32, "sum", 4)
    each = _exchange(pattern, op, 1 << 18)[1]
    each.output.copy_(each.output.roll(1 << 14))
    assert pattern.num_wrong(op, each, 1) > 0.9 * each.output.numel()
    each = _exchange(pattern, op, 1 << 18)[1]
    pattern.fill(each, 1)  # and nothing else happens
    assert pattern.num_wrong(op, each, 1) > 0.9 * each.output.numel()


def test_compressed_values_survive_a_half_type():
    pattern = Pattern(torch.float32, "sum", 2, compressed=True)
    for each in _exchange(pattern, "all_reduce", TILE):
        assert torch.equal(each.output, each.output.bfloat16().float())


def test_more_ranks_than_a_dtype_counts_are_refused():
    with pytest.raises(ConfigError, match="wider dtype"):
        Pattern(torch.int8, "sum", 128)


# Figures, columns, tables


def test_bus_bandwidth_is_as_in_nccl_tests() -> None:
    assert bus_factor("all_reduce", 4) == 1.5
    assert bus_factor("all_gather", 4) == bus_factor("reduce_scatter", 4) == 0.75
    assert bus_factor("broadcast", 4) == 1.0


def test_figures_are_of_the_slowest_rank_and_of_the_median_round() -> None:
    asked = options(backends=("deepytorch", "gloo"), ranks=2, sizes="4K")
    (cell,) = Comm().cells(asked)

    def rank(*seconds: float, copied: float, wrong: int = 0) -> dict[str, Any]:
        ours = {
            "seconds": [each / 4 for each in seconds],
            "wrong": 0,
            "algorithm": "shared_memory",
            "predicted_us": 6.0,
        }
        theirs = {"seconds": list(seconds), "wrong": wrong, "algorithm": "default"}
        return {"copy_gb_per_s": copied, "iterations": 7, "groups": {"deepytorch": ours, "gloo": theirs}}

    ranks = [rank(10e-6, 20e-6, 30e-6, copied=3.0), rank(9e-6, 16e-6, 40e-6, copied=5.0, wrong=2)]
    ours, gloo = Comm().rows(asked, cell, {"comm": ranks})
    assert gloo.figures == pytest.approx(
        {
            "time_us": 20.0,
            "first_quartile_us": 15.0,
            "third_quartile_us": 30.0,
            "algbw_gb_per_s": 0.2048,
            "busbw_gb_per_s": 0.2048,
            "wrong": 2,
            "iterations": 7,
            "copy_gb_per_s": 4.0,
            "gloo_ratio": 1.0,
            "copy_efficiency": 0.1024,
        }
    )
    assert (ours.figures["gloo_ratio"], ours.figures["predicted_us"]) == pytest.approx((4.0, 6.0))
    assert (ours.key["setup"], ours.texts) == ("deepytorch", {"algorithm": "shared_memory"})
    assert Comm().rows(asked, cell, {}) == []


def test_lines_have_the_columns_of_nccl_tests() -> None:
    ours = changed(GLOO, {"time_us": 5.0, "gloo_ratio": 4.0}, setup="deepytorch")
    head = Comm().head([ours, GLOO])
    assert head[0] == "all_reduce, 4 ranks"
    assert head[1].split() == [
        *("setup", "algorithm", "size", "count", "type", "redop", "root", "time", "algbw", "busbw", "#wrong"),
        *("gloo's", "time"),
    ]
    first, second = Comm().lines([ours, GLOO])
    assert second.split() == [
        *("gloo", "default", "4096", "1024", "float32", "sum", "-1", "20.0", "0.2048", "0.3072", "0", "1.00x"),
    ]
    assert first.split()[-1] == "4.00x"
    assert first.index("float32") == second.index("float32") == head[1].index("type") - 3
    assert Comm().lines([changed(GLOO, op="all_gather")])[0].split()[3] == "256"
    assert Comm().lines([changed(GLOO, op="broadcast")])[0].split()[6] == "0"
    assert Comm().lines([Row(key=GLOO.key, failed="it was killed")]) == ["gloo it was killed"]


def test_a_table_has_a_line_for_each_size_and_its_findings() -> None:
    ours = changed(GLOO, {"time_us": 5.0, "gloo_ratio": 4.0, "copy_efficiency": 0.4}, setup="deepytorch")
    larger = Row(key=GLOO.key | {"bytes": 1 << 20}, failed="it was killed")
    (table,) = Comm().tables(result(ours, GLOO, larger))
    assert table.columns == ("size (B)", "deepytorch", "vs gloo", "gloo", "runs")
    assert table.rows == (("4,096", "5.0", "4.00x", "20.0", "default"), ("1,048,576", "", "", "it was killed", ""))
    assert "Every element was right." in table.notes[1]
    assert "4.0 GB/s a rank, 16.0 GB/s in all" in table.notes[2]
    assert "off by 275%" in table.notes[3]  # 30 us for 5, and for 20
    assert table.notes[4].endswith("deepytorch 0.40, gloo 0.10.")


def test_limits_are_what_the_bytes_allow() -> None:
    assert limit("all_reduce", 4, 1, None, 4.0)[0] == 2.0
    assert limit("reduce_scatter", 4, 1, None, 4.0)[0] == 3.2
    assert limit("all_reduce", 4, 2, "200mbit", 4.0)[0] == pytest.approx(0.025)
    assert limit("all_reduce", 8, 4, "200mbit", 4.0)[0] == pytest.approx(0.025 / 1.5)
    assert limit("all_gather", 4, 2, "200mbit", 4.0)[0] == pytest.approx(0.05)
    assert limit("all_reduce", 4, 2, None, 4.0) == (None, "")
    (plot,) = Comm().plots(result(GLOO, changed(GLOO, bytes=1 << 20)))
    assert [(points.name, points.y) for points in plot.series] == [
        ("gloo", (0.2048, 0.2048)),
        ("limit: copy bandwidth of memory", (2.0, 2.0)),
    ]


def test_wrong_elements_are_an_error_which_says_what_is_wrong(monkeypatch, capsys, tmp_path) -> None:
    Comm().verdict(result(GLOO))
    with pytest.raises(DeepytorchError, match=r"1 rows were not measured. The first: it was killed\."):
        Comm().verdict(result(GLOO, Row(key={"op": "all_reduce"}, failed="it was killed")))
    spoilt = result(GLOO, changed(GLOO, {"wrong": 3}), changed(GLOO, {"wrong": 1}, setup="deepytorch"))
    words = "3 elements of all_reduce with 4096 bytes in gloo are wrong.*; 1 other rows"
    with pytest.raises(ParityError, match=words):
        Comm().verdict(spoilt)
    monkeypatch.setattr(running, "run_benchmark", lambda *given: spoilt)
    assert run(monkeypatch, "bench", "comm", "--out", str(tmp_path / "comm.json")) == 2
    shown = capsys.readouterr()
    assert "vs gloo" in shown.out
    assert "Error: 3 elements of all_reduce" in shown.err


def test_choices_are_rows_with_every_algorithm_or_its_reason() -> None:
    asked = options(backends=("deepytorch",), explain=True, compress=("none", "bf16"), sizes="1K,1M")
    exact, half = Comm().cells(asked)
    reasons = {"hierarchical": "needs several hosts"}
    found = [
        {"chosen": chosen, "predicted_us": {"engine": time_us, "shared_memory": 20.0}, "reasons": reasons}
        for chosen, time_us in (("shared_memory", 50.0), ("engine", 1234.5))
    ]
    rows = Comm().rows(asked, exact, {"comm": [{"measured": False, "sizes": found}] * 2})
    rows += Comm().rows(asked, half, {"comm": [{"measured": False, "sizes": found}] * 2})
    assert Comm().head(rows) == Comm().lines(rows) == Comm().plots(result(*rows)) == []
    (table,) = Comm().tables(result(*rows))
    assert table.columns == ("size (B)", "setup", "engine", "shared_memory", "chosen")
    assert table.rows[:2] == (
        ("1,024", "deepytorch", "50", "20", "shared_memory"),
        ("1,048,576", "deepytorch", "1,234", "20", "engine"),
    )
    assert [row[1] for row in table.rows[2:]] == ["deepytorch+bf16"] * 2
    assert table.notes[0] == "hierarchical: needs several hosts"
    assert table.notes[-1] == "Predicted from links nominal: the native code is not built."
    failed = Row(key={**exact.key, "setup": "deepytorch"}, failed="it was killed")
    assert "it was killed" in Comm().tables(result(failed, *rows))[0].rows[0]
    assert Comm().tables(result(failed))[0].rows == (("", "it was killed", "", ""),)
    assert settings(Choice("hierarchical", 1 << 18, 2, "bf16"), 1 << 20) == "hierarchical, 4 chunks, 2 streams, bf16"


# Runs


@pytest.mark.parametrize("is_built", [False, True])
def test_a_wait_for_the_compiler_is_told(monkeypatch: pytest.MonkeyPatch, is_built: bool) -> None:
    said: list[str] = []
    found = SimpleNamespace(is_built=lambda: is_built, load=lambda: said.append("loaded"))
    monkeypatch.setattr(collectives, "native", found)
    collectives.build_native(said.append)
    assert is_built or (said[0].startswith("compiling the C++") and said[1:] == ["loaded"])
    assert bool(said) != is_built


RANK_SCRIPT = """
import os, sys
sys.path.insert(0, {root!r})
from deepytorch.bench import collectives
from deepytorch.bench.worker import main
rank, run_collective = int(os.environ["RANK"]), collectives.run_collective
{preparation}

def collective(op, buffers, redop, group):
{body}

collectives.run_collective = collective
main()
"""


@pytest.fixture
def ranks_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Return a function that says what ranks do for a collective."""

    def make(body: str = "run_collective(op, buffers, redop, group)", preparation: str = "") -> None:
        script = tmp_path / "rank.py"
        parts = {"body": textwrap.indent(textwrap.dedent(body), "    "), "preparation": textwrap.dedent(preparation)}
        script.write_text(RANK_SCRIPT.format(root=str(ROOT), **parts))
        monkeypatch.setattr(running, "Ranks", partial(Ranks, command=(sys.executable, str(script))))

    return make


@pytest.mark.slow
def test_two_ranks_are_measured_on_this_machine(monkeypatch, capsys, tmp_path) -> None:
    out = tmp_path / "comm.json"
    given = ("--backends", "gloo,gloo", "--sizes", "1K:64K:8", "--ops", "all_reduce,all_gather", "--dtype", "bfloat16")
    given += ("--rounds", "2", "--min-time-ms", "4", "--out", str(out))
    assert run(monkeypatch, "bench", "comm", *given) == 0
    rows = read_result(Results, out).rows
    assert [(row.key["op"], row.key["setup"], row.key["bytes"]) for row in rows] == [
        (op, setup, size)
        for op in ("all_reduce", "all_gather")
        for size in (1024, 8192, 65536)
        for setup in ("gloo", "gloo#2")
    ]
    for row in rows:
        algbw = row.figures["algbw_gb_per_s"]
        assert algbw == pytest.approx(row.key["bytes"] / row.figures["time_us"] / 1e3)
        assert row.figures["busbw_gb_per_s"] == pytest.approx(algbw * (1 if row.key["op"] == "all_reduce" else 0.5))
        assert (row.failed, row.figures["wrong"]) == ("", 0)
    shown = capsys.readouterr().out
    assert shown.count("#wrong") == 2
    assert shown.count("Every element was right.") == 2
    before = out.read_text()
    assert run(monkeypatch, "bench", "comm", *given) == 0  # all is there
    assert json.loads(out.read_text())["rows"] == json.loads(before)["rows"]


@pytest.mark.slow
def test_explained_choices_measure_no_collective_and_leave_no_file(monkeypatch, capsys, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, "bench", "comm", "--explain", "--sizes", "1M") == 0
    shown = capsys.readouterr().out
    assert "shared_memory" in shown
    assert "hierarchical: needs several hosts" in shown
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_setups_of_deepytorch_get_their_options_and_tell_what_ran(ranks_do) -> None:
    ranks_do(
        preparation="""
        import types
        import torch
        import torch.distributed as dist
        from deepytorch import comm
        from deepytorch.comm.group import backend

        asked = {}

        def create(given, options):
            group = dist.ProcessGroupGloo(given.store, given.group_rank, given.group_size, given.timeout)
            asked[given.group_id] = f"{options.algorithm or 'chosen'} {options.compress}"
            return group

        def chosen(group, op, num_bytes):
            return types.SimpleNamespace(algorithm=f"{asked[group.group_name]} {op} {num_bytes}")

        backend.create = create
        comm.chosen = chosen
        comm.allocate = lambda num_bytes, group: torch.empty(num_bytes, dtype=torch.uint8)
        """
    )
    several = {"backends": ("deepytorch", "gloo"), "algorithms": ("auto", "streams"), "compress": ("none", "bf16")}
    rows = run_benchmark(Comm(), options(**several, allocated=True)).rows
    assert [row.texts.get("algorithm") for row in rows[:-1:2]] == [
        f"{algorithm} {compress} all_reduce 1024" for algorithm in ("chosen", "streams") for compress in (None, "bf16")
    ]
    assert sum(row.figures["wrong"] for row in rows) == 0


@pytest.mark.slow
def test_wrong_results_are_counted(ranks_do) -> None:
    ranks_do("run_collective(op, buffers, redop, group)\nif rank == 1:\n    buffers.output[:3] += 1")
    (row,) = run_benchmark(Comm(), options()).rows
    assert row.figures["wrong"] == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "reason", "words"),
    [
        (
            "if rank == 1:\n    raise ValueError('no such luck')\nrun_collective(op, buffers, redop, group)",
            "ValueError: no such luck",
            "Rank 1 of 2 of comm failed at: all_reduce, 1024 bytes: first check. ValueError: no such luck. All ranks",
        ),
        (
            "os.kill(os.getpid(), 9) if rank == 1 else __import__('time').sleep(60)",
            "was ended by SIGKILL, as the system does when it is out of memory",
            "Rank 1 of 2 of comm was ended by SIGKILL",
        ),
    ],
    ids=["an error", "a kill"],
)
def test_ranks_that_fail_are_a_row_for_each_setup_which_says_why(ranks_do, capsys, body, reason, words) -> None:
    ranks_do(body)
    rows = run_benchmark(Comm(), options(backends=("gloo", "gloo"))).rows
    assert [(row.key["setup"], row.failed) for row in rows] == [("gloo", reason), ("gloo#2", reason)]
    assert words in capsys.readouterr().err


@pytest.mark.slow
def test_ranks_that_stand_still_are_ended(ranks_do) -> None:
    ranks_do("__import__('time').sleep(600)")
    (row,) = run_benchmark(Comm(), options(), timeout_s=30.0).rows  # long enough for a start
    assert row.failed == "stood still for 30 s at: all_reduce, 1024 bytes: first check"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_whatever_ends_the_command_ends_its_ranks(tmp_path, number) -> None:
    command = [sys.executable, "-c", "from deepytorch.cli import main; main()", "bench", "comm"]
    given = ["--backends", "gloo", "--min-time-ms", "1e6"]
    bench = subprocess.Popen(
        [*command, *given, "--out", str(tmp_path / "comm.json")],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    while len(ranks := children_of(bench.pid)) < 2:
        assert time.monotonic() < deadline, "the benchmark has started nothing"
        time.sleep(0.1)
    time.sleep(5.0)  # in which they begin to measure
    bench.send_signal(number)
    assert bench.wait(timeout=60) != 0
    deadline = time.monotonic() + 10
    while any(map(is_running, ranks)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(is_running, ranks))
    if number != signal.SIGKILL:
        assert list(tmp_path.glob("deepytorch-bench-*")) == []


@pytest.mark.slow
@pytest.mark.lab
def test_simulated_hosts_are_measured_within_their_rate() -> None:
    given = options(hosts=2, ranks=1, rate="200mbit", sizes="1M", min_time_ms=50.0)
    (row,) = run_benchmark(Comm(), given).rows
    assert (row.key["hosts"], row.key["rate"], row.figures["wrong"]) == (2, "200mbit", 0)
    assert 0.5 < row.figures["algbw_gb_per_s"] / limit("all_reduce", 2, 2, "200mbit", 1.0)[0] < 1.1
