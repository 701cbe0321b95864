"""Scripts in processes that begin with torch and its compilers imported, which takes a short script half of its time.

They are forked from one server a test process. It imports nothing of ours: what `import deepytorch` does, it does in
the script, after `import torch`. The interpreter's own last steps are left out, `atexit` with them: a test that looks
at a process's end, at what is imported first, or at what torch reads of the environment when it is imported, starts a
process of its own.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo", "torch._inductor.compile_fx"])


class WarmProcess:
    """One of them, as far as it is used here like a `subprocess.Popen`."""

    def __init__(
        self, script: Path, output: Path, env: Mapping[str, str], *arguments: str, errors: Path | None = None
    ) -> None:
        """Run a script, `env` on top of what is set here; stderr goes to `output` too where no file is given for it."""
        told = (str(script), arguments, str(output), str(errors or ""), {**os.environ, **env})
        self._process = _SERVER.Process(target=_run, args=told, daemon=True)
        self._process.start()

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a warm process", timeout or 0.0)
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


def run_script(
    script: str, *arguments: str, env: Mapping[str, str] | None = None, timeout: float
) -> subprocess.CompletedProcess[str]:
    """What `subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True)` would return.

    `env` comes on top of this process's. Raises `subprocess.TimeoutExpired` where it has not ended by then.
    """
    with tempfile.TemporaryDirectory() as folder:
        path, output, errors = (Path(folder) / name for name in ("script.py", "stdout", "stderr"))
        path.write_text(script)
        output.touch()
        errors.touch()
        process = WarmProcess(path, output, env or {}, *arguments, errors=errors)
        try:
            code = process.wait(timeout)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        return subprocess.CompletedProcess(["-c", script, *arguments], code, output.read_text(), errors.read_text())


def _run(script: str, arguments: tuple[str, ...], output: str, errors: str, env: dict[str, str]) -> None:
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # it may start others
    os.environ.clear()  # the server's, which is that of the test that came first
    os.environ.update(env)
    written = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(written, 1)
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600) if errors else written, 2)
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")
