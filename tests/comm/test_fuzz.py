"""A few of the sequences of `fuzz.py`, which runs as many as one likes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [[], ["--hosts"]], ids=["one host", "two hosts"])
def test_random_sequences_of_collectives(hosts: list[str]) -> None:
    command = [sys.executable, str(Path(__file__).with_name("fuzz.py")), "--ranks", "4", "--sequences", "100", *hosts]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert "4 ranks: 100 sequences, " in done.stdout
    assert "100 sequences, 0 of them" not in done.stdout  # one of ten has a rank that differs
