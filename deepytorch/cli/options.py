"""Commands that are made of a dataclass of options, and options that several commands share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from deepytorch.bench.options import names
from deepytorch.errors import ConfigError

JsonFile = Annotated[
    str | None,
    typer.Option("--json", metavar="FILE|-", help="Write the result as one JSON object to a file; -: to stdout."),
]


def add_command(
    app: typer.Typer, name: str, options: type, call: Callable[..., None], *common: tuple[str, Any, Any]
) -> None:
    """Add a command: an option for each field of a dataclass, of that name and default. Its docstring is the help.

    A field whose type is a tuple takes a list with commas; with a `typer.Argument`, all words behind the options, of
    which none is an option of the command then.

    Args:
        app: What gets the command.
        name: Its name.
        options: The dataclass, whose fields' types are `Annotated` with typer's options.
        call: What it does with an object of that class, and with the values of `common` by name.
        common: (name, type, default) of further options.
    """
    kinds = get_type_hints(options, include_extras=True)
    keyword = inspect.Parameter.KEYWORD_ONLY
    own = [_parameter(each.name, kinds[each.name], each.default) for each in fields(options)]
    others = [inspect.Parameter(each, keyword, default=default, annotation=kind) for each, kind, default in common]

    def command(**given: Any) -> None:
        values = {each.name: _value(kinds[each.name], given.pop(each.name), each.name) for each in fields(options)}
        call(options(**values), **given)

    command.__signature__ = inspect.Signature([*own, *others])  # type: ignore[attr-defined]
    command.__doc__ = inspect.getdoc(options)
    takes_words = any(_is_argument(kind) and _is_tuple(kind) for kind in kinds.values())
    app.command(name, context_settings={"allow_interspersed_args": False} if takes_words else None)(command)


def _is_argument(kind: Any) -> bool:
    return any(isinstance(extra, typer.models.ArgumentInfo) for extra in get_args(kind))


def _is_tuple(kind: Any) -> bool:
    return get_origin(get_args(kind)[0]) is tuple


def _parameter(name: str, kind: Any, default: Any) -> inspect.Parameter:
    inner, *extras = get_args(kind)
    if _is_tuple(kind) and _is_argument(kind):
        inner, default = list[str] | None, None
    elif _is_tuple(kind):
        inner, default = str, ",".join(map(str, default))
        extras[0].metavar = extras[0].metavar or "LIST"
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if default is MISSING else default,
        annotation=_annotated(inner, extras),
    )


def _annotated(kind: Any, extras: Sequence[Any]) -> Any:
    return Annotated[(kind, *extras)]  # type: ignore[valid-type]


def _value(kind: Any, value: Any, name: str) -> Any:
    """Return the parts of a list where an option has several values."""
    if not _is_tuple(kind):
        return value
    if _is_argument(kind):
        return tuple(value or ())
    of = get_args(get_args(kind)[0])[0]
    try:
        return tuple(of(part) for part in names(value))
    except ValueError:
        raise ConfigError(
            f"--{name.replace('_', '-')} is {value!r}; expected numbers with commas, as in 1,2."
        ) from None
