"""A process that has torch and transformers imported and forks one for each job: `python server.py`.

It is run by its path and imports nothing of deepytorch, which each job imports with its own environment. A job is a
line of JSON on stdin (`environment`, `arguments`, `log`, `timeout_s`); its end is one on stdout: its exit status, or
null if it was not over in time. Everything that a job has started is ended with it.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import sys
import time
import traceback
from typing import Any

WORKER = "deepytorch.bench.model_classes.worker"


def main() -> None:
    """Run jobs until stdin ends."""
    import torch
    import torch._dynamo
    import torch._inductor.compile_fx
    import transformers.modeling_utils  # noqa: F401

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # collections in jobs, which trace, leave out what was imported
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the job that runs is ended on the way
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")  # what else is printed goes to stderr
    os.dup2(2, 1)
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            _run(job)
        answers.write(json.dumps(_ended(child, job["timeout_s"])) + "\n")
        answers.flush()


def _run(job: dict[str, Any]) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.setsid()
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(job["environment"])
    status = 1
    try:
        from importlib import import_module

        import_module(WORKER).main(job["arguments"])
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _ended(child: int, timeout_s: float) -> int | None:
    deadline = time.monotonic() + timeout_s
    parent = os.getppid()
    done = 0
    try:
        while time.monotonic() < deadline and os.getppid() == parent:
            done, code = os.waitpid(child, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(code)
            time.sleep(0.02)
        return None
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)
        if not done:
            os.kill(child, signal.SIGKILL)  # which had no session of its own yet
            os.waitpid(child, 0)


if __name__ == "__main__":
    main()
