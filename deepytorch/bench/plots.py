"""Pictures of results, drawn without a display."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepytorch.errors import ConfigError

# Wide and pale below, narrow and dark above: curves that coincide stay visible.
_STYLES = (
    {"color": "#bbbbbb", "linewidth": 6.0},
    {"color": "#e69f00", "linewidth": 3.0},
    {"color": "#0072b2", "linewidth": 1.2},
)


@dataclass(frozen=True, slots=True)
class Curve:
    """The training of one arm: the loss and the seconds of every step."""

    name: str
    losses: Sequence[float]
    seconds: Sequence[float]


def plot_training(path: Path, title: str, curves: Sequence[Curve]) -> None:
    """Write a PNG to `path`: the curves' losses on the left, their step times in ms on the right (logarithmic).

    Raises `ConfigError` when the file cannot be written or matplotlib is not installed.
    """
    figure = new_figure(11, 4.2)
    left, right = figure.subplots(1, 2)
    for index, curve in enumerate(curves):
        style = _STYLES[index % len(_STYLES)]
        steps = range(1, len(curve.losses) + 1)
        left.plot(steps, curve.losses, label=curve.name, **style)
        right.plot(steps, [1e3 * seconds for seconds in curve.seconds], label=curve.name, **style | {"linewidth": 1.5})
    left.set(xlabel="step", ylabel="loss", title="Loss, on the same batches")
    right.set(xlabel="step", ylabel="ms", yscale="log", title="Step time (peaks: compilation)")
    right.legend()
    left.legend()
    figure.suptitle(title)
    save_figure(figure, path, "Give another folder with --out.")


@dataclass(frozen=True, slots=True)
class BandwidthCurve:
    """The bandwidth that one arm reached at each size."""

    name: str
    sizes_bytes: Sequence[int]
    gb_per_s: Sequence[float]


@dataclass(frozen=True, slots=True)
class BandwidthPanel:
    """The curves of one op, and the bandwidth that the hardware allows (None: not known) with its name."""

    title: str
    curves: Sequence[BandwidthCurve]
    limit_gb_per_s: float | None
    limit_name: str


def plot_bandwidth(path: Path, title: str, panels: Sequence[BandwidthPanel]) -> None:
    """Write a PNG to `path`: algorithm bandwidth over size, both logarithmic, side by side for each panel.

    Raises `ConfigError` when the file cannot be written or matplotlib is not installed.
    """
    figure = new_figure(max(6.5, 4.8 * len(panels)), 4.4)
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for curve in panel.curves:
            axes.plot(curve.sizes_bytes, curve.gb_per_s, label=curve.name, marker="o", markersize=3.5, linewidth=1.5)
        if panel.limit_gb_per_s is not None:
            axes.axhline(panel.limit_gb_per_s, label=panel.limit_name, color="#555555", linestyle="--", linewidth=1.0)
        axes.set_xscale("log", base=2)
        axes.set(yscale="log", xlabel="bytes", ylabel="algorithm bandwidth, GB/s", title=panel.title)
        axes.xaxis.set_major_formatter(lambda size, _: _bytes(size))
        axes.grid(visible=True, alpha=0.3)
        axes.legend()
    figure.suptitle(title)
    save_figure(figure, path, "Give another --plot path.")


@dataclass(frozen=True, slots=True)
class EfficiencyCurve:
    """The scaling efficiency of one algorithm (1: as fast as one rank alone) at each number of ranks."""

    name: str
    ranks: Sequence[int]
    efficiencies: Sequence[float]


@dataclass(frozen=True, slots=True)
class TimelineRow:
    """One step: spans `(start, end)` of compute and of its collectives, in ms from the step's start."""

    name: str
    forward_ms: tuple[float, float]
    backward_ms: tuple[float, float]
    optimizer_ms: tuple[float, float]
    transfers_ms: Sequence[tuple[float, float]]


def plot_steps(
    path: Path, title: str, curves: Sequence[EfficiencyCurve], timeline_title: str, rows: Sequence[TimelineRow]
) -> None:
    """Write a PNG to `path`: efficiency over the number of ranks on the left, the timelines of `rows` on the right.

    Raises `ConfigError` when the file cannot be written or matplotlib is not installed.
    """
    figure = new_figure(13, max(4.2, 1.6 + 0.7 * len(rows)))
    left, right = figure.subplots(1, 2, width_ratios=(2, 3))
    for curve in curves:
        left.plot(curve.ranks, curve.efficiencies, label=curve.name, marker="o", markersize=3.5, linewidth=1.5)
    left.set_xscale("log")
    left.set(ylim=(0, 1.05), xlabel="ranks", ylabel="compute of one rank / step", title="Scaling efficiency")
    left.grid(visible=True, alpha=0.3)
    left.legend()
    for at, row in enumerate(rows):
        for name, color, span in (
            ("forward", "#bbbbbb", row.forward_ms),
            ("backward", "#0072b2", row.backward_ms),
            ("optimizer", "#555555", row.optimizer_ms),
        ):
            right.broken_barh([_width(span)], (at - 0.4, 0.4), color=color, label=name if at == 0 else None)
        spans = [_width(span) for span in row.transfers_ms]
        right.broken_barh(
            spans, (at, 0.4), color="#e69f00", edgecolor="white", linewidth=0.5, label=None if at else "collectives"
        )
    right.set_yticks(range(len(rows)), [row.name for row in rows])
    right.invert_yaxis()
    right.set(xlabel="ms", title=timeline_title)
    right.legend()
    figure.suptitle(title)
    save_figure(figure, path, "Give another --plot path.")


def _width(span: tuple[float, float]) -> tuple[float, float]:
    return span[0], span[1] - span[0]


def _bytes(size: float) -> str:
    for unit, factor in (("G", 1 << 30), ("M", 1 << 20), ("K", 1 << 10)):
        if size >= factor:
            return f"{size / factor:g}{unit}"
    return f"{size:g}"


def new_figure(width_inches: float, height_inches: float) -> Any:
    """Return an empty figure of matplotlib. Raises `ConfigError` when that is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "matplotlib is not installed, and the plot is drawn with it. Install it with: pip install 'deepytorch[hf]'"
        ) from error
    figure = Figure(figsize=(width_inches, height_inches), layout="constrained")
    FigureCanvasAgg(figure)  # no pyplot: the user's own figures and backend stay untouched
    return figure


def save_figure(figure: Any, path: Path, remedy: str) -> None:
    """Write a figure as PNG. Raises `ConfigError`, which ends with `remedy`, when the file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise ConfigError(f"The plot {path} cannot be written: {error.strerror}. {remedy}") from error
