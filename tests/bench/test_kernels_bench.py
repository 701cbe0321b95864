"""`deepytorch bench kernels`: every kernel is in its list, and what it says of one is what the compiler says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from deepytorch.bench.kernels import MODULES, Kernels, KernelsOptions, variants
from deepytorch.bench.results import Results, Row, read_result
from deepytorch.errors import BuildError, ConfigError
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
        KernelsOptions(capabilities=(75,))


def test_the_table_has_the_most_of_all_variants_and_a_fault_is_an_error():
    def row(variant: str, gpu: str, registers: float, **texts: str) -> Row:
        figures = {"registers": registers, "spilled_bytes": 0.0, "shared_bytes": 2048.0, "compile_s": 1.25}
        key = {"kernel": "move", "variant": variant, "gpu": gpu}
        return Row(key=key, figures=figures, texts={"instructions": "", "troubles": ""} | texts)

    rows = [
        row("fp32", "sm_80", 57.0, instructions="mma.sync"),
        row("bf16", "sm_80", 48.0, instructions="mma.sync, cp.async"),
        row("fp32", "sm_90", 40.0),
    ]
    given = {"benchmark": "kernels", "command": "", "options": {}, "machine": "", "versions": {}, "date": ""}
    [table] = Kernels().tables(Results(rows=rows, **given))
    assert table.rows == (
        ("move", "sm_80", "2", "57", "0 B", "2 KB", "mma.sync, cp.async", "2.5"),
        ("move", "sm_90", "1", "40", "0 B", "2 KB", "", "1.2"),
    )
    Kernels().verdict(Results(rows=rows, **given))
    with pytest.raises(BuildError, match="kernel move, variant fp16, gpu sm_80: it spills"):
        Kernels().verdict(Results(rows=[*rows, row("fp16", "sm_80", 255.0, troubles="it spills")], **given))


@pytest.mark.slow
def test_the_command_writes_what_the_compiler_says(tmp_path: Path):
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    call = "import sys; from deepytorch.cli import main; sys.argv[0] = 'deepytorch'; main()"
    out = tmp_path / "kernels.json"
    arguments = ["bench", "kernels", "--named", "buckets_triton", "--capabilities", "80,90", "--out", str(out)]
    done = subprocess.run(
        [sys.executable, "-c", call, *arguments], env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results = read_result(Results, out)
    assert {row.key["gpu"] for row in results.rows} == {"sm_80", "sm_90"}
    assert all(row.figures["registers"] > 0 and row.texts["troubles"] == "" for row in results.rows), results.rows
