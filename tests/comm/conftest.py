"""What the tests of the process group stand on: its native code, compiled once before the first of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepytorch.comm.group.native import native


@pytest.fixture(scope="session", autouse=True)
def _compiled() -> None:
    """Compile here, where no deadline of a test runs: ranks then find it in the cache (tests/conftest.py keeps it)."""
    native.load()


@pytest.fixture
def rounds_to_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter cuts float32 off where it makes bfloat16 of it; GPUs round to the nearest even."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    language = pytest.importorskip("triton.language")
    cast = interpreter.InterpreterBuilder.cast_impl

    def rounded(self: Any, source: Any, target: Any) -> Any:
        if source.dtype.scalar == language.float32 and target.scalar == language.bfloat16:
            bits = torch.from_numpy(source.data.copy()).bfloat16().view(torch.int16)
            return interpreter.TensorHandle(bits.numpy().view("uint16"), target.scalar)
        return cast(self, source, target)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "cast_impl", rounded)
