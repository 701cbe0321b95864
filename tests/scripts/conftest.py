"""The process that scenarios are forked from: one for each process of pytest."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.scripts.runner import Runner


@pytest.fixture(scope="session")
def runner() -> Iterator[Runner]:
    """Started by the first test that needs it."""
    if sys.platform != "linux":
        pytest.skip("scenarios are forked from a process whose threads are counted, which is Linux only")
    started = Runner()
    yield started
    started.close()
