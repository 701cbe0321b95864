"""`deepytorch config`: the page of settings."""

from __future__ import annotations

import typer


def config() -> None:
    """Print every setting with its default and meaning, as Markdown."""
    from deepytorch.reference import markdown

    typer.echo(markdown())
