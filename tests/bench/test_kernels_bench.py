"""`deepytorch bench kernels`: every kernel is in its list, and what it says of one is what the compiler says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deepytorch.bench.kernels import MODULES, run_kernels, variants
from deepytorch.errors import ConfigError
from deepytorch.machine_code import MachineCode, Variant, troubles

ROOT = Path(__file__).parents[2]
MULTIPLIES = Variant("module:function", "bf16", {}, matrix=True)


def test_every_file_of_kernels_is_in_the_list():
    files = [file for folder in ("passes", "comm") for file in sorted(ROOT.glob(f"{folder}/**/*.py"))]
    assert files
    with_variants = {
        "deepytorch." + ".".join(file.relative_to(ROOT).with_suffix("").parts)
        for file in files
        if "\nVARIANTS" in file.read_text()
    }
    assert with_variants == set(MODULES)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (MachineCode(90, 255, 16, 1024, ("wgmma",)), "spills 16 bytes a thread at 255 registers"),
        (MachineCode(80, 128, 0, 164 << 10, ("mma.sync",)), "sm_80 has 166912"),
        (MachineCode(90, 128, 0, 1024, ("mma.sync",)), "none of wgmma, found mma.sync"),
        (MachineCode(100, 128, 0, 1024, ()), "none of tcgen05, found nothing"),
    ],
)
def test_what_is_wrong_is_said(code, words):
    (said,) = troubles(MULTIPLIES, code)
    assert words in said


def test_nothing_is_said_where_all_is_well():
    assert troubles(MULTIPLIES, MachineCode(90, 168, 0, 200 << 10, ("wgmma",))) == []


def test_unknown_names_and_gpus_are_refused():
    pytest.importorskip("triton")
    with pytest.raises(ConfigError, match="'no such kernel'"):
        list(variants("no such kernel"))
    with pytest.raises(ConfigError, match="capability 75; expected some of 80, 90, 100"):
        run_kernels([75])


@pytest.mark.slow
def test_the_command_prints_what_the_compiler_says():
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    call = "import sys; from deepytorch.cli import main; sys.argv[0] = 'deepytorch'; main()"
    arguments = ["bench", "kernels", "--named", "buckets_triton", "--capabilities", "80,90", "--json", "-"]
    done = subprocess.run(
        [sys.executable, "-c", call, *arguments], env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads(done.stdout)["kernels"]
    assert {row["capability"] for row in rows} == {80, 90}
    assert all(row["registers"] > 0 and row["troubles"] == [] for row in rows), rows
