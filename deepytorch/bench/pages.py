"""Pages of results as Markdown and as HTML, which has its styles and drawings in it and loads nothing.

A page is a list of sections; `markdown_page` and `sections_page` write the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from urllib.parse import quote

from deepytorch.bench.plots import Plot, svg_of
from deepytorch.bench.table import Table, html_of, markdown_of, markdown_text

_STYLE = """
:root { color-scheme: light dark; --page: #fcfcfb; --card: #ffffff; --text: #1b1c1e; --soft: #5c6066; --line: #dfe1e4; }
@media (prefers-color-scheme: dark) {
  :root { --page: #17181a; --card: #202225; --text: #e8e9eb; --soft: #a3a8af; --line: #383b40; } }
@media (min-width: 700px) { td:first-child { white-space: nowrap; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1080px; padding: 24px 20px 48px; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 22px; margin: 0 0 2px; } h3 { font-size: 14px; margin: 24px 0 4px; }
h2 { font-size: 18px; margin: 40px 0 8px; padding-top: 12px; border-top: 1px solid var(--line); }
h1, h2, h3, p, li, dd, pre { overflow-wrap: anywhere; } p, li { max-width: 80ch; } a { color: inherit; }
.soft, dt { color: var(--soft); font-size: 13px; } nav a { margin-right: 16px; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 16px; margin: 0 0 8px; } dd { margin: 0; }
pre, figure { margin: 8px 0; padding: 10px 12px; background: var(--card); border: 1px solid var(--line);
  border-radius: 8px; overflow-x: auto; font-size: 13px; white-space: pre-wrap; }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 480px), 1fr)); gap: 0 12px; }
svg { display: block; width: 100%; max-width: 760px; min-width: 400px; height: auto; }
.scroll { overflow: auto; max-height: 520px; } table { border-collapse: collapse; font-size: 14px; }
th, td { text-align: left; padding: 4px 20px 4px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--soft); font-weight: 500; position: sticky; top: 0; background: var(--page); }
.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """One part of a page, below its title. plots: by the names of their pictures."""

    title: str
    facts: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()
    command: str = ""
    tables: Sequence[Table] = ()
    plots: Mapping[str, Plot] = field(default_factory=dict)


def markdown_page(title: str, sections: Iterable[Section], pictures: str) -> list[str]:
    """Return the lines of the page. pictures: the folder of pictures, as seen from the page."""
    lines = [f"# {markdown_text(title)}"]
    for section in sections:
        lines += ["", f"## {markdown_text(section.title)}", ""]
        lines += [f"- {name}: {markdown_text(text)}" for name, text in section.facts.items()]
        lines += [f"- {markdown_text(note)}" for note in section.notes]
        if section.command:
            fence = "`" * max([3, *(1 + len(ticks) for ticks in re.findall("`+", section.command))])
            lines += ["", f"{fence}bash", section.command, fence]
        for table in section.tables:
            lines += ["", *markdown_of(table)]
        for name, plot in section.plots.items():
            lines += ["", f"![{markdown_text(plot.title)}]({pictures}/{quote(name)})"]
    return lines


def sections_page(title: str, sections: Sequence[Section]) -> str:
    """Return the page as HTML."""
    links = [f'<a href="#s{number}">{escape(section.title)}</a>' for number, section in enumerate(sections)][1:]
    parts = []
    for number, section in enumerate(sections):
        facts = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in section.facts.items())
        notes = "".join(f"<li>{escape(note)}</li>" for note in section.notes)
        plots = "".join(f"<figure>{svg_of(plot, name)}</figure>" for name, plot in section.plots.items())
        parts += [
            f'<section id="s{number}"><h2>{escape(section.title)}</h2>',
            f"<dl>{facts}</dl>" if facts else "",
            f"<ul>{notes}</ul>" if notes else "",
            f"<pre><code>{escape(section.command)}</code></pre>" if section.command else "",
            f'<div class="plots">{plots}</div>' if plots else "",
            *map(html_of, section.tables),
            "</section>",
        ]
    return html_page(title, f"<h1>{escape(title)}</h1>\n<nav>{' '.join(links)}</nav>\n{''.join(parts)}")


def html_page(title: str, body: str, style: str = "") -> str:
    """Return a whole page of HTML. style: rules besides those that all pages have."""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title><style>{_STYLE}{style}</style></head><body>
{body}
</body></html>
"""
