"""Options that several benchmarks share: how they are read and checked. All checks raise `ConfigError`."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from deepytorch.bench.lab import LabOptions
from deepytorch.errors import ConfigError

DTYPE_NAMES = ("fp32", "bf16", "fp16")


Device = Annotated[str, Option(metavar="cpu|cuda", help="Where to train.")]
Settle = Annotated[
    float, Option(min=1.0, metavar="SECONDS", help="The most until deepytorch has compiled and chosen what runs.")
]
AnyDevice = Annotated[str, Option(help="Where to run: cpu, cuda, cuda:1, ...")]
TextFile = Annotated[
    Path | None,
    Option(
        metavar="FILE",
        help="JSON file of instruction, input and output texts, laid out as Stanford Alpaca's. "
        "Default: the docstrings of Python's standard library and of torch.",
    ),
]
Size = Annotated[str, Option(metavar="cpu|full", help="full: as published. cpu: smaller ones.")]
Scale = Annotated[
    str, Option(metavar="full|small", help="full: as published. small: the same training of small models.")
]
Mixed = Annotated[str, Option(metavar="fp32|mixed", help="mixed: autocast to bf16.")]
AnyPrecision = Annotated[
    str, Option(metavar="fp32|mixed|fp16", help="mixed: autocast to bf16. fp16: autocast to it, on GPUs.")
]


def check_at_least(options: Any, least: int, *names: str) -> None:
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


def check_training(options: Any, precisions: Collection[str] = ("fp32", "mixed", "fp16")) -> None:
    """Refuse values of options of trainings, of those that there are, which no training takes."""
    accepted = {
        "size": ("cpu", "full"),
        "scale": ("full", "small"),
        "precision": precisions,
        "precisions": precisions,
        "device": ("cpu", "cuda"),
    }
    for name, values in accepted.items():
        if hasattr(options, name):
            check_choice(options, name, values)
    counts = ("hosts", "ranks", "steps", "warm_up", "rounds", "batches", "together")
    check_at_least(options, 1, *(name for name in counts if hasattr(options, name)))


def check_rates(options: Any) -> None:
    """Refuse `rate` and `flow_rate` where there is one host."""
    if options.hosts == 1 and (options.rate or options.flow_rate):
        raise ConfigError("A rate shapes links between simulated hosts, found one host; expected --hosts 2 or more.")


def simulated_hosts(options: Any) -> LabOptions | None:
    """Return the hosts that `hosts`, `ranks`, `rate` and `flow_rate` ask for; None for this machine alone."""
    if options.hosts == 1:
        return None
    given = {name: getattr(options, name) for name in ("rate", "flow_rate") if getattr(options, name) is not None}
    return LabOptions(hosts=options.hosts, ranks=options.ranks, **given)


def dtype_name(text: str) -> str:
    """Return one of `DTYPE_NAMES`, given so or as torch spells it. Raises `ConfigError` for any other text."""
    name = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}.get(text, text)
    if name not in DTYPE_NAMES:
        raise ConfigError(f'The dtype is "{text}", expected one of {", ".join(DTYPE_NAMES)}.')
    return name


def names(text: str) -> tuple[str, ...]:
    """Return the parts of a comma-separated list."""
    return tuple(part.strip() for part in text.split(",") if part.strip())
