"""Models here are tiny: on a machine that others use too, a second thread costs a hundred times what it saves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from deepytorch.compiler.step import kept_choices, turns


@pytest.fixture(autouse=True)
def _no_trials_so_far(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A process has only so many trials, one at a time, and none of a region whose form an earlier run has found."""
    monkeypatch.setattr(turns, "_trials_begun", 0)
    monkeypatch.setattr(turns, "_ON_TRIAL", [])  # a region of an earlier test may be alive, in the middle of its trial
    monkeypatch.setattr(kept_choices, "choices_file", lambda: tmp_path / "cache" / "tuned" / "forms.json")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
