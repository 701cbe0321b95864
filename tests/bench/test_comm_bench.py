"""`deepytorch bench comm`: right figures in known columns, wrong results counted, and no process left behind."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from deepytorch.bench.comm import Described, describe_ranks, ranks_of_host, ratios, run_comm, torchrun_shape
from deepytorch.bench.comm_launch import RankError
from deepytorch.bench.comm_options import CommOptions, parse_sizes
from deepytorch.bench.comm_patterns import TILE, Buffers, Pattern
from deepytorch.bench.comm_schema import (
    DTYPES,
    OPS,
    CommCell,
    CommRatio,
    CommResult,
    CommSummary,
    bus_factor,
    read_comm_result,
)
from deepytorch.bench.comm_show import explain_lines, limit, refuse_wrong, table_head, table_rows
from deepytorch.bench.comm_worker import CopyBandwidth
from deepytorch.bench.options import names
from deepytorch.bench.results import decoded, write_json
from deepytorch.comm.algorithms.base import Choice
from deepytorch.comm.topology.cost import Links
from deepytorch.comm.topology.host import Host
from deepytorch.comm.topology.topology import Topology
from deepytorch.errors import ConfigError, DataError, ParityError
from tests.command_line import run

ROOT = Path(__file__).parents[2]
PNG = b"\x89PNG\r\n\x1a\n"

CELL = CommCell(
    op="all_reduce",
    backend="gloo",
    algorithm="default",
    dtype="float32",
    redop="sum",
    bytes=4096,
    ranks=4,
    hosts=1,
    time_us=20.0,
    time_us_quartiles=[18.0, 20.0, 23.0],
    algbw=0.2048,
    busbw=0.3072,
    wrong=0,
    arm="gloo",
    compress=None,
    allocated=False,
    iterations=7,
)
OURS = replace(CELL, backend="deepytorch", algorithm="shared_memory", arm="deepytorch", time_us=5.0, algbw=0.8192)
SUMMARY = CommSummary(
    ratios=[CommRatio(op="all_reduce", arm="gloo", bytes=4096, ratio_vs_gloo=1.0, copy_efficiency=0.1)],
    machine="x86_64, 2 CPUs",
    torch_version="2.13.0",
    copy_gb_per_s_rank=4.0,
    copy_gb_per_s_total=16.0,
    link_bit_per_s=None,
    flow_bit_per_s=None,
    rounds=5,
    min_time_ms=100.0,
)


def options(**changes) -> CommOptions:
    """Gloo alone, as short as it gets."""
    small = {"backends": ("gloo",), "sizes_bytes": (1024,), "rounds": 2, "min_time_ms": 2.0, "timeout_s": 60.0}
    return CommOptions(**small | changes)


RANK_SCRIPT = """
import os, sys, time
from pathlib import Path

sys.path.insert(0, {root!r})
rank = int(os.environ["RANK"])
Path({folder!r}, f"pid{{rank}}").write_text(str(os.getpid()))
from deepytorch.bench.comm_worker import main, run_collective
{preparation}

def collective(op, buffers, redop, group):
{body}

main(collective)
"""


@pytest.fixture
def worker(tmp_path):
    """Return a maker of a rank's command: `body` is what it does for a collective; it leaves its process id behind."""

    def make(body: str = "run_collective(op, buffers, redop, group)", preparation: str = "") -> tuple[str, str]:
        script = tmp_path / "rank.py"
        parts = {"body": textwrap.indent(textwrap.dedent(body), "    "), "preparation": textwrap.dedent(preparation)}
        script.write_text(RANK_SCRIPT.format(root=str(ROOT), folder=str(tmp_path), **parts))
        return sys.executable, str(script)

    return make


@pytest.fixture
def ranks_left(tmp_path):
    """Return a function that gives the process ids of the ranks that still run, once 2 seconds have passed at most."""

    def left() -> list[int]:
        pids = [int(file.read_text()) for file in tmp_path.glob("pid*")]
        assert pids, "no rank was started"
        deadline = time.monotonic() + 2
        while any(map(_runs, pids)) and time.monotonic() < deadline:
            time.sleep(0.02)
        return [pid for pid in pids if _runs(pid)]

    return left


def _runs(pid: int) -> bool:
    with contextlib.suppress(OSError):
        os.kill(pid, 0)
        stat = Path(f"/proc/{pid}/stat")
        return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"  # ended, not yet waited for
    return False


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


