"""Pictures of results, drawn without a display."""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from xml.etree import ElementTree

from deepytorch.errors import ConfigError

_INK = "#101214"  # of all that is no series: `svg_of` leaves it to the page, which may be dark
_SHAPES = "osD^vPX"
_LABEL_PLACES = ((5, 0, "left", "center"), (-5, 0, "right", "center"), (0, 5, "center", "bottom"),
    (0, -5, "center", "top"), (5, 5, "left", "bottom"), (-5, 5, "right", "bottom"), (5, -5, "left", "top"),
    (-5, -5, "right", "top"))  # fmt: skip


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


def draw(plot: Plot) -> Any:
    """Return a figure of matplotlib with a plot. Raises `ConfigError` when that is not installed."""
    figure = new_figure(6.8, 4.6)
    import matplotlib

    with matplotlib.rc_context({"text.parse_math": False}):  # a dollar in a name is a dollar
        axes = figure.subplots()
        axes.set_title(plot.title, loc="left", fontsize=11, color=_INK)
        axes.set_xlabel(plot.x, color=_INK)
        axes.set_ylabel(plot.y, color=_INK)
        for number, points in enumerate(plot.series):
            shape, line = _SHAPES[number % len(_SHAPES)], "--" if points.predicted else "-"
            (drawn,) = axes.plot(points.x, points.y, label=points.name, marker=shape, markersize=4.5, linewidth=1.4)
            drawn.set(linestyle=line if plot.kind == "curves" else "none")
            if points.predicted:
                drawn.set(markerfacecolor="none")
        for y in plot.lines:
            axes.axhline(y, color=_INK, alpha=0.6, linewidth=0.8, zorder=1)
        for name, is_log in (("x", plot.log_x), ("y", plot.log_y)):
            values = {value for points in plot.series for value in getattr(points, name)}
            if is_log and values and min(values) > 0:
                _set_log(axes, name, values)
        axes.margins(0.09 if plot.kind == "scatter" else 0.05)
        axes.grid(visible=True, color=_INK, alpha=0.12)
        axes.tick_params(colors=_INK, labelsize=9)
        axes.spines[:].set(color=_INK, alpha=0.35)
        axes.spines[["top", "right"]].set_visible(False)
        if len(plot.series) > 1 or any(points.predicted for points in plot.series):
            figure.legend(loc="outside lower left", ncols=4, frameon=False, fontsize=9, labelcolor=_INK)
        _draw_labels(figure, axes, plot.series)
    return figure


def _set_log(axes: Any, name: str, values: set[float]) -> None:
    """Give an axis powers, with a tick at each value if there are few, and plain numbers beside the ticks."""
    from matplotlib.ticker import FixedLocator, LogLocator, NullLocator

    axes.set(**{f"{name}scale": "log"})
    axis = getattr(axes, f"{name}axis")
    is_wide = max(values) > 1e3 * min(values)
    few = name == "x" and len(values) <= 8
    axis.set_major_locator(FixedLocator(sorted(values)) if few else LogLocator(subs=(1,) if is_wide else (1, 2, 5)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(lambda value, _: _short(value))


def _short(value: float) -> str:
    """Return a number, with K, M and G for what is a multiple of 1024."""
    for unit, factor in (("G", 1 << 30), ("M", 1 << 20), ("K", 1 << 10)):
        if value >= factor and value % factor == 0:
            return f"{value / factor:g}{unit}"
    return f"{value:,.0f}" if value >= 1e4 else f"{value:.4g}"


def _draw_labels(figure: Any, axes: Any, series: Sequence[Points]) -> None:
    """Write each point's label beside it, where it covers the fewest points and other labels."""
    from matplotlib.transforms import Bbox

    labelled = [each for points in series for each in zip(points.x, points.y, points.labels, strict=False)]
    if not labelled:
        return
    figure.draw_without_rendering()  # gives the axes their place
    renderer = figure.canvas.get_renderer()
    marks = axes.transData.transform([at for points in series for at in zip(points.x, points.y, strict=True)])
    taken = [Bbox.from_extents(x - 4, y - 4, x + 4, y + 4) for x, y in marks]
    for x, y, label in labelled:
        text = axes.annotate(label, (x, y), (0, 0), textcoords="offset points", fontsize=7, color=_INK)

        def put(place: tuple[float, float, str, str], text: Any = text) -> Any:
            text.set(position=place[:2], ha=place[2], va=place[3])
            return text.get_window_extent(renderer)

        def covered(place: tuple[float, float, str, str], put: Any = put) -> int:
            box = put(place)
            return sum(map(box.overlaps, taken)) + 9 * (box.x0 < axes.bbox.x0 or box.x1 > axes.bbox.x1)

        taken.append(put(min(_LABEL_PLACES, key=covered)))


def svg_of(plot: Plot, name: str = "") -> str:
    """Return a plot as an <svg> element for a page of HTML, whose colour of text its axes take.

    It has no size: the page gives it one. Text stays text. Its ids, and those of another plot or `name`, differ.
    Raises `ConfigError` when matplotlib is not installed.
    """
    figure, content = draw(plot), io.BytesIO()
    import matplotlib

    prefix = "plot-" + hashlib.sha256(f"{name} {plot!r}".encode()).hexdigest()[:8]
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": prefix}):
        figure.savefig(content, format="svg", transparent=True)
    root = ElementTree.fromstring(content.getvalue())
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]  # in HTML, elements of <svg> need no namespace
        for key, value in list(element.attrib.items()):
            del element.attrib[key]
            key = key.rpartition("}")[2]
            if key in ("id", "href"):
                value = f"#{prefix}-{value[1:]}" if key == "href" else f"{prefix}-{value}"
            value = re.sub("font-family: [^;]*", "font-family: inherit", value)
            element.attrib[key] = value.replace("url(#", f"url(#{prefix}-").replace(_INK, "currentColor")
        if element.tag == "style":
            element.text = f"#{prefix} {element.text}"
    for element in root.findall("metadata"):
        root.remove(element)
    del root.attrib["width"], root.attrib["height"]
    root.attrib |= {"id": prefix, "role": "img", "aria-label": plot.title}
    return ElementTree.tostring(root, encoding="unicode")
