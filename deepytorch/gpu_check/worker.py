"""One group of checks, in a process of its own: `python -m deepytorch.gpu_check.worker RECORDS GROUP FIRST DEVICE`.

After an illegal address a process can do nothing more on a device, and a kernel that hangs ends the process. So groups
do not share a process.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from deepytorch.gpu_check.outcome import Check
from deepytorch.switch import SWITCH

# After an error with these words nothing that a process does on its device succeeds.
_BROKEN = ("CUDA error", "device-side assert", "illegal memory access", "CUDNN_STATUS_EXECUTION_FAILED")


def serve(checks: Sequence[Check], records: Path, group: str, first: int) -> None:
    """Make the checks of a group from number `first` on; write to `records` when each begins and when it is over.

    This ends early after an error that leaves the device unusable to this process.
    """
    SWITCH.enabled = False  # checks say themselves what is compiled
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    with records.open("a", encoding="utf-8") as file:
        for number, check in enumerate(each for each in checks if each.group == group):
            if number < first:
                continue
            file.write(json.dumps({"begins": number}) + "\n")
            file.flush()
            outcome = check.made()
            file.write(json.dumps({"outcome": asdict(outcome)}) + "\n")
            file.flush()
            if outcome.passed is False and any(words in outcome.said for words in _BROKEN):
                return


def _end_with_stdin() -> None:
    """End this process when the process at the other end of its stdin is gone."""
    while os.read(0, 1):  # not sys.stdin, whose lock a thread must not hold when the interpreter ends
        pass
    os._exit(1)


if __name__ == "__main__":
    from deepytorch.gpu_check.checks import checks_on

    serve(checks_on(sys.argv[4]), Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
