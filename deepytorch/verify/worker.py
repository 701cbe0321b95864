"""One run of a script for `deepytorch verify`: `python -m deepytorch.verify.worker JOB.json`.

DEEPYTORCH in its environment decides if the import does anything.
"""

from __future__ import annotations

import random
import runpy
import sys
import traceback
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch

import deepytorch
from deepytorch.background import leave_with_parent
from deepytorch.verify.recorder import Recorder, StepsDone
from deepytorch.verify.records import WITH, Job, VerifyOptions

_OURS = ("<frozen runpy>", runpy.__file__, __file__)


def main() -> None:
    """Run and record the script that `sys.argv[1]` describes."""
    leave_with_parent()
    job = Job.read(Path(sys.argv[1]))
    options = job.options
    recorder = Recorder(job)
    recorder.attach()
    if job.role == WITH and options.lowering is not None:
        deepytorch.configure(options={"lowering": options.lowering})
    random.seed(options.seed)
    if find_spec("numpy") is not None:  # torch and deepytorch work without NumPy
        import_module("numpy").random.seed(options.seed)
    torch.manual_seed(options.seed)
    try:
        run_script(options)
    except StepsDone:
        return
    except SystemExit as end:
        if end.code:
            recorder.finish(None, f"It ended itself: SystemExit({end.code!r}).")
            raise
    except BaseException as error:
        told = _told(error)
        recorder.finish(None, told)
        sys.stderr.write(f"{told}\n")
        sys.exit(1)
    recorder.finish("script")


def run_script(options: VerifyOptions) -> None:
    """Run the script as `python SCRIPT ARGUMENTS` or `python -m MODULE ARGUMENTS` does."""
    sys.argv = list(options.command)
    if options.is_module:
        runpy.run_module(options.command[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(options.command[0]).resolve().parent)
        runpy.run_path(options.command[0], run_name="__main__")


def _told(error: BaseException) -> str:
    """Return the traceback, from the script's own first line on."""
    frames = traceback.extract_tb(error.__traceback__)
    while frames and frames[0].filename in _OURS:
        del frames[0]
    lines = ["Traceback (most recent call last):\n", *traceback.format_list(frames)] if frames else []
    return "".join([*lines, *traceback.format_exception_only(type(error), error)]).rstrip()


if __name__ == "__main__":
    main()
