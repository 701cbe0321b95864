"""The process of a rank of any benchmark: `python -m deepytorch.bench.worker`, with a socket as its stdin.

It takes one job after the other. Each is measured by the module of its kind, which takes turns for its steps.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from importlib import import_module
from typing import Any

import torch.distributed as dist

import deepytorch  # noqa: F401, the line that is measured; DEEPYTORCH=off makes it do nothing
from deepytorch.bench.channel import FAILED, FOUND, NO_MEMORY, Turns
from deepytorch.bench.memory import is_out_of_memory
from deepytorch.bench.results import decoded

KINDS = {  # each module has a dataclass `Job` and `run(job, turns)`, which returns plain JSON values
    "training": "deepytorch.bench.training",
    "hosts": "deepytorch.bench.hosts_worker",
    "overlap": "deepytorch.bench.overlap",
    "collectives": "deepytorch.bench.collectives",
    "choices": "deepytorch.bench.choices",
    "one_gpu": "deepytorch.bench.ranks_of_one_gpu",
    "ddp_of_one_gpu": "deepytorch.bench.ddp_of_one_gpu",
    "unpad": "deepytorch.bench.unpad_steps",
    "loss": "deepytorch.bench.linear_loss",
    "models": "deepytorch.bench.model_classes.worker",
}


def main() -> None:
    """Serve until there is no job left."""
    turns = Turns()
    try:
        while (given := turns.next_job()) is not None:
            module: Any = import_module(KINDS[given["kind"]])
            turns.say(FOUND, module.run(decoded(module.Job, given["job"]), turns))
    except BaseException as error:
        traceback.print_exc()
        sys.stderr.flush()
        turns.say(FAILED, {"at_s": time.monotonic(), "error": _in_words(error)})
        os._exit(1)  # skips the destructors of groups in which collectives still hang
    if dist.is_initialized():
        dist.destroy_process_group()


def _in_words(error: BaseException) -> str:
    if is_out_of_memory(error):
        return NO_MEMORY
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0].rstrip('.')}"[:300]


if __name__ == "__main__":
    main()
