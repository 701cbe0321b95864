"""One step as a picture, and as a trace for chrome://tracing or Perfetto: compute, communication and waits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepytorch.bench.plots import new_figure, save_figure
from deepytorch.bench.results import write_json

_COLORS = {"forward": "#56b4e9", "backward": "#0072b2", "optimizer": "#999999"}
_LANES = {"compute": "#0072b2", "communication": "#e69f00", "waiting": "#d55e00"}


@dataclass(frozen=True, slots=True)
class Span:
    """The activity of one lane from `begin_s` to `end_s`, in seconds of the step.

    lane: "compute", "communication" or "waiting".
    """

    lane: str
    name: str
    begin_s: float
    end_s: float


def write_trace(path: Path, steps: Mapping[str, Sequence[Span]]) -> None:
    """Write the steps of several arms to `path` in the Trace Event Format. Raises `DataError` when it cannot.

    An arm is a process, a lane a thread, and times are in us.
    """
    events: list[dict[str, Any]] = []
    for process, (arm, spans) in enumerate(steps.items()):
        events.append({"ph": "M", "name": "process_name", "pid": process, "args": {"name": arm}})
        for thread, lane in enumerate(_LANES):
            events.append({"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": lane}})
        for span in spans:
            times = {"ts": 1e6 * span.begin_s, "dur": 1e6 * (span.end_s - span.begin_s)}
            thread = list(_LANES).index(span.lane)
            events.append({"ph": "X", "name": span.name, "cat": span.lane, "pid": process, "tid": thread, **times})
    write_json(path, {"traceEvents": events, "displayTimeUnit": "ms"})


def plot_steps(path: Path, title: str, steps: Mapping[str, Sequence[Span]]) -> None:
    """Write a PNG to `path`: a row of lanes for each arm, one time axis in ms for all.

    Raises `ConfigError` when the file cannot be written or matplotlib is not installed.
    """
    figure = new_figure(11, 0.8 + 1.5 * len(steps))
    rows = figure.subplots(len(steps), 1, sharex=True, squeeze=False)
    for row, (arm, spans) in zip(rows[:, 0], steps.items(), strict=True):
        for place, lane in enumerate(reversed(_LANES)):
            for span in spans:
                if span.lane == lane:
                    width = 1e3 * (span.end_s - span.begin_s)
                    color = _COLORS.get(span.name, _LANES[lane])
                    row.barh(place, width, left=1e3 * span.begin_s, height=0.8, color=color, edgecolor="white")
                    if lane == "compute":
                        middle = 500 * (span.begin_s + span.end_s)
                        row.text(middle, place, span.name, ha="center", va="center", fontsize=7, color="white")
        row.set_yticks(range(len(_LANES)), list(reversed(_LANES)), fontsize=8)
        row.set_title(arm, loc="left", fontsize=9)
    rows[-1, 0].set_xlabel("ms from the beginning of the step")
    figure.suptitle(title)
    save_figure(figure, path, "Give another path with --timeline.")
