"""The reference of settings (`deepytorch config`): defaults and meanings, read from the dataclasses that check them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

from deepytorch.comm.group.options import Options
from deepytorch.compiler.config import CompilerConfig
from deepytorch.config import Environment

# In docstrings: "`name`: meaning." or "name, other: meaning.", at the beginning of a line or after a sentence.
_ENTRY = re.compile(r"(?:^|(?<=\. ))((?:`?\w+`?)(?: \([^)]*\))?(?:, `?\w+`?)*): ", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Setting:
    """One field of a configuration, for its reader. value: its default, or the values that it may have."""

    name: str
    value: str
    meaning: str


@dataclass(frozen=True, slots=True)
class Section:
    """The settings of one dataclass, and how they are given."""

    title: str
    given: str
    settings: tuple[Setting, ...]
    column: str = "default"


def sections() -> tuple[Section, ...]:
    """Return every configuration that a user can write."""
    return (
        Section(
            "Compiler options",
            '`torch.compile(model, backend="deepytorch", options={...})`, `deepytorch.optimize(model, options={...})`, '
            "`deepytorch.configure(options={...})`. torch takes `mode` or `options`; `mode` may stand among these.",
            settings(CompilerConfig),
        ),
        Section(
            "Process group options",
            '`torch.distributed.init_process_group("deepytorch", pg_options=deepytorch.comm.Options(...))`, likewise '
            "`new_group`.",
            settings(Options),
        ),
        Section(
            "Environment variables",
            "Read once, checked; any other value is an error.",
            settings(Environment, written=re.compile(r"`(DEEPYTORCH\w*)=([^`]*)`")),
            "values",
        ),
    )


def settings(kind: Any, written: re.Pattern[str] | None = None) -> tuple[Setting, ...]:
    """Return the fields of a dataclass. written: finds the user's name and values in a field's heading."""
    meanings = _meanings(kind.__doc__ or "")
    found = []
    for field in fields(kind):
        heading, meaning = meanings[field.name]
        given = written.search(heading) if written is not None else None
        name, value = (given[1], given[2]) if given else (field.name, _default(field))
        found.append(Setting(name, value.replace("|", "\\|"), meaning))
    return tuple(found)


def markdown() -> str:
    """Return the reference as a page of the documentation."""
    lines = ["# Configuration", "", "Made by `deepytorch config` from the dataclasses that check these settings.", ""]
    for section in sections():
        lines += [f"## {section.title}", "", section.given, "", f"| name | {section.column} | meaning |"]
        lines.append("| --- | --- | --- |")
        lines += [f"| `{each.name}` | `{each.value}` | {each.meaning} |" for each in section.settings]
        lines.append("")
    return "\n".join(lines)


def _meanings(docstring: str) -> Mapping[str, tuple[str, str]]:
    """Return, for each field, the heading that it stands in, and the text after it."""
    text = re.sub(r"\n[ \t]+", "\n", docstring)
    entries = list(_ENTRY.finditer(text))
    found = {}
    for number, entry in enumerate(entries):
        end = entries[number + 1].start() if number + 1 < len(entries) else len(text)
        meaning = " ".join(text[entry.end() : end].split())
        for name in re.findall(r"\w+", re.sub(r"\([^)]*\)", "", entry[1])):
            found[name] = (entry[1], meaning)
    return found


def _default(field: Any) -> str:
    if field.default is not MISSING:
        return repr(field.default)
    return repr(field.default_factory())
