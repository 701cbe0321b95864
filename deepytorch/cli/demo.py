"""`deepytorch demo`: one small model trained three ways."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from deepytorch.bench.models import MODELS
from deepytorch.bench.options import TextFile, dtype_name


def demo(
    data: TextFile = None,
    model: Annotated[str, typer.Option(metavar="|".join(MODELS), help="The model; its weights are random.")] = "llama",
    steps: Annotated[int, typer.Option(min=4, help="Training steps of each of the three runs.")] = 50,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows in a batch.")] = 8,
    device: Annotated[str, typer.Option(help="Where to run: cpu, cuda, cuda:1, ...")] = "cpu",
    dtype: Annotated[
        str,
        typer.Option(metavar="fp32|bf16|fp16", help="fp32, or autocast to bf16 or fp16 with weights in fp32."),
    ] = "fp32",
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where the plot goes; made if missing.")] = Path(
        "deepytorch-demo"
    ),
) -> None:
    """Train a small model in eager mode, with stock torch.compile and with deepytorch, and compare speed and losses.

    The weights are random and nothing is downloaded. About 3 minutes on 2 CPU cores. Exits with 2 if a run fails or
    its losses differ from those of eager mode.
    """
    from deepytorch.demo import DemoOptions, run_demo

    options = DemoOptions(
        data=data,
        model=model,
        steps=steps,
        batch_size=batch_size,
        device=device,
        dtype=dtype_name(dtype),
        out=out,
    )
    run_demo(options, Console())
