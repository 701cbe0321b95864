"""Models here are tiny: on a machine that others use too, a second thread costs a hundred times what it saves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from deepytorch.compiler.step import turns


@pytest.fixture(autouse=True)
def _no_trials_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "_trials_begun", 0)  # a process has only so many


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
