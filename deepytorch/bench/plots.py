"""Pictures of results, drawn without a display."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deepytorch.errors import ConfigError


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
