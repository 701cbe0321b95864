"""One run of a script for `deepytorch bench start`, in a process that gets its job as any rank of a benchmark does.

The worker is run by its path: without the import nothing of deepytorch is loaded with the script. It finds the seconds
since this process began at which each step of an optimizer was over. `imports` is "import", "fill" or "". With "fill"
the run waits, after the steps that count, until everything that is compiled in the background is stored.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

# Loads only these files, without the package around them.
_FOLDER = Path(__file__).parent
seconds_since_start = runpy.run_path(str(_FOLDER.parent / "process_facts.py"))["seconds_since_start"]
_CHANNEL = runpy.run_path(str(_FOLDER / "channel.py"))


def main() -> None:
    """Run the script, and leave it after its last step that counts."""
    turns = _CHANNEL["Turns"]()
    job = turns.next_job()["job"]
    script, *arguments = job["script"]
    sys.argv, sys.path[0] = [script, *arguments], str(Path(script).resolve().parent)
    watch = _Watch(turns, job["steps"], fills=job["imports"] == "fill")
    from torch.optim.optimizer import register_optimizer_step_post_hook

    register_optimizer_step_post_hook(watch)
    if job["imports"]:
        import deepytorch  # noqa: F401, what it does is what is measured
    runpy.run_path(script, run_name="__main__")
    watch.finish()


class _Watch:
    """Records when steps are over, and keeps the process at its last one, until the benchmark ends it."""

    def __init__(self, turns: Any, steps: int, fills: bool) -> None:
        self._turns, self._steps, self._fills = turns, steps, fills
        self._seconds: list[float] = []
        self._first_packed: float | None = None

    def __call__(self, *_: Any) -> None:
        if len(self._seconds) < self._steps:
            self._seconds.append(seconds_since_start())
            if self._first_packed is None and self._has_packed():
                self._first_packed = self._seconds[-1]
        if len(self._seconds) == self._steps:
            self.finish()

    def finish(self) -> None:
        """Hand over what was found, once caches are filled if they are to be, and wait to be ended."""
        found = {"seconds": self._seconds, "first_packed": self._first_packed, "report": self._report()}
        while self._fills and self._compiles_in_background():
            time.sleep(0.2)
        self._turns.say(_CHANNEL["FOUND"], found)
        self._turns.next_job()
        os._exit(0)

    @staticmethod
    def _compiles_in_background() -> bool:
        """Return whether more is to be stored. Rank 0 decides when this is over: the others are ended with it."""
        beside = sys.modules.get("deepytorch.background")
        return os.environ.get("RANK", "0") == "0" and beside is not None and beside.is_working()

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


if __name__ == "__main__":
    main()
