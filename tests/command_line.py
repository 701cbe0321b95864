"""The command line, run in the process of a test."""

from __future__ import annotations

import sys

import pytest

from deepytorch import cli


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run `deepytorch` with these arguments; return the exit status."""
    monkeypatch.setattr(sys, "argv", ["deepytorch", *arguments])
    try:
        cli.main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0
