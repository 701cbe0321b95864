"""No script is more than 6 % behind eager at any step: by the clock, on a machine that does nothing else meanwhile."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from deepytorch.bench.run import run_benchmark
from deepytorch.bench.start import EAGER, Start, StartOptions

FOLDER = Path(__file__).with_name("timing")
STEPS = {"custom_function": 3000, "lora_with_checkpoints": 400, "loop_over_positions": 2500, "trl_sft": 1000}
MOST_BEHIND, ROUNDS = 1.06, 3
IMPORT_SECONDS = 0.25  # in which deepytorch is loaded, of a process that takes 2 s to its first step


def test_every_script_is_timed() -> None:
    assert {each.stem for each in FOLDER.glob("*.py")} == set(STEPS)


@pytest.mark.timing
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", STEPS)
def test_no_step_is_far_behind_eager(name: str) -> None:
    # one thread, so that eager's own time does not swing, and medians of three
    options = StartOptions(command=(str(FOLDER / f"{name}.py"),), steps=STEPS[name], rounds=ROUNDS, threads=1)
    found = {
        str(row.key["setup"]): row.series["over_s"] for row in run_benchmark(Start(), options, timeout_s=600.0).rows
    }
    eager = found.pop(EAGER)
    for setup, steps in found.items():
        ratios = [(mine - IMPORT_SECONDS) / theirs for mine, theirs in zip(steps, eager, strict=True)]
        step = max(range(len(ratios)), key=ratios.__getitem__)
        pauses = [after - before for before, after in pairwise(steps)]
        said = (
            f"{setup}: step {step} was over after {steps[step]:.1f} s, in eager after {eager[step]:.1f} s; "
            f"longest pause {max(pauses):.1f} s, all of it {steps[-1]:.1f} s, in eager {eager[-1]:.1f} s"
        )
        print(said)  # noqa: T201, the figures
        assert ratios[step] <= MOST_BEHIND, said
