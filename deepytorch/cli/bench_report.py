"""`deepytorch bench report`: result files as pages."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deepytorch.cli.output import Output


def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of result files.")],
    against: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="An earlier folder: the report says what is worse, better or missing."),
    ] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="The page. Default: DIR/report.html.")] = None,
    markdown: Annotated[Path | None, typer.Option(metavar="FILE", help="The page. Default: DIR/report.md.")] = None,
    tolerance: Annotated[
        float, typer.Option(min=0.0, help="The share by which a figure may be worse and is not said to be.")
    ] = 0.05,
    title: Annotated[str, typer.Option(help="The title of both pages.", show_default=False)] = "",
) -> None:
    """Make one HTML page and one Markdown page of result files: tables, plots, machine, versions, commands.

    The HTML page needs no network.
    """
    from deepytorch.bench.report import ReportOptions, run_report

    output = Output(None)
    options = ReportOptions(
        folder=folder, against=against, html=html, markdown=markdown, tolerance=tolerance, title=title
    )
    found = run_report(options)
    output.line(
        f"{found.rows} rows of {found.files} files, {found.failed} of them failed: {found.html}, {found.markdown}"
    )
    if against is not None:
        output.line(
            f"Against {against}: {found.regressions} figures worse, {found.improvements} better, {found.missing} rows "
            f"missing, {found.newly_failed} newly failed."
        )
