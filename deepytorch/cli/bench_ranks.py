"""`deepytorch bench comm`: several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deepytorch.cli.options import (
    FlowRate,
    Hosts,
    JsonFile,
    RanksOfHost,
    Rate,
    StallTimeout,
)
from deepytorch.cli.output import Output


def comm(
    ranks: RanksOfHost = None,
    hosts: Hosts = 1,
    rate: Rate = None,
    flow_rate: FlowRate = None,
    backends: Annotated[
        str, typer.Option(metavar="LIST", help="Process groups to compare, with commas.")
    ] = "deepytorch,gloo",
    sizes: Annotated[
        str,
        typer.Option(
            metavar="FIRST:LAST[:FACTOR]|LIST",
            help="Buffer sizes in bytes, with K, M or G (powers of 1024). 1K:256M doubles from the first to the last; "
            "a third number is another factor.",
        ),
    ] = "1K:256M",
    dtype: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="Element type: float32, bfloat16, float16, float64, int32, int64, int8 or uint8."
        ),
    ] = "float32",
    op: Annotated[
        str,
        typer.Option(
            metavar="LIST",
            help="Collectives, with commas: all_reduce, reduce_scatter, all_gather, broadcast, all_to_all, barrier.",
        ),
    ] = "all_reduce",
    redop: Annotated[
        str, typer.Option(metavar="sum|avg|min|max", help="How all_reduce and reduce_scatter combine values.")
    ] = "sum",
    algorithms: Annotated[
        str,
        typer.Option(
            metavar="LIST",
            help="Algorithms of the deepytorch group (docs/algorithms.md), with commas, each timed by itself; auto: "
            "the one that it chooses.",
        ),
    ] = "auto",
    compress: Annotated[
        str,
        typer.Option(
            metavar="LIST",
            help="Types that the deepytorch group casts values to between hosts, with commas, each timed by itself: "
            "none, bf16, fp16.",
        ),
    ] = "none",
    allocated: Annotated[
        bool,
        typer.Option(
            "--allocated", help="Time each once more with buffers in shared memory, from deepytorch.comm.allocate."
        ),
    ] = False,
    rounds: Annotated[
        int, typer.Option(min=1, help="How often each size of each is timed, in turn with the others.")
    ] = 5,
    min_time_ms: Annotated[
        float,
        typer.Option(metavar="MS", help="Milliseconds for which each size is timed at least, all rounds together."),
    ] = 100.0,
    timeout: StallTimeout = 300.0,
    json_file: JsonFile = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw bandwidth over buffer size.")] = None,
    explain: Annotated[
        bool,
        typer.Option("--explain", help="Show which algorithm would be chosen for each size, and why; time nothing."),
    ] = False,
) -> None:
    """Time all_reduce and other collectives of the deepytorch process group against gloo, over buffer sizes.

    The table has the columns of nccl-tests. Starts its ranks on this machine and ends them; under torchrun it runs on
    the ranks that are there. Exits with 2 if a rank fails or an element of a result is wrong.
    """
    from deepytorch.bench import comm_show as showing
    from deepytorch.bench.comm import ranks_of_host, torchrun_shape
    from deepytorch.bench.comm_options import CommOptions, parse_sizes
    from deepytorch.bench.options import names

    shape = torchrun_shape()
    options = CommOptions(
        ranks=ranks_of_host(ranks, hosts, shape),
        hosts=shape[1] if shape else hosts,
        rate=rate,
        flow_rate=flow_rate,
        backends=names(backends),
        sizes_bytes=parse_sizes(sizes),
        dtype=dtype,
        ops=names(op),
        redop=redop,
        algorithms=names(algorithms),
        compress=names(compress),
        allocated=allocated,
        rounds=rounds,
        min_time_ms=min_time_ms,
        timeout_s=timeout,
    )
    output = Output(json_file)
    if explain:
        showing.explain_and_show(options, output.console, in_place=shape is not None)
        return
    result = showing.run_and_show(options, output.console, in_place=shape is not None)
    if result is None:  # under torchrun rank 0 shows the result
        return
    output.json(result.to_json())
    if plot is not None:
        showing.plot_result(plot, result)
    showing.refuse_wrong(result)
