"""Options and habits that several commands share."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from deepytorch.bench.options import dtype_name
from deepytorch.errors import ConfigError


class Model(str, Enum):
    """Families of Hugging Face models, made with random weights."""

    llama = "llama"
    qwen2 = "qwen2"
    qwen3_moe = "qwen3_moe"
    gpt_oss = "gpt_oss"
    gpt2 = "gpt2"
    bert = "bert"
    bart = "bart"
    t5 = "t5"


class Compress(str, Enum):
    """Types to which values may be cast between hosts."""

    bf16 = "bf16"
    fp16 = "fp16"
    fp8 = "fp8"


class Lowering(str, Enum):
    """Lowerings of the rewritten graph."""

    inductor = "inductor"
    aot_eager = "aot_eager"
    eager = "eager"


ModelFamily = Annotated[Model, typer.Option(help="Model architecture; weights are random.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Rows in a batch.")]
Device = Annotated[str, typer.Option(help="Where to run: cpu, cuda, cuda:1, ...")]


def dtype_of(text: str) -> str:
    """Return the dtype that a text names, in our spelling or torch's. Raises `typer.BadParameter`."""
    try:
        return dtype_name(text)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from None


DtypeOf = Annotated[
    str,
    typer.Option(
        parser=dtype_of, metavar="fp32|bf16|fp16", help="fp32, or autocast to bf16 or fp16 with weights in fp32."
    ),
]
JsonFile = Annotated[
    str | None,
    typer.Option("--json", metavar="FILE|-", help="Write the result as one JSON object to a file; -: to stdout."),
]

Markdown = Annotated[Path | None, typer.Option(metavar="FILE", help="Write the table as a Markdown page.")]
