"""Small data and one thread: for what these tests run, threads that wait for each other cost more than they give."""

from __future__ import annotations

import json

import pytest
import torch


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
