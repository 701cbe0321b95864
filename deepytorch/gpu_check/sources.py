"""A digest of the sources that a check runs: where it is the same as before, a check that passed is not made again."""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import deepytorch

_ROOT = Path(deepytorch.__file__).parent
_MODULE = re.compile(r"deepytorch(\.\w+)+")


@cache
def digest_of(module: str) -> str:
    """Return a digest of a module of deepytorch and of all that it imports of deepytorch, wherever the import stands.

    Names of modules in texts count as imports, too. Where a module loads C++, its sources belong to it.
    """
    found: dict[str, Path] = {}
    left = [module]
    while left:
        name = left.pop()
        path = _path_of(name)
        if name not in found and path is not None:
            found[name] = path
            left += _imported(path)
    paths = {path for each in found.values() for path in (each, *_native(each))}
    together = hashlib.sha256()
    for path in sorted(paths):
        together.update(f"{path.relative_to(_ROOT)}\0".encode() + path.read_bytes() + b"\0")
    return together.hexdigest()[:16]


@cache
def _imported(path: Path) -> tuple[str, ...]:
    """Return what may be modules of deepytorch among the names that a file imports."""
    return tuple(dict.fromkeys(_names_in(ast.parse(path.read_bytes()))))


def _names_in(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{each.name}" for each in node.names)
        elif isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from (match.group() for match in (_MODULE.match(node.value),) if match is not None)


def _path_of(name: str) -> Path | None:
    first, _, rest = name.partition(".")
    if first != "deepytorch":
        return None
    place = _ROOT.joinpath(*rest.split(".")) if rest else _ROOT
    return next((path for path in (place.with_suffix(".py"), place / "__init__.py") if path.is_file()), None)


def _native(path: Path) -> Iterator[Path]:
    """Yield the C++ that a module `native` loads."""
    if path.stem == "native":
        for folder in (path.parent / "csrc", path.parent.parent / "csrc"):
            yield from (each for each in folder.rglob("*") if each.is_file())
