"""The journal: one line of JSON for each trial that was run, and what they come to."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from tests.fuzz.grammar import STEPS, Trial
from tests.fuzz.training import Outcome


class Journal:
    """Lines of a file, by the index of their trial; a later line of a trial stands for an earlier one."""

    def __init__(self, path: Path, seed: int) -> None:
        """Read what is there. Lines of other seeds are kept and not counted."""
        self.path, self.seed = path, seed
        self.lines: dict[int, dict[str, Any]] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            for text in path.read_text().splitlines():
                line = json.loads(text)
                if line["seed"] == seed:
                    self.lines[line["index"]] = line

    def add(self, trial: Trial, outcome: Outcome) -> None:
        """Write a trial down; of those that found something, all of it."""
        line = {"seed": trial.seed, "index": trial.index, "dtype": trial.dtype, "host": trial.host, **outcome.to_json()}
        line["find"] = trial.to_json() if outcome.is_find else None  # whole: the grammar may draw another one by then
        self.lines[trial.index] = line
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def next_index(self) -> int:
        """Return the first index behind all that were run."""
        return max(self.lines, default=-1) + 1

    def finds(self) -> list[Trial]:
        """Return the trials that found something, as they were drawn."""
        found = [line["find"] for _, line in sorted(self.lines.items()) if line["find"]]
        return [Trial.from_json(each) for each in found]

    def summary(self) -> dict[str, Any]:
        """Return counts over all trials."""
        lines = list(self.lines.values())
        reasons = Counter(reason for line in lines for reason in {_kind(each) for each in line.get("reasons", [])})
        steps = {name: sum(line.get(name, 0) for line in lines) for name in ("packed", "padded", "profiled")}
        packed = [line for line in lines if line.get("packed")]
        return {
            "seed": self.seed,
            "trials": len(lines),
            "cases": sum(line["cases"] for line in lines),
            "steps_of_each_case": STEPS,
            "outcomes": dict(Counter(line["kind"] for line in lines)),
            "silent_differences": sum(line["kind"] == "differs" for line in lines),
            "fallbacks": sum(bool(line.get("fallbacks")) for line in lines),
            "trials_packed": len(packed),
            "share_of_trials_packed": round(len(packed) / max(1, len(lines)), 3),
            "cases_of_packed_trials": sum(line["cases"] for line in packed),
            "steps": steps,
            "share_of_steps_packed": round(steps["packed"] / max(1, sum(steps.values())), 3),
            "dtypes": dict(Counter(line["dtype"] for line in lines)),
            "hosts": dict(Counter(line["host"] for line in lines)),
            "seconds": round(sum(line.get("seconds", 0.0) for line in lines)),
            "reasons": dict(reasons.most_common(40)),
            "finds": [trial.to_json() for trial in self.finds()],
        }


def _kind(reason: str) -> str:
    """A reason without the numbers and names of one graph."""
    words = reason.split()
    return " ".join(word for word in words if not any(letter.isdigit() for letter in word))[:100]
