"""The profile of a training: the settled steps of all ranks, put together, and one trace of them all."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepytorch.profile.records import COMMUNICATION, COMPILE, COMPUTE, GROUPS, WAITED, Part, Rank, Step

EXPOSED = Part(COMMUNICATION, "exposed transfers")
SLOWER = Part(COMMUNICATION, "waiting for slower ranks")


@dataclass(frozen=True)
class Profile:
    """The profile of one training.

    Attributes:
        command: What was run.
        ranks: The processes, by rank.
        used: The numbers of the steps that figures are of.
        settled: Whether these are settled steps; False: there was none, and they are all steps.
        means: The mean seconds of each part, of each rank; a rank's add up to its step.
    """

    command: str
    ranks: list[Rank]
    used: list[int]
    settled: bool
    means: list[dict[Part, float]]

    @property
    def parts(self) -> dict[Part, float]:
        """Return the mean seconds of each part over all ranks, in the order of a table."""
        every = {part for means in self.means for part in means}
        mean = {part: sum(means.get(part, 0.0) for means in self.means) / len(self.means) for part in every}
        return {part: mean[part] for part in sorted(mean, key=lambda part: (GROUPS.index(part.group), -mean[part]))}

    @property
    def seconds(self) -> float:
        """Return the mean time of a step."""
        return sum(self.parts.values())

    def share(self, group: str, *whats: str) -> float:
        """Return the share of a group of parts in a step, or of some of its parts."""
        found = ((part.what, seconds) for part, seconds in self.parts.items() if part.group == group)
        return sum(seconds for what, seconds in found if not whats or what in whats) / self.seconds

    @property
    def slowest(self) -> int:
        """Return the place of the rank that waits least for others."""
        return min(range(len(self.ranks)), key=lambda place: self.means[place].get(SLOWER, 0.0))

    @property
    def padding(self) -> tuple[float, float] | None:
        """Return the share of pads among positions, and that of pads that were computed; None if it is not known."""
        every = (step for rank in self.ranks for step in rank.steps)
        steps = [step for step in every if step.settled or not self.settled]
        positions = sum(step.positions for step in steps)
        if not positions:
            return None
        return sum(step.pads for step in steps) / positions, sum(step.pads_computed for step in steps) / positions

    def regions(self) -> list[dict[str, Any]]:
        """Return the first rank's regions that ran, from its report, with their `forms` and the `seconds` of a step."""
        found = []
        for record in self.ranks[0].report.get("regions", []):
            own = {part: seconds for part, seconds in self.parts.items() if part.region == record["name"]}
            forms = list(dict.fromkeys(part.form for part in own))
            found.append({**record, "forms": forms, "seconds": sum(own.values())})
        return [each for each in found if each["forms"]] or found

    def to_json(self) -> dict[str, Any]:
        """Return plain data; times are in ms."""
        padding = self.padding
        return {
            "command": self.command,
            "steps": len(self.ranks[0].steps),
            "steps_used": self.used,
            "settled": self.settled,
            "step_ms": 1e3 * self.seconds,
            "parts_ms": [_named(part, seconds) for part, seconds in self.parts.items()],
            "pads": None if padding is None else padding[0],
            "pads_computed": None if padding is None else padding[1],
            "ranks": [
                {
                    "rank": rank.rank,
                    "host": rank.host,
                    "device": rank.device,
                    "parts_ms": [_named(part, seconds) for part, seconds in means.items()],
                    "report": rank.report,
                }
                for rank, means in zip(self.ranks, self.means, strict=True)
            ],
        }


def _named(part: Part, seconds: float) -> dict[str, Any]:
    return {**part._asdict(), "ms": 1e3 * seconds}


