"""A profile as a page: one HTML file with its styles and drawings in it, which loads nothing."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace
from html import escape

from deepytorch.bench.pages import html_page
from deepytorch.bench.table import html_of
from deepytorch.profile.advice import advise
from deepytorch.profile.records import COMPILE, GROUPS, Part, Rank
from deepytorch.profile.show import NOTHING_STANDS_OUT, parts_table, regions_table, title
from deepytorch.profile.summary import Profile

_WIDTH, _BAR, _HEIGHT, _LEFT = 860, 26, 160, 64  # of drawings, in px
_MOST_BARS = 200
_CUT_AT = 3.0  # medians: longer steps, such as those that compile, are drawn up to here
_CUT = f"Steps of more than {_CUT_AT:g} times the median, mostly those that compile, are cut off at the top."

_STYLE = """
:root { --compute: #2f6fbd; --communication: #d9822b; --data-loader: #9a4fb0; --optimizer: #4d9a6a; --host: #c94f4f;
  --compile: #8a8f98; --rest: #b9a24b; }
@media (prefers-color-scheme: dark) { :root { --compute: #6fa3e6; --communication: #e9a45c; --data-loader: #c189d3;
  --optimizer: #7cc397; --host: #e58181; --compile: #9ba0a8; --rest: #d3bf70; } }
body { max-width: 960px; } figcaption { color: var(--soft); font-size: 13px; }
svg { max-width: none; min-width: 560px; } svg text { fill: var(--soft); font-size: 12px; }
.axis { stroke: var(--line); } .gap { stroke: var(--card); stroke-width: 1; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 16px; padding: 0; margin: 0 0 8px; list-style: none;
  font-size: 13px; }
.legend i, td i { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 6px; }
table { width: 100%; } td { white-space: pre-line; } .parts tr:last-child td { font-weight: 600; border-bottom: none; }
"""


def page(profile: Profile, trace: str | None) -> str:
    """Return the page of a profile. trace: the name of the trace beside it, if there is one."""
    found = advise(profile)
    advice = "".join(f"<li><b>{escape(each.about)}, {each.share:.0%}.</b> {escape(each.text)}</li>" for each in found)
    link = "" if trace is None else (
        f'<p>A few steps, operator by operator: <a href="{escape(trace)}">{escape(trace)}</a>, for ui.perfetto.dev or '
        "chrome://tracing.</p>"
    )  # fmt: skip
    parts = html_of(replace(parts_table(profile, len(profile.ranks)), title="The parts of a step"))
    for group in GROUPS:
        parts = parts.replace(f"<tr><td>{group}<", f"<tr><td>{_dot(group)}{group}<")
    body = f"""<h1>A step takes {1e3 * profile.seconds:.1f} ms</h1>
<p class="soft">{escape(title(profile))}</p>
<h2>Where it goes</h2>
<figure>{_legend(profile)}{_bars(profile)}</figure>
<h2>What follows</h2>
{f"<ul>{advice}</ul>" if advice else f"<p>{NOTHING_STANDS_OUT}</p>"}
<div class="parts">{parts}</div>
<h2>Step by step</h2>
<figure>{_steps(profile.ranks[profile.slowest])}
<figcaption>Rank {profile.ranks[profile.slowest].rank}. {_CUT}</figcaption></figure>
{link}
{html_of(regions_table(profile)) if profile.regions() else ""}"""
    return html_page(f"deepytorch profile: {profile.command}", body, _STYLE)


def _legend(profile: Profile) -> str:
    shown = [group for group in GROUPS if any(part.group == group for part in profile.parts)]
    return f'<ul class="legend">{"".join(f"<li>{_dot(group)}{group}</li>" for group in shown)}</ul>'


def _color(group: str) -> str:
    return f"var(--{group.replace(' ', '-')})"


def _dot(group: str) -> str:
    return f'<i style="background:{_color(group)}"></i>'


def _svg(height: float, content: Iterable[str], label: str) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" role="img" aria-label="{escape(label)}">{"".join(content)}</svg>'


def _box(x: float, y: float, width: float, height: float, group: str, told: str) -> str:
    return (
        f'<rect class="gap" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
        f'style="fill:{_color(group)}"><title>{escape(told)}</title></rect>'
    )


def _bars(profile: Profile) -> str:
    """Return a bar for each rank, of the parts of its step."""
    longest = max(sum(means.values()) for means in profile.means) or 1.0
    content = []
    for place, (rank, means) in enumerate(zip(profile.ranks, profile.means, strict=True)):
        x, y = float(_LEFT), place * (_BAR + 8)
        content.append(f'<text x="0" y="{y + 17}">rank {rank.rank}</text>')
        for part in profile.parts:
            width = means.get(part, 0.0) / longest * (_WIDTH - _LEFT)
            content.append(_box(x, y, width, _BAR, part.group, f"{part.label}: {1e3 * means.get(part, 0.0):.2f} ms"))
            x += width
    return _svg(len(profile.ranks) * (_BAR + 8), content, "The parts of a step, of each rank")


def _steps(rank: Rank) -> str:
    """Return a column for each step of a rank, or for a few steps together, of its groups."""
    each = -(-len(rank.steps) // _MOST_BARS)
    columns = [rank.steps[at : at + each] for at in range(0, len(rank.steps), each)]
    top = _CUT_AT * statistics.median(step.seconds for step in rank.steps) or 1.0
    width = (_WIDTH - _LEFT) / len(columns)
    content = []
    for share in (0.0, 1 / 3, 2 / 3, 1.0):
        y = 10 + _HEIGHT * (1 - share)
        content.append(f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>')
        content.append(f'<text x="0" y="{y + 4:.1f}">{1e3 * share * top:.0f} ms</text>')
    for place, steps in enumerate(columns):
        means = _grouped([step.parts for step in steps])
        name = f"step {steps[0].number}" + f" to {steps[-1].number}" * (len(steps) > 1)
        note = " (traced)" * any(step.traced for step in steps) + " (not settled)" * (
            not all(step.settled for step in steps)
        )
        reached, total = 0.0, sum(means.values())
        for group in (COMPILE, *(each for each in GROUPS if each != COMPILE)):  # what is cut off is the rest
            end = min(reached + means.get(group, 0.0), top)
            height = (end - reached) / top * _HEIGHT
            told = f"{name}{note}: {group} {1e3 * means.get(group, 0.0):.1f} of {1e3 * total:.1f} ms"
            if height > 0.05:
                content.append(_box(_LEFT + place * width, 10 + _HEIGHT * (1 - end / top), width, height, group, told))
            reached = end
    content.append(f'<text x="{_LEFT}" y="{_HEIGHT + 26}">step {rank.steps[0].number}</text>')
    content.append(f'<text x="{_WIDTH}" y="{_HEIGHT + 26}" text-anchor="end">step {rank.steps[-1].number}</text>')
    return _svg(_HEIGHT + 32, content, "The time of each step")


def _grouped(steps: Sequence[dict[Part, float]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for parts in steps:
        for part, seconds in parts.items():
            found[part.group] = found.get(part.group, 0.0) + seconds / len(steps)
    return found
