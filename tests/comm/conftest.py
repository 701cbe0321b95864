"""What the tests of the process group stand on: its native code, compiled once before the first of them."""

from __future__ import annotations

import pytest

from deepytorch.comm.group import native


@pytest.fixture(scope="session", autouse=True)
def _compiled() -> None:
    """Compile here, where no deadline of a test runs: ranks then find it in the cache."""
    native.load()
