"""Tables of outcomes: the report of a run, and the part of a page that says what has run on which device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

from deepytorch.bench.results import read_result, write_text
from deepytorch.bench.table import Table, markdown_of
from deepytorch.errors import ConfigError
from deepytorch.gpu_check.outcome import Check, Outcome
from deepytorch.gpu_check.plan import Expected
from deepytorch.gpu_check.records import DeviceResults

BEGIN = "<!-- From here on made by `deepytorch gpu-check --page docs/gpu.md`, of results/gpu-*.json. -->"
END = "<!-- Until here. -->"
_WORDS = {True: "ok", False: "failed", None: "not made"}
_IN_COLUMNS = ("step_ms", "limit_ms", "limit_efficiency")


def report_table(title: str, outcomes: Sequence[Outcome]) -> Table:
    """Return the table of a run: outcomes in their order, a failed one with the command that shows it again.

    Checks of a group that could not be made for the same reason share a line.
    """
    rows: list[tuple[str, ...]] = []
    for (passed, group, said), each in groupby(outcomes, lambda each: (each.passed, each.group, _first_line(each))):
        together = [*each]
        if passed is None and len(together) > 1:
            rows.append((_WORDS[None], group, f"{len(together)} checks", said, ""))
            continue
        for one in together:
            found = f"{said}\n{one.call}" if passed is False else said
            rows.append((_WORDS[passed], group, one.name, found, f"{one.seconds:.1f}"))
    columns = ("", "what", "check", "found", "seconds")
    return Table(title, columns, tuple(rows), columns[:-1])


def _first_line(outcome: Outcome) -> str:
    return outcome.said.partition("\n")[0]


def plan_table(title: str, plan: Sequence[Expected]) -> Table:
    """Return the table of a plan."""
    rows = tuple(
        (
            each.check.group,
            each.check.name,
            "first, alone" if each.check.is_first else "alone" if each.check.is_timed else "beside others",
            f"{each.seconds:.1f}",
            "an earlier run" if each.measured else "an estimate",
        )
        for each in plan
    )
    return Table(title, ("what", "check", "runs", "seconds", "by"), rows, ("what", "check", "runs", "by"))


def devices_in(folder: Path) -> list[DeviceResults]:
    """Return the results of every GPU whose file is in a folder. Raises `DataError` for one of another layout."""
    return [read_result(DeviceResults, path) for path in sorted(folder.glob("gpu-*.json"))]


def rewrite(page: Path, checks: Sequence[Check]) -> None:
    """Make the marked part of a page anew, from the files in `results` beside it.

    Raises `ConfigError` if the page has no such part.
    """
    text = page.read_text(encoding="utf-8") if page.is_file() else ""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ConfigError(f"{page} has no part between {BEGIN!r} and {END!r}; expected a page with these two lines.")
    made = "\n".join(part(devices_in(page.parent / "results"), checks))
    write_text(page, f"{before}{begin}\n\n{made}\n\n{end}{after}", "--page")


def part(devices: Sequence[DeviceResults], checks: Sequence[Check]) -> list[str]:
    """Return the lines of the part: devices, figures, what failed, what passed, and what has not run. checks: all."""
    tables = (_by_device(devices, checks), _figures(devices), _failed(devices), _subjects(devices, checks))
    shown = [["", *markdown_of(table)] for table in tables if table.rows]
    return [line for lines in shown for line in lines][1:]


def _by_device(devices: Sequence[DeviceResults], checks: Sequence[Check]) -> Table:
    rows = []
    for each in devices:
        found = each.by_key()
        outcomes = [found[check.key].passed if check.key in found else None for check in checks]
        days = sorted({outcome.date for outcome in each.checks})
        versions = "; ".join(dict.fromkeys(outcome.versions for outcome in each.checks))
        days_of = days[0] if len(days) < 2 else f"{days[0]} to {days[-1]}"
        counts = (str(sum(outcome is wanted for outcome in outcomes)) for wanted in (True, False, None))
        rows.append((each.device, each.capability, f"{each.memory_gb} GiB", days_of, versions, *counts))
    columns = ("GPU", "capability", "memory", "day", "versions", "passed", "failed", "not run")
    title = f"Checks that have run, of {len(checks)}"
    return Table(title, columns, tuple(rows), columns[:5])


def _figures(devices: Sequence[DeviceResults]) -> Table:
    rows = []
    for device, outcome in _outcomes(devices):
        if outcome.passed and outcome.figures:
            figures = outcome.figures
            subject, _, setup = outcome.group.partition(": ")
            ms = figures.get("step_ms")
            limit = figures.get("limit_ms")
            share = figures.get("limit_efficiency")
            others = {name: value for name, value in figures.items() if name not in _IN_COLUMNS}
            rows.append(
                (
                    device.short,
                    f"{subject}, {outcome.name}",
                    setup or "deepytorch",
                    "" if ms is None else f"{ms:,.4g}",
                    "" if limit is None else f"{limit:,.4g}",
                    "" if share is None else f"{100 * share:.0f} %",
                    _in_words(others),
                )
            )
    notes = (
        "The limit is the longer of arithmetic and traffic by the device's data sheet, as in roofline.md; "
        "of a step, kernel by kernel. No figure here is computed but that one.",
    )
    columns = ("GPU", "what", "by", "ms", "limit, ms", "of the limit", "and")
    return Table("Figures", columns, tuple(rows), ("GPU", "what", "by", "and"), notes if rows else ())


def _failed(devices: Sequence[DeviceResults]) -> Table:
    rows = tuple(
        (device.short, f"{outcome.group}, {outcome.name}", _first_line(outcome), outcome.call)
        for device, outcome in _outcomes(devices)
        if outcome.passed is False
    )
    columns = ("GPU", "check", "found", "shows it again")
    return Table("What failed", columns, rows, columns)


def _subjects(devices: Sequence[DeviceResults], checks: Sequence[Check]) -> Table:
    """Return how many checks of each group have passed, and why others could not be made; groups that never ran last.

    Checks that there are no more are named.
    """
    rows, never = [], []
    for group in dict.fromkeys(check.group for check in checks):
        cells = [_passed([check for check in checks if check.group == group], group, each) for each in devices]
        if any(cells):
            rows.append((group, *(cell or "none" for cell in cells)))
        else:
            never.append(group)
    columns = ("group of checks", *(f"passed on {each.short}" for each in devices))
    notes = (f"Not run on a GPU yet: {'; '.join(never)}.",) if never else ()
    return Table("What has passed, and what has not run", columns, tuple(rows), columns, notes)


def _passed(of: Sequence[Check], group: str, device: DeviceResults) -> str:
    known = {each.name: each for each in device.checks if each.group == group}
    found = [known.pop(check.name) for check in of if check.name in known]
    if not found and not known:
        return ""
    earlier = [f"earlier: {name}" for name, each in known.items() if each.passed]
    reasons = dict.fromkeys(_first_line(each) for each in found if each.passed is None)
    return "; ".join([f"{sum(each.passed is True for each in found)} of {len(of)}", *earlier, *reasons])


def _outcomes(devices: Sequence[DeviceResults]) -> Iterable[tuple[DeviceResults, Outcome]]:
    return ((device, outcome) for device in devices for outcome in device.checks)


def _in_words(figures: dict[str, float]) -> str:
    from deepytorch.gpu_check.figures.timing import in_words  # loads torch

    return in_words(figures)