def test_each_arm_has_a_name_of_its_own():
    arms = CommOptions(
        backends=("deepytorch", "gloo", "gloo"),
        algorithms=("auto", "shared_memory"),
        compress=("none", "bf16"),
        allocated=True,
    ).arms()
    assert [arm.name for arm in arms] == [
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
    assert {arm.algorithm for arm in arms} == {"auto", "shared_memory"}


@pytest.mark.parametrize(
    "wrong",
    [
        {"ranks": 1},
        {"ranks": 0},
        {"rounds": 0},
        {"min_time_ms": 0.0},
        {"timeout_s": math.nan},
        {"rate": "200mbit"},
        {"ops": ("reduce",)},
        {"ops": ()},
        {"backends": ("nccl",)},
        {"backends": ("deepytorch", "deepytorch")},
        {"dtype": "fp32"},
        {"redop": "prod"},
        {"redop": "avg", "dtype": "int32"},
        {"algorithms": ("shared_memory",)},
        {"backends": ("deepytorch",), "algorithms": ("magic",)},
        {"backends": ("deepytorch",), "compress": ("fp4",)},
    ],
)
def test_options_that_cannot_be_run_are_refused(wrong):
    with pytest.raises(ConfigError, match=r"expected|give|take|add|its arms"):
        options(**wrong)


def test_torchrun_names_the_ranks(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert torchrun_shape() is None
    assert ranks_of_host(None, 1, None) == 2
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ConfigError, match="WORLD_SIZE"):
        torchrun_shape()
    monkeypatch.setenv("WORLD_SIZE", "6")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert torchrun_shape() == (3, 2)
    assert ranks_of_host(None, 1, (3, 2)) == 3
    with pytest.raises(ConfigError, match="leave --ranks"):
        ranks_of_host(2, 1, (3, 2))


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


# Figures, columns, files


def test_bus_bandwidth_is_as_in_nccl_tests():
    assert bus_factor("all_reduce", 4) == 1.5
    assert bus_factor("all_gather", 4) == bus_factor("reduce_scatter", 4) == 0.75
    assert bus_factor("broadcast", 4) == 1.0


def test_rows_have_the_columns_of_nccl_tests():
    head = table_head("all_reduce", options(ranks=4))
    assert head[0] == "all_reduce, 4 ranks"
    columns = head[1].split()
    assert columns == [
        *("arm", "algorithm", "size", "count", "type", "redop", "root", "time", "algbw", "busbw", "#wrong"),
        *("gloo's", "time"),
    ]
    ours, gloo = table_rows([OURS, CELL], options(ranks=4, backends=("deepytorch", "gloo")))
    assert gloo.split() == [
        *("gloo", "default", "4096", "1024", "float32", "sum", "-1", "20.0", "0.2048", "0.3072", "0", "1.00x"),
    ]
    assert ours.split()[-1] == "4.00x"
    assert len({line.index("float32") for line in (ours, gloo)}) == 1
    share, _ = table_rows([replace(CELL, op="all_gather", redop="none"), CELL], options(ranks=4))
    assert share.split()[3] == "256"
    assert table_rows([replace(CELL, op="broadcast")], options())[0].split()[6] == "0"
    assert not table_rows([OURS], options())[0].endswith("x")


def test_ratios_are_against_gloo_of_the_same_size_and_against_a_copy():
    larger = replace(CELL, bytes=8192, time_us=30.0)
    found = ratios([OURS, CELL, replace(CELL, arm="gloo#2", time_us=40.0), larger], CopyBandwidth(4.0, 16.0))
    assert [ratio.ratio_vs_gloo for ratio in found] == [4.0, 1.0, 0.5, 1.0]
    assert found[0].copy_efficiency == pytest.approx(2 * 0.8192 / 4.0)
    (alone,) = ratios([replace(OURS, op="broadcast")], CopyBandwidth(4.0, 16.0))
    assert (alone.ratio_vs_gloo, alone.copy_efficiency) == (None, None)
    assert ratios([replace(CELL, hosts=2)], CopyBandwidth(4.0, 16.0))[0].copy_efficiency is None


def test_limits_are_what_the_bytes_allow():
    assert limit("all_reduce", 4, 1, SUMMARY)[0] == 2.0
    assert limit("reduce_scatter", 4, 1, SUMMARY)[0] == 3.2
    shaped = replace(SUMMARY, link_bit_per_s=200e6)
    assert limit("all_reduce", 4, 2, shaped)[0] == pytest.approx(0.025)
    assert limit("all_reduce", 8, 4, shaped)[0] == pytest.approx(0.025 / 1.5)
    assert limit("all_gather", 4, 2, shaped)[0] == pytest.approx(0.05)
    assert limit("all_reduce", 4, 2, SUMMARY) == (None, "")


def test_a_result_is_the_same_after_writing_and_reading(tmp_path):
    result = CommResult(cells=[CELL, OURS], summary=SUMMARY)
    write_json(tmp_path / "result.json", result.to_json())
    assert read_comm_result(tmp_path / "result.json") == result
    content = json.loads((tmp_path / "result.json").read_text())
    assert set(content["cells"][0]) >= {
        *("op", "backend", "algorithm", "dtype", "redop", "bytes", "ranks", "hosts", "time_us", "time_us_quartiles"),
        *("algbw", "busbw", "wrong"),
    }
    assert content["summary"]["ratios"][0]["ratio_vs_gloo"] == 1.0


@pytest.mark.parametrize(
    "wrong",
    [
        {"op": "reduce"},
        {"dtype": "fp32"},
        {"redop": None},
        {"bytes": 0},
        {"time_us": 0.0},
        {"time_us_quartiles": [1.0, 2.0]},
        {"time_us_quartiles": [3.0, 2.0, 1.0]},
    ],
)
def test_values_that_no_run_gives_are_refused(wrong):
    with pytest.raises(DataError, match=f"^{next(iter(wrong))} of the cell is "):
        replace(CELL, **wrong)


def test_wrong_elements_end_the_command_with_what_is_wrong():
    refuse_wrong(CommResult(cells=[CELL], summary=SUMMARY))
    spoilt = CommResult(cells=[CELL, replace(CELL, wrong=3), replace(OURS, wrong=1)], summary=SUMMARY)
    with pytest.raises(
        ParityError, match=r"3 elements of all_reduce with 4096 bytes in gloo are wrong.*; 1 other cells"
    ):
        refuse_wrong(spoilt)


def topology_of(hosts: int) -> Topology:
    host = Host("a", 2)
    return Topology(tuple(replace(host, id=str(number)) for number in range(hosts)), (*range(hosts), *range(hosts)))


def test_explain_shows_every_algorithm_or_its_reason():
    asked = options(backends=("deepytorch", "gloo"), sizes_bytes=parse_sizes("1K:64M:256"), ops=OPS[:2])
    lines = explain_lines(asked, Described(topology_of(1), None, None))
    assert lines[0] == "all_reduce, 2 ranks on 1 host, float32"
    assert {"engine", "shared_memory", "chosen"} <= set(lines[1].split())
    assert [line.split()[0] for line in lines[2:5]] == ["1024", "262144", "67108864"]
    assert any(line.startswith("  hierarchical: needs several hosts") for line in lines)
    assert "reduce_scatter, 2 ranks on 1 host, float32" in lines
    assert lines[-1].endswith("nominal speeds: the native code is not built.")


def test_explain_shows_what_the_backend_does_in_truth():
    asked = options(backends=("deepytorch",), hosts=2, compress=("none", "bf16"), sizes_bytes=(1 << 20,))
    ours = Choice("hierarchical", 1 << 18, 2, "bf16")
    chosen = {"none": {"all_reduce": [Choice("engine")]}, "bf16": {"all_reduce": [ours]}}
    lines = explain_lines(asked, Described(topology_of(2), Links(), chosen))
    rows = [line for line in lines if line.split()[:1] == ["1048576"]]
    assert [row.rpartition("   ")[2] for row in rows] == ["engine", "hierarchical, 4 chunks, 2 streams, bf16"]
    assert "all_reduce, 4 ranks on 2 hosts, float32, bf16 allowed between hosts" in lines


def test_explain_needs_a_backend_that_chooses():
    with pytest.raises(ConfigError, match="deepytorch is what chooses"):
        describe_ranks(options())


# Runs


def command_line(*arguments: str, **more) -> subprocess.CompletedProcess[str]:
    code = "from deepytorch.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, "bench", "comm", *arguments],
        **{"cwd": ROOT, "capture_output": True, "text": True, "timeout": 120, "check": False} | more,
    )


