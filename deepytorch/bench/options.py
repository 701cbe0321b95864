"""Options that several benchmarks share: how they are read and checked. All checks raise `ConfigError`."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

from typer import Option
from typer.models import ParameterInfo

from deepytorch.bench.lab import LabOptions
from deepytorch.bench.zoo import TEXT_SIZES
from deepytorch.errors import ConfigError

DTYPE_NAMES = ("fp32", "bf16", "fp16")


Device = Annotated[str, Option(metavar="cpu|cuda", help="Where to train.")]
AnyDevice = Annotated[str, Option(help="Where to run: cpu, cuda, cuda:1, ...")]
ModelSize = Annotated[str, Option(metavar="cpu|full", help="full: as published. cpu: smaller ones.")]
Scale = Annotated[
    str, Option(metavar="full|small", help="full: as published, for GPUs. small: the same training of small models.")
]
Mixed = Annotated[str, Option(metavar="fp32|mixed", help="mixed: autocast to bf16.")]
Precision = Annotated[str, Option(metavar="fp32|mixed|fp16", help="mixed: autocast to bf16. fp16: to that, on GPUs.")]
Settle = Annotated[
    float, Option(min=1.0, metavar="SECONDS", help="The most until deepytorch has compiled and chosen what runs.")
]
TextFile = Annotated[
    Path | None,
    Option(
        metavar="FILE",
        help="JSON file of instruction, input and output texts, laid out as Stanford Alpaca's. Default: the docstrings "
        "of Python's standard library and of torch.",
    ),
]
TextSize = Annotated[
    str,
    Option(
        metavar="|".join(TEXT_SIZES),
        help="Layers x hidden size: tiny 2x64, quarter 12x192, demo 4x256, small 4x512, base 12x768, large 16x2048.",
    ),
]
RanksOfHost = Annotated[int, Option(min=1, help="Ranks (processes) on each host.")]
NumHosts = Annotated[
    int, Option(min=1, help="Hosts. More than one are simulated on this one, which needs root: see deepytorch lab.")
]
LabRate = Annotated[
    str, Option(metavar="RATE", help="Bits per second that each host may send, and receive: 200mbit, 1gbit.")
]
Rate = Annotated[  # where there may be one host, which has none
    str | None,
    Option(
        metavar="RATE",
        help="Of simulated hosts: bits per second that each may send, and receive, such as 200mbit. Default: 1gbit.",
    ),
]
FlowRate = Annotated[
    str | None,
    Option(
        metavar="RATE",
        help="Of simulated hosts: bits per second that one TCP connection may carry each way. Default: no limit but "
        "--rate.",
    ),
]


def check_declared(options: Any) -> None:
    """Refuse values that are below the `min` of their option, or none of a metavar such as `cpu|cuda`."""
    for name, kind in get_type_hints(type(options), include_extras=True).items():
        told = next(each for each in get_args(kind) if isinstance(each, ParameterInfo))
        if getattr(options, name) is None:
            continue
        if told.min is not None:
            check_at_least(options, told.min, name)
        choices = (told.metavar or "").split("|")
        if len(choices) > 1 and all(re.fullmatch("[a-z0-9-]+", choice) for choice in choices):
            check_choice(options, name, choices)


def check_at_least(options: Any, least: float, *names: str) -> None:
    """Refuse options of these names that are below `least`, or that have a value which is."""
    for name in names:
        given = getattr(options, name)
        for value in given if isinstance(given, tuple) else (given,):
            if value < least:
                raise ConfigError(f"{name} {'has' if value is not given else 'is'} {value}; expected {least} or more.")


def check_choice(options: Any, name: str, accepted: Collection[str], *, repeated: bool = False) -> None:
    """Refuse an option that is none of `accepted`; of several values, each has to be one, and be given once.

    repeated: values may be given more than once.
    """
    given = getattr(options, name)
    if not given:
        raise ConfigError(f"{name} is empty, expected one or more of {', '.join(accepted)}.")
    values, verb = ((given,), "is") if isinstance(given, str) else (given, "has")
    for value in values:
        if value not in accepted:
            raise ConfigError(f'{name} {verb} "{value}", expected one of {", ".join(accepted)}.')
    if len(set(values)) != len(values) and not repeated:
        raise ConfigError(f"{name} is {', '.join(values)}; expected each once.")


def check_hosts(options: Any) -> None:
    """Refuse `hosts`, `ranks`, `rate` and `flow_rate` that make no lab, and rates where there is one host."""
    rates = {name: given for name in ("rate", "flow_rate") if (given := getattr(options, name, None)) is not None}
    if options.hosts == 1 and rates:
        raise ConfigError("A rate shapes links between simulated hosts, found one host; expected --hosts 2 or more.")
    LabOptions(hosts=options.hosts, ranks=options.ranks, **rates)


def dtype_name(text: str) -> str:
    """Return one of `DTYPE_NAMES`, given so or as torch spells it. Raises `ConfigError` for any other text."""
    name = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}.get(text, text)
    if name not in DTYPE_NAMES:
        raise ConfigError(f'The dtype is "{text}", expected one of {", ".join(DTYPE_NAMES)}.')
    return name


def names(text: str) -> tuple[str, ...]:
    """Return the parts of a comma-separated list."""
    return tuple(part.strip() for part in text.split(",") if part.strip())