def summarise(command: str, ranks: Sequence[Rank]) -> Profile:
    """Return the profile of ranks that have made a step or more each."""
    common = set.intersection(*({step.number for step in rank.steps} for rank in ranks))
    first = min(common)
    unsettled = {step.number for rank in ranks for step in rank.steps if not step.settled or step.traced}
    used = sorted(common - unsettled - {first})
    settled = bool(used)
    used = used or sorted(common)
    steps = [[step for step in rank.steps if step.number in set(used)] for rank in ranks]
    slower = [0.0] * len(ranks)
    for together in zip(*steps, strict=True):
        for place, seconds in enumerate(waited_for_others([step.waits for step in together])):
            slower[place] += seconds
    means = [_means(own, waited if len(ranks) > 1 else None) for own, waited in zip(steps, slower, strict=True)]
    return Profile(command, list(ranks), used, settled, means)


def waited_for_others(waits: Sequence[Sequence[float]]) -> list[float]:
    """Return how long each rank waited for slower ones, from the waits of all ranks in one step.

    The last rank to come to a collective waits for the transfer alone, and any other one for that and for the last.
    """
    if len({len(own) for own in waits}) > 1:  # they waited at other places: only the sums can be compared
        waits = [[sum(own)] for own in waits]
    alone = [min(each) for each in zip(*waits, strict=True)]
    return [sum(own) - sum(alone) for own in waits]


def _means(steps: Sequence[Step], slower: float | None) -> dict[Part, float]:
    means: dict[Part, float] = {}
    for step in steps:
        for part, seconds in step.parts.items():
            means[part] = means.get(part, 0.0) + seconds / len(steps)
    waited = means.pop(Part(COMMUNICATION, WAITED), 0.0)
    if waited:
        means[SLOWER] = (slower or 0.0) / len(steps)
        means[EXPOSED] = waited - means[SLOWER]
        if slower is None:
            del means[SLOWER]
    return means


def beginning(rank: Rank) -> tuple[int, float, float]:
    """Return the number of steps before the first settled ones, their seconds, and those of tracing and compiling."""
    steps = [step for step in rank.steps if not step.settled or step.number == 1]
    compiling = sum(seconds for step in steps for part, seconds in step.parts.items() if part.group == COMPILE)
    return len(steps), sum(step.seconds for step in steps), compiling


def in_eager(profile: Profile) -> float:
    """Return the share of a step that runs operator by operator, in regions and outside of them."""
    found = [
        seconds
        for part, seconds in profile.parts.items()
        if part.group == COMPUTE and ("eager" in part.form or "until" in part.form or not part.region)
    ]
    return sum(found) / profile.seconds if profile.seconds else 0.0


def reasons(region: dict[str, Any]) -> list[str]:
    """Return the report's reasons for which a region does not run packed or compiled, and what its trials showed."""
    padded = [f"{count} x {reason}" for reason, count in region["padded_because"].items()]
    return padded + region["trials"] + region["fallbacks"] + (region["declined"] * (region["outcome"] != "packed"))


def merge_traces(ranks: Iterable[Rank], path: Path) -> bool:
    """Write the traces of all ranks as one, on one axis of time; return whether there was any."""
    events: list[dict[str, Any]] = []
    first: int | None = None
    for rank in ranks:
        if rank.trace is None:
            continue
        content = json.loads(rank.trace.read_text(encoding="utf-8"))
        base = content.get("baseTimeNanoseconds", 0)
        first = base if first is None else first
        numbers: dict[Any, int] = {}
        for event in content["traceEvents"]:
            given = event.get("pid")
            event["pid"] = numbers.setdefault(given, 1000 * rank.rank + len(numbers))
            if "ts" in event:
                event["ts"] += (base - first) / 1e3
            if event.get("name") == "process_name":
                event["args"] = {"name": f"rank {rank.rank}: {event['args'].get('name', '')} {given}"}
            if "id" in event and event.get("ph") in ("s", "f"):  # arrows between threads
                event["id"] = f"{rank.rank}.{event['id']}"
            events.append(event)
    if first is not None:
        path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")
    return first is not None
