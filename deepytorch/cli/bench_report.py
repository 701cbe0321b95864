"""`deepytorch bench report`: result files as pages."""

from __future__ import annotations

from deepytorch.bench.report import ReportOptions, run_report
from deepytorch.cli.output import Output


def report(options: ReportOptions) -> None:
    """Write both pages, and say how much was found."""
    output, found = Output(None), run_report(options)
    output.line(
        f"{found.rows} rows of {found.files} files, {found.failed} of them failed: {found.html}, {found.markdown}"
    )
    if options.against is not None:
        output.line(
            f"Against {options.against}: {found.regressions} figures worse, {found.improvements} better, "
            f"{found.missing} rows missing, {found.newly_failed} newly failed."
        )
