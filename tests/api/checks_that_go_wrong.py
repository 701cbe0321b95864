"""Checks that crash, hang, raise and pass, in the place of those of a GPU: a process of a group, as `worker` is one."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from deepytorch.gpu_check.outcome import Check, Failed, Found, Skipped
from deepytorch.gpu_check.worker import serve

broken_by: list[int] = []
prepared_by: list[int] = []


def crash() -> str:
    print("the last words of a kernel", flush=True)  # noqa: T201, they go to the process's log
    os.kill(os.getpid(), signal.SIGSEGV)
    return ""


def hang() -> str:
    time.sleep(600)
    return ""


def break_device() -> str:
    broken_by.append(os.getpid())
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def look() -> str:
    return "the process that broke it" if broken_by else "another process"


def fail() -> str:
    raise Failed("twice as much")


def skip() -> str:
    raise Skipped("no such device")


def run_out_of_memory() -> str:
    raise RuntimeError("out of memory")


def measure() -> Found:
    return Found("2 ms", {"step_ms": 2.0})


def prepare() -> str:
    prepared_by.append(os.getpid())
    return span()


def time_what_was_prepared() -> str:
    return f"{span()} {prepared_by == [os.getpid()]}"


def span() -> str:
    begin = time.monotonic()
    time.sleep(0.5)
    return f"{begin} {time.monotonic()}"


_SOURCES = "deepytorch.gpu_check.outcome"  # a module whose sources count as those of the checks
WRONG_CHECKS = (
    Check("fine", "first", measure, module=_SOURCES),
    Check("fine", "cannot", skip),
    Check("fine", "wrong", fail),
    Check("fine", "raises", run_out_of_memory),
    Check("crashes", "ends", crash),
    Check("crashes", "behind it", look, module=_SOURCES),
    Check("hangs", "stands still", hang, deadline_s=1.0),
    Check("hangs", "behind it", look, module=_SOURCES),
    Check("breaks", "illegal", break_device),
    Check("breaks", "behind it", look, module=_SOURCES),
    Check("absent: a rival", "wants it", measure, needs=("no_such_package",)),
)
TIMED_CHECKS = (
    Check("z, timed", "alone", span, is_timed=True),
    Check("a", "one", span),
    Check("b", "other", span),
    Check("y, prepared", "timed", time_what_was_prepared, is_timed=True),
    Check("y, prepared", "compiled", prepare),
    Check("c, compiles", "before all", span, is_first=True),
)
SLOW_CHECKS = (Check("slow", "one", hang), Check("slow", "other", hang))
STOPPED_CHECKS = (Check("over", "at once", measure, module=_SOURCES), Check("stopped", "hangs", hang))

if __name__ == "__main__":
    every = (*WRONG_CHECKS, *TIMED_CHECKS, *SLOW_CHECKS, *STOPPED_CHECKS)
    serve(every, Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]))
