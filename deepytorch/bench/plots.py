"""Pictures of results, drawn without a display."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from deepytorch.errors import ConfigError

# Wide and pale below, narrow and dark above: curves that fall on one another stay visible.
_STYLES = (
    {"color": "#bbbbbb", "linewidth": 6.0},
    {"color": "#e69f00", "linewidth": 3.0},
    {"color": "#0072b2", "linewidth": 1.2},
)


@dataclass(frozen=True, slots=True)
class Curve:
    """What one arm's training looked like: the loss and the seconds of every step."""

    name: str
    losses: Sequence[float]
    seconds: Sequence[float]


def plot_training(path: Path, title: str, curves: Sequence[Curve]) -> None:
    """Write a PNG to `path`: the curves' losses on the left, their step times in ms on the right (logarithmic).

    Raises `ConfigError` when the file cannot be written or matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "matplotlib is not installed, and the plot is drawn with it. Install it with: pip install 'deepytorch[hf]'"
        ) from error
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    FigureCanvasAgg(figure)  # no pyplot: nothing of the user's own figures or backend is touched
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
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise ConfigError(
            f"The plot {path} cannot be written: {error.strerror}. Give another folder with --out."
        ) from error
