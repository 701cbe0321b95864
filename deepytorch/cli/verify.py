"""`deepytorch verify`: a script with the import and without, compared."""

from __future__ import annotations

import typer

from deepytorch.cli.output import Output
from deepytorch.verify.records import VerifyOptions


def verify(options: VerifyOptions, json_file: str | None) -> None:
    """Make the runs and show what they say."""
    from deepytorch.verify.run import verify as run_verify
    from deepytorch.verify.show import show

    output = Output(json_file)
    verdict = output.watch(run_verify, options)
    show(verdict, output.console)
    output.json(verdict.to_json())
    raise typer.Exit(0 if verdict.agrees else 1)
