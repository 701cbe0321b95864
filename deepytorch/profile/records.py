"""The records of a profiled process: JSON, one record a line, each written as soon as its step is over."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from deepytorch.bench.results import decoded

COMPUTE, COMMUNICATION, LOADER = "compute", "communication", "data loader"
OPTIMIZER, HOST, COMPILE, REST = "optimizer", "host", "compile", "rest"
GROUPS = (COMPUTE, COMMUNICATION, LOADER, OPTIMIZER, HOST, COMPILE, REST)  # in the order of tables
WAITED = "collectives"  # the part of COMMUNICATION in which the training thread waits


class Part(NamedTuple):
    """A part of a step's time.

    group: one of `GROUPS`. what: the activity in words. region, form: the region of a computation, by its name in the
    report, and the form that ran; empty for other parts.
    """

    group: str
    what: str
    region: str = ""
    form: str = ""

    @property
    def label(self) -> str:
        """Return the part in words."""
        return f"{self.what}, {self.region} ({self.form})" if self.region else self.what


@dataclass(frozen=True, kw_only=True)
class Job:
    """The settings of a profile.

    Attributes:
        folder: The folder for the records of processes.
        first: The first step of the trace; None: once steps are settled.
        num_traced: The number of steps of the trace.
        stop_after: The number of steps after which the script is ended; None: it runs to its end.
    """

    folder: Path
    first: int | None = None
    num_traced: int = 4
    stop_after: int | None = None

    def write(self) -> None:
        """Save the job for the processes."""
        _job_file(self.folder).write_text(json.dumps(asdict(self), default=str), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Job:
        """Load the job of a folder."""
        return decoded(cls, json.loads(_job_file(folder).read_text(encoding="utf-8")))


def _job_file(folder: Path) -> Path:
    return folder / "job.json"


@dataclass
class Step:
    """One training step of one rank: from the end of one optimizer step to the end of the next.

    Attributes:
        number: The number of the step, from 1 on.
        parts: The seconds of each part. They add up to the step.
        waits: The seconds of each wait for a collective, in order.
        settled: Whether nothing was traced, compiled or tried in it.
        traced: Whether torch's profiler ran.
        positions: The positions of batches of which tokens are known, pads among them; pads: those of them that are
            pads; pads_computed: pads that were computed, as their call did not run packed.
    """

    number: int
    parts: dict[Part, float]
    waits: Sequence[float] = ()
    settled: bool = True
    traced: bool = False
    positions: int = 0
    pads: int = 0
    pads_computed: int = 0

    @property
    def seconds(self) -> float:
        """Return the time of the step."""
        return sum(self.parts.values())

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {**vars(self), "parts": [[*part, seconds] for part, seconds in self.parts.items()]}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Step:
        """Return the step that `to_json` describes."""
        parts = {Part(*each[:-1]): each[-1] for each in content.pop("parts")}
        return cls(parts=parts, **content)


@dataclass
class Rank:
    """The records of one process that trained.

    Attributes:
        rank: Its rank, 0 if it trained alone.
        host: The name of its machine.
        device: The type of the device of its parameters.
        steps: Its steps, in order.
        workers: `num_workers` of the DataLoaders that it read, the most of them; None: it read none.
        optimizer: The class of its optimizer, and whether it is fused.
        report: `deepytorch.report()`, as JSON.
        trace: The file of its trace; None: there is none.
    """

    rank: int = 0
    host: str = ""
    device: str = "cpu"
    steps: list[Step] = field(default_factory=list)
    workers: int | None = None
    optimizer: str = ""
    fused: bool = False
    report: dict[str, Any] = field(default_factory=dict)
    trace: Path | None = None


def read_ranks(folder: Path) -> list[Rank]:
    """Return the processes that trained, by rank; of several with one rank the one with the most steps."""
    found: dict[int, Rank] = {}
    for path in sorted(folder.glob("*.jsonl")):
        rank = _read(path)
        if rank.steps and (rank.rank not in found or len(rank.steps) > len(found[rank.rank].steps)):
            found[rank.rank] = rank
    return [found[rank] for rank in sorted(found)]


def _read(path: Path) -> Rank:
    rank = Rank()
    trace = path.with_suffix(".trace")
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            content = json.loads(line)
        except ValueError:  # the process was killed while it wrote
            break
        if content.pop("kind") == "step":
            rank.steps.append(Step.from_json(content))
        else:
            vars(rank).update(content)
    rank.trace = trace if trace.exists() else None
    return rank
