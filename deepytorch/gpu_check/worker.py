"""One group of checks, in a process of its own: `python -m deepytorch.gpu_check.worker RECORDS GROUP NAMES DEVICE`.

After an illegal address a process can do nothing more on a device, and a kernel that hangs ends the process. So groups
do not share a process. Before a group's first timed check its process waits for a line on its stdin: until then it
prepares, beside others, what will be timed.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

from deepytorch.gpu_check.outcome import Check
from deepytorch.switch import SWITCH

# After an error with these words nothing that a process does on its device succeeds.
_BROKEN = ("CUDA error", "device-side assert", "illegal memory access", "CUDNN_STATUS_EXECUTION_FAILED")
_IS_ALONE = threading.Event()


def serve(checks: Sequence[Check], records: Path, group: str, names: Sequence[str]) -> None:
    """Make the checks of these names of a group; write to `records` when each begins and when it is over.

    This ends early after an error that leaves the device unusable to this process.
    """
    SWITCH.enabled = False  # checks say themselves what is compiled
    threading.Thread(target=_listen_to_stdin, daemon=True).start()
    of_group = {check.name: check for check in checks if check.group == group}
    tuning: Any = import_module("deepytorch.tuning") if "torch" in sys.modules else None
    if tuning is not None and any(check.is_timed for check in of_group.values()):
        tuning.measure(False)  # what is chosen beside others would be what is timed later
    elif tuning is not None:
        tuning.keep_in(records.parent)  # nor is such a choice to last
    with records.open("a", encoding="utf-8") as file:

        def say(word: str, value: object) -> None:
            file.write(json.dumps({word: value}) + "\n")
            file.flush()

        for name in names:
            check = of_group[name]
            if check.is_timed and not _IS_ALONE.is_set():
                say("waits", name)
                _IS_ALONE.wait()
                if tuning is not None:
                    tuning.measure(True)
            say("begins", name)
            outcome = check.made()
            say("outcome", asdict(outcome))
            if outcome.passed is False and any(words in outcome.said for words in _BROKEN):
                return


def _listen_to_stdin() -> None:
    """Let timed checks begin at the first byte; end this process when the one at the other end of its stdin is gone."""
    while os.read(0, 1):  # not sys.stdin, whose lock a thread must not hold when the interpreter ends
        _IS_ALONE.set()
    os._exit(1)


if __name__ == "__main__":
    from deepytorch.gpu_check.checks import checks_on

    serve(checks_on(sys.argv[4]), Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]))
