"""Pictures of results, drawn without a display."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from deepytorch.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Points:
    """One series of a plot. predicted: not measured; drawn apart, dashed and hollow."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    labels: tuple[str, ...] = ()  # of each point
    predicted: bool = False


@dataclass(frozen=True, slots=True)
class Plot:
    """A plot with one pair of axes: curves, or a scatter of points."""

    title: str
    kind: Literal["curves", "scatter"]
    x: str
    y: str
    series: tuple[Points, ...]
    log_x: bool = False
    log_y: bool = False
    lines: tuple[float, ...] = ()  # values of y at which a thin line is drawn, such as 1 for a ratio


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


def draw_curve(axes: Any, name: str, x: Sequence[float], y: Sequence[float]) -> None:
    """Draw one of several curves, with a mark at each point."""
    axes.plot(x, y, label=name, marker="o", markersize=3.5, linewidth=1.5)
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
