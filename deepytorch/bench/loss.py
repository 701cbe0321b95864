"""`deepytorch bench loss`: time and memory of a linear layer and its cross-entropy, forward and backward.

The loss runs in eager, compiled by Inductor, and in one operator that never holds all logits, in one process
(`linear_loss`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from typer import Option

from deepytorch.bench.benchmark import Benchmark, Cell, Place
from deepytorch.bench.figures import shown
from deepytorch.bench.options import AnyDevice, check_declared
from deepytorch.bench.results import Results, Row
from deepytorch.bench.table import Table
from deepytorch.bench.unpad import EAGER, in_one_process
from deepytorch.errors import ConfigError

_KEY = ("rows", "hidden_size", "vocab_size", "ignored", "dtype")


@dataclass(frozen=True, kw_only=True, slots=True)
class LossOptions:
    """Time a language model's head and its loss, forward and backward, and what memory they take.

    In eager, compiled by Inductor, and in deepytorch's operator, which holds the logits in pieces.
    """

    rows: Annotated[int, Option(min=1, help="Tokens.")] = 4096
    hidden_size: Annotated[int, Option(min=1, help="Width of the hidden states.")] = 256
    vocab_size: Annotated[int, Option(min=2, help="Classes; 128256 are those of Llama 3.")] = 128_256
    ignored: Annotated[float, Option(min=0.0, max=0.99, help="Fraction of the tokens that have no label.")] = 0.0
    dtype: Annotated[str, Option(metavar="fp32|bf16|fp16", help="Of hidden states and weight.")] = "fp32"
    device: AnyDevice = "cpu"
    rounds: Annotated[int, Option(min=1, help="How often each setup is timed.")] = 3

    def __post_init__(self) -> None:
        """Raise `ConfigError` for options that cannot be run with."""
        check_declared(self)
        if self.ignored >= 1.0:
            raise ConfigError(f"ignored is {self.ignored:g}, expected a fraction from 0 to below 1.")


class Loss(Benchmark[LossOptions]):
    """See this module."""

    name = "loss"
    options = LossOptions

    def cells(self, options: LossOptions) -> Sequence[Cell]:
        """Return one cell: one process, which has all setups."""
        key = {name: getattr(options, name) for name in _KEY}
        return [Cell(key=key, setups=[in_one_process(options)], place=Place(threads=None), kind="loss")]

    def rows(self, options: LossOptions, cell: Cell, found: Mapping[str, list[dict[str, Any]]]) -> list[Row]:
        """Return a row for each setup. speedup: eager's time over its own. peak_mb: beyond the inputs."""
        return [
            Row(
                key={**cell.key, "setup": name},
                figures={**figures, "speedup": run[EAGER]["step_s"] / figures["step_s"]},
            )
            for [run] in found.values()
            for name, figures in run.items()
        ]

    def tables(self, results: Results) -> list[Table]:
        """Return the one table."""
        eager = next((row.figures for row in results.having(setup=EAGER) if not row.failed), {})
        rows = tuple(
            (
                str(row.key["setup"]),
                shown(row, "step_s", "{:,.1f}", 1e3),
                shown(row, "step_s", "{:.2f}", 1 / eager.get("step_s", 1.0)),
                shown(row, "peak_mb", "{:,.0f}"),
                shown(row, "peak_mb", "{:.2f}", 1 / eager["peak_mb"]) if eager.get("peak_mb") else "-",
                row.failed or shown(row, "loss", "{:.5f}"),
            )
            for row in results.rows
        )
        asked = results.options
        title = (
            f"Linear and cross-entropy, {asked['rows']} x {asked['hidden_size']} x {asked['vocab_size']}, "
            f"{100 * asked['ignored']:.0f} % ignored, {asked['dtype']}, {asked['device']}"
        )
        if eager:
            title += f"; gradients {eager['gradients_mb']:,.0f} MiB"
        columns = ("setup", "ms", "of eager's", "peak, MiB", "of eager's", "loss")
        return [Table(title, columns, rows, ("setup", "loss"))] if rows else []