@pytest.mark.slow
def test_two_ranks_are_measured_on_this_machine(tmp_path):
    done = command_line(
        *("--backends", "gloo,gloo", "--sizes", "1K:64K:8", "--op", "all_reduce,all_gather", "--dtype", "bfloat16"),
        *("--rounds", "2", "--min-time-ms", "4", "--json", "-", "--plot", str(tmp_path / "plot.png")),
    )
    assert done.returncode == 0, done.stderr
    result = decoded(CommResult, json.loads(done.stdout))
    shape = [(cell.op, cell.arm, cell.bytes) for cell in result.cells]
    sizes = (1024, 8192, 65536)
    assert shape == [
        (op, arm, size) for op in ("all_reduce", "all_gather") for size in sizes for arm in ("gloo", "gloo#2")
    ]
    assert {(cell.ranks, cell.hosts, cell.wrong, cell.dtype) for cell in result.cells} == {(2, 1, 0, "bfloat16")}
    for cell in result.cells:
        assert cell.algbw == pytest.approx(cell.bytes / cell.time_us / 1e3)
        assert cell.busbw == pytest.approx(cell.algbw * (1 if cell.op == "all_reduce" else 0.5))
    assert result.summary.copy_gb_per_s_total == pytest.approx(2 * result.summary.copy_gb_per_s_rank)
    assert [ratio.ratio_vs_gloo for ratio in result.summary.ratios if ratio.arm == "gloo"] == [1.0] * 6
    assert done.stderr.count("#wrong") == 2
    assert "Every element was right." in done.stderr
    assert (tmp_path / "plot.png").read_bytes().startswith(PNG)


