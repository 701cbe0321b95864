"""`deepytorch bench sharded`: sharded training with values rounded between hosts."""

from __future__ import annotations

from typing import Annotated

import typer

from deepytorch.cli.options import BatchSizeOfRank, Data, JsonFile, ModelSize, SizeOf, StallTimeout
from deepytorch.cli.output import Output


def sharded(
    size: SizeOf = ModelSize.demo,
    batch_size: BatchSizeOfRank = 2,
    arms: Annotated[
        str,
        typer.Option(
            metavar="LIST",
            help="What to compare, with commas. gloo: the stock process group. exact: deepytorch's, values as they "
            "are. int8, fp8: deepytorch's, values rounded to 8 bits between hosts. The first is what the others are "
            "compared with.",
        ),
    ] = "exact,int8",
    data: Data = None,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks (processes) on each host.")] = 2,
    hosts: Annotated[
        int, typer.Option(min=2, help="Hosts (machines), simulated on this one, which needs root: see deepytorch lab.")
    ] = 2,
    rate: Annotated[
        str, typer.Option(metavar="RATE", help="Bits per second that each host may send, and receive: 200mbit, 1gbit.")
    ] = "200mbit",
    steps: Annotated[int, typer.Option(min=3, help="Training steps of each.")] = 100,
    timeout: StallTimeout = 300.0,
    json_file: JsonFile = None,
) -> None:
    """Train a sharded Llama (FSDP2) with weights and gradients rounded between hosts; compare step time and losses.

    The runs take turns step by step, on the same batches. Starts its ranks on simulated hosts and ends them.
    """
    from deepytorch.bench.options import names
    from deepytorch.bench.sharded import LAST_LOSSES, run_sharded
    from deepytorch.bench.sharded_worker import ShardedOptions

    output = Output(json_file)
    options = ShardedOptions(
        size=size.value,
        batch_size=batch_size,
        arms=names(arms),
        data=data,
        ranks=ranks,
        hosts=hosts,
        rate=rate,
        steps=steps,
        timeout_s=timeout,
    )
    result = output.watch(run_sharded, options)
    title = f"FSDP2, Llama ({size.value}), {hosts} hosts of {ranks} ranks at {rate}, {steps} steps"
    columns = ("arm", "step", f"against {result.arms[0].name}", "loss at the end", "of it")
    rows = [
        (
            arm.name,
            f"{1e3 * arm.step_seconds:,.0f} ms",
            f"{arm.speedup:.2f}x",
            f"{arm.last_loss:.4f}",
            f"{arm.loss_ratio:.4f}",
        )
        for arm in result.arms
    ]
    output.table(title, columns, rows, left=("arm",))
    output.line(f"The loss at the end is the mean over the last {LAST_LOSSES} steps and all ranks.")
    output.json(result.to_json())
