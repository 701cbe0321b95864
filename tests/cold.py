"""Scripts in interpreters of their own, where `tests.warm` would leave out what is tested, or by torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path


def run_cold(
    script: str,
    *arguments: str,
    num_ranks: int | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout: float = 240.0,
    fails: bool = False,
) -> subprocess.CompletedProcess[str]:
    """How a script ended that no file holds, or one of `num_ranks` by torchrun; `env` comes on top of this process's.

    Raises `AssertionError` with the end of its stderr where it fails, or does not although it is to.
    """
    with tempfile.TemporaryDirectory() as folder:
        command, full = ["-c", script], {**os.environ, **(env or {})}
        if num_ranks is not None:
            path = Path(folder) / "script.py"
            path.write_text(script)
            command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}", str(path)]
            full.setdefault("OMP_NUM_THREADS", "1")
        done = subprocess.run(
            [sys.executable, *command, *arguments], env=full, cwd=cwd, capture_output=True, text=True, timeout=timeout
        )
    assert (done.returncode != 0) == fails, done.stderr[-6000:]
    return done