@pytest.mark.slow
def test_other_numbers_of_ranks_and_other_ops_are_measured_too():
    result = run_comm(options(ranks=3, ops=("reduce_scatter", "broadcast"), redop="avg", sizes_bytes=(1, 4096)))
    # as many elements for each rank, at least one
    assert [(cell.op, cell.bytes) for cell in result.cells] == [
        *(("reduce_scatter", 12), ("reduce_scatter", 4092), ("broadcast", 12), ("broadcast", 4092)),
    ]
    assert [cell.redop for cell in result.cells] == ["avg", "avg", "none", "none"]
    assert sum(cell.wrong for cell in result.cells) == 0


@pytest.mark.slow
def test_torchrun_measures_in_place_and_rank_0_shows(tmp_path):
    port = str(20_000 + os.getpid() % 10_000)
    environment = {**os.environ, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    arguments = ("--backends", "gloo", "--sizes", "1K", "--rounds", "1", "--min-time-ms", "1", "--json", "-")
    code = "from deepytorch.cli import main; main()"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code, "bench", "comm", *arguments],
            env={**environment, "MASTER_PORT": port, "RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    (out, err), other = (rank.communicate(timeout=120) for rank in ranks)
    assert [rank.returncode for rank in ranks] == [0, 0], err + other[1]
    assert len(decoded(CommResult, json.loads(out)).cells) == 1
    assert "#wrong" in err
    assert other == ("", "")


@pytest.mark.slow
def test_arms_of_deepytorch_get_their_options_and_tell_what_ran(worker):
    stand_in = """
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
    arms = {"backends": ("deepytorch", "gloo"), "algorithms": ("auto", "streams"), "compress": ("none", "bf16")}
    result = run_comm(options(**arms, allocated=True), worker=worker(preparation=stand_in))
    assert [cell.algorithm for cell in result.cells[:-1:2]] == [
        f"{algorithm} {compress} all_reduce 1024" for algorithm in ("chosen", "streams") for compress in (None, "bf16")
    ]
    assert [cell.allocated for cell in result.cells] == [False, True] * 4 + [False]
    assert sum(cell.wrong for cell in result.cells) == 0


@pytest.mark.slow
def test_wrong_results_are_counted(worker):
    spoil = """
        run_collective(op, buffers, redop, group)
        if rank == 1:
            buffers.output[:3] += 1
    """
    (cell,) = run_comm(options(), worker=worker(spoil)).cells
    assert cell.wrong == 3


@pytest.mark.slow
def test_a_failing_rank_ends_all_and_is_named(worker, ranks_left):
    fail = """
        run_collective(op, buffers, redop, group)
        if rank == 1:
            raise ValueError("no such luck")
    """
    with pytest.raises(RankError) as error:
        run_comm(options(), worker=worker(fail))
    text = str(error.value)
    assert text.startswith("Rank 1 of 2 failed with exit status 1 at: all_reduce, 1024 bytes: first check. ")
    assert "ValueError: no such luck" in text
    assert "no such luck. All ranks were ended. The end of the log of rank 1:\n" in text
    assert ranks_left() == []


@pytest.mark.slow
def test_a_killed_rank_ends_all_and_is_named(worker, ranks_left):
    started = time.monotonic()
    with pytest.raises(RankError, match="Rank 1 of 2 was ended by SIGKILL"):
        run_comm(options(), worker=worker("os.kill(os.getpid(), 9) if rank == 1 else time.sleep(60)"))
    assert time.monotonic() - started < 30  # what takes time is importing torch
    assert ranks_left() == []


@pytest.mark.slow
def test_ranks_that_stand_still_are_ended(worker, ranks_left):
    with pytest.raises(
        RankError, match=r"stood still for 30 s at: all_reduce, 1024 bytes: first check\. All ranks were"
    ):
        run_comm(options(timeout_s=30.0), worker=worker("time.sleep(600)"))  # long enough for a start
    assert ranks_left() == []


def test_a_worker_that_cannot_start_says_why(tmp_path):
    script = tmp_path / "rank.py"
    script.write_text("import a_module_that_is_not_there")
    with pytest.raises(RankError, match="No module named 'a_module_that_is_not_there'"):
        run_comm(options(), worker=(sys.executable, str(script)))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_whatever_ends_the_command_ends_the_ranks(worker, ranks_left, tmp_path, number):
    code = (
        "import sys\nfrom deepytorch.bench.comm import CommOptions, run_comm\n"
        "options = CommOptions(backends=('gloo',), sizes_bytes=(1024,))\n"
        "run_comm(options, notify=lambda text: print(text, flush=True), worker=sys.argv[1:])"
    )
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    started = subprocess.Popen(
        [sys.executable, "-c", code, *worker("time.sleep(600)")],
        env={**os.environ, "TMPDIR": str(temporary)},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert started.stdout is not None
    with started.stdout as told:
        while "first check" not in told.readline():
            assert started.poll() is None
        started.send_signal(number)
    assert started.wait(timeout=20) != 0
    assert ranks_left() == []
    if number != signal.SIGKILL:
        assert list(temporary.iterdir()) == []


@pytest.mark.slow
@pytest.mark.lab
def test_simulated_hosts_are_measured_within_their_rate():
    result = run_comm(options(hosts=2, ranks=1, rate="200mbit", sizes_bytes=(1 << 20,), min_time_ms=50.0))
    (cell,) = result.cells
    assert (cell.ranks, cell.hosts, cell.wrong) == (2, 2, 0)
    assert result.summary.link_bit_per_s == 200e6
    assert 0.5 < cell.algbw / limit("all_reduce", 2, 2, result.summary)[0] < 1.1


# The command line


def test_the_command_passes_its_options_on(monkeypatch, tmp_path, capsys):
    asked = []

    def fake(options, on_cells, notify):
        asked.append(options)
        on_cells([CELL])
        return CommResult(cells=[replace(CELL, wrong=2)], summary=SUMMARY)

    monkeypatch.setattr("deepytorch.bench.comm_show.run_comm", fake)
    file = tmp_path / "result.json"
    arguments = ["--ranks", "4", "--hosts", "2", "--rate", "1gbit", "--flow-rate", "200mbit", "--sizes", "1K,2K"]
    arguments += ["--dtype", "float16", "--op", "broadcast", "--redop", "max", "--algorithms", "auto,streams"]
    arguments += ["--compress", "none,fp16", "--allocated", "--rounds", "3", "--min-time-ms", "9", "--timeout", "7"]
    assert run(monkeypatch, "bench", "comm", *arguments, "--json", str(file)) == 2
    (options,) = asked
    assert options == CommOptions(
        ranks=4,
        hosts=2,
        rate="1gbit",
        flow_rate="200mbit",
        sizes_bytes=(1024, 2048),
        dtype="float16",
        ops=("broadcast",),
        redop="max",
        algorithms=("auto", "streams"),
        compress=("none", "fp16"),
        allocated=True,
        rounds=3,
        min_time_ms=9.0,
        timeout_s=7.0,
    )
    assert read_comm_result(file).cells[0].wrong == 2
    shown = capsys.readouterr()
    assert "gloo's time" in shown.out
    assert "Error: 2 elements of all_reduce" in shown.err


def test_an_option_that_is_not_known_is_one_message(monkeypatch, capsys):
    assert run(monkeypatch, "bench", "comm", "--op", "all_reduce,gather") == 2
    error = capsys.readouterr().err
    assert 'Error: ops has "gather", expected one of all_reduce, reduce_scatter' in error
    assert "Traceback" not in error


def test_explain_measures_nothing(monkeypatch, capsys):
    described = Described(topology_of(1), None, None)
    monkeypatch.setattr("deepytorch.bench.comm_show.describe_ranks", lambda *_, in_place: described)
    assert run(monkeypatch, "bench", "comm", "--explain", "--sizes", "1M") == 0
    assert "shared_memory" in capsys.readouterr().out


def test_lists_are_split_at_commas():
    assert names(" a, b,,c") == ("a", "b", "c")
