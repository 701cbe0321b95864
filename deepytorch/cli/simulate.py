"""`deepytorch simulate`: the prediction of a training step on machines that one does not have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, cast

import typer

from deepytorch.bench.table import print_table
from deepytorch.cli.options import JsonFile
from deepytorch.cli.output import Output


def simulate(
    topology: Annotated[
        Path,
        typer.Option(
            metavar="FILE", help="Machines and links, as deepytorch doctor --topology --json prints those of this one."
        ),
    ],
    model_profile: Annotated[
        Path,
        typer.Option(metavar="FILE", help="Times and gradient sizes of one training step, as JSON: docs/simulator.md."),
    ],
    ranks: Annotated[
        str,
        typer.Option(
            metavar="LIST",
            help="Numbers of ranks to simulate, with commas; the hosts of --topology are repeated to reach them.",
        ),
    ] = "8,64,1000",
    links: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Measured latencies and bandwidths of those links, as JSON: docs/simulator.md. Default: "
            "typical ones are assumed.",
        ),
    ] = None,
    compress: Annotated[
        str | None,
        typer.Option(
            metavar="bf16|fp16|fp8",
            help="Cast gradients to this type between hosts. Default: none, they are sent as they are.",
        ),
    ] = None,
    json_file: JsonFile = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw efficiency over ranks, and the timelines.")
    ] = None,
) -> None:
    """Predict a data-parallel training step on more machines than you have: step time and scaling efficiency.

    Starts no ranks: compute times come from the model profile, those of collectives from a cost model. Also says
    how much communication the backward pass does not hide.
    """
    from deepytorch.bench import simulate as playing
    from deepytorch.bench import simulate_show as showing
    from deepytorch.bench.model_profile import read_profile
    from deepytorch.comm.group.wire import COMPRESS
    from deepytorch.comm.topology.cost import Links, read_links
    from deepytorch.comm.topology.topology import read_topology

    numbers = showing.parse_ranks(ranks)
    COMPRESS.check_type(compress)
    simulation = playing.simulate(
        read_profile(model_profile),
        read_topology(topology),
        Links() if links is None else read_links(links),
        numbers,
        cast(Any, compress),
    )
    output = Output(json_file)
    print_table(output.console, showing.step_table(simulation))
    output.json(simulation.to_json())
    if plot is not None:
        showing.draw(plot, simulation)
