"""One run of a script for `deepytorch bench start`: `python start_worker.py RECORD STEPS IMPORT SCRIPT [ARGUMENTS]`.

The worker is run by its path: without the import nothing of deepytorch is loaded with the script. RECORD takes the
seconds since this process began at which each step of an optimizer was over. IMPORT is "import", "fill" or "". With
"fill" the run waits, after the steps that count, until everything that is compiled in the background is stored.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import threading
import time
from pathlib import Path
from typing import Any

# Loads only this file, without the package around it.
seconds_since_start = runpy.run_path(str(Path(__file__).parents[1] / "process_facts.py"))["seconds_since_start"]


def main() -> None:
    """Run the script, and leave it after its last step that counts."""
    record, steps, imports, script, *arguments = sys.argv[1:]
    sys.argv, sys.path[0] = [script, *arguments], str(Path(script).resolve().parent)
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    watch = _Watch(Path(record), int(steps), fills=imports == "fill")
    from torch.optim.optimizer import register_optimizer_step_post_hook

    register_optimizer_step_post_hook(watch)
    if imports:
        import deepytorch  # noqa: F401, what it does is what is measured
    runpy.run_path(script, run_name="__main__")
    watch.finish()


class _Watch:
    """Records when steps are over, and ends the process after the last one."""

    def __init__(self, record: Path, steps: int, fills: bool) -> None:
        self._record, self._steps, self._fills = record, steps, fills
        self._seconds: list[float] = []
        self._first_packed: float | None = None

    def __call__(self, *_: Any) -> None:
        if len(self._seconds) < self._steps:
            self._seconds.append(seconds_since_start())
            if self._first_packed is None and self._has_packed():
                self._first_packed = self._seconds[-1]
        if len(self._seconds) == self._steps:
            self.finish()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)

    def finish(self) -> None:
        """Write the record; if caches are to be filled, wait for that."""
        found = {"seconds": self._seconds, "first_packed": self._first_packed, "report": self._report()}
        unfinished = self._record.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(found), encoding="utf-8")
        unfinished.replace(self._record)
        while self._fills and self._compiles_in_background():
            time.sleep(0.2)

    def _compiles_in_background(self) -> bool:
        """Return whether more is to be stored.

        Rank 0 decides when this is over; the other ranks are ended with it.
        """
        if os.environ.get("RANK", "0") != "0":
            return True
        beside = sys.modules.get("deepytorch.background")
        return beside is not None and beside.is_working()

    @staticmethod
    def _has_packed() -> bool:
        """Return whether a step has run packed.

        Each step asks, so nothing is loaded for the answer: the whole report takes 0.25 s the first time.
        """
        report = sys.modules.get("deepytorch.compiler.report")
        return report is not None and bool(report.LEDGER.report().total("steps_packed"))

    @staticmethod
    def _report() -> dict[str, Any]:
        ours = sys.modules.get("deepytorch")
        return {} if ours is None else dict(ours.report().to_json())


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


if __name__ == "__main__":
    main()
