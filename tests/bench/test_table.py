"""Tables of a terminal: figures stay whole in a narrow one, and a reason among them takes lines of its own."""

from __future__ import annotations

import io

from rich.console import Console

from deepytorch.bench.table import Table, print_table

REASON = "TimeoutError: code was still being compiled after 451 s, which would slow down the steps of all setups"


def test_a_reason_among_figures_takes_lines_and_cuts_nothing_off() -> None:
    console = Console(file=io.StringIO(), width=60)
    rows = (("llama2-13b", "628.0", "1,251.3", "+99 %"), ("sd-2.1", "3.0", REASON, ""))
    print_table(console, Table("Gains", ("model", "native /s", "deepytorch /s", "gain"), rows, ("model",)))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    [whole] = [line.split() for line in lines if "llama2-13b" in line]
    assert whole == ["llama2-13b", "628.0", "1,251.3", "+99", "%"]
    words = " ".join(lines).split()
    assert "sd-2.1" in words
    assert "3.0" in words
    assert all(word in words for word in REASON.split())
    assert max(map(len, lines)) <= 80
