"""Small data and one thread: for what these tests run, threads that wait for each other cost more than they give."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

import deepytorch
from deepytorch.bench.unpad import UnpadJob, UnpadOptions


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def rows_file(tmp_path_factory):
    """Rows of uneven lengths in the Alpaca layout."""
    path = tmp_path_factory.mktemp("rows") / "rows.json"
    words = ("one", "two", "three", "four", "five", "six", "seven")
    rows = [
        {
            "instruction": f"Say {' and '.join(words[: 1 + number % 5])}.",
            "input": words[number % 7] if number % 3 else "",
            "output": " ".join(words[(number + step) % 7] for step in range(1 + number * 7 % 60)),
        }
        for number in range(40)
    ]
    path.write_text(json.dumps(rows))
    return path


@pytest.fixture
def job(rows_file, monkeypatch):
    """Return what makes a small job of `bench unpad`, with the backend's counters replaced: its setups run without."""
    counts = {"recompiles": 1, "steps_packed": 7, "steps_padded": 2, "host_ms_per_step": 0.25}
    monkeypatch.setitem(vars(deepytorch), "report", lambda reset=False: SimpleNamespace(to_json=lambda: counts))

    def make(model="llama", backend="eager", **changes) -> UnpadJob:
        smallest = {"size": "tiny", "steps": 2, "rounds": 1, "batch_size": 4, "vocab_size": 400, "data": rows_file}
        options = UnpadOptions(models=(model,), **smallest | changes)
        return UnpadJob(model=model, options=options, max_length=256, backend=backend, stock_backend="eager")

    return make
