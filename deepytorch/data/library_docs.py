"""The embedded data set: the documentation of the installed standard library and of torch.

The source is parsed, not imported: importing hundreds of modules would be slow, and some modules act when imported.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import platform
import sysconfig
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from importlib.metadata import version
from pathlib import Path

from deepytorch.data.cache import cached_json, source_digest
from deepytorch.data.rows import Row
from deepytorch.errors import DataError

_LIBRARY_PARTS = ("*.py", "*/**/*.py")
# Read in this order. For torch, the folders whose documentation users read.
_TORCH_FOLDERS = ("nn", "optim", "distributions", "autograd", "utils", "distributed")
_TORCH_PARTS = ("*.py", *(f"{folder}/**/*.py" for folder in _TORCH_FOLDERS))
_SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "ensurepip", "encodings"}
)
_ADDERS = ("add_docstr", "add_docstr_all")  # how torch documents functions written in C++
_MIN_ROWS = 500
# A docstring is cut at the end of a paragraph before this many characters. With 1600, tokens per row have the spread of
# Alpaca's: a randomly drawn padded batch of 8 is about half real tokens (see tests/api/test_data.py).
_MAX_OUTPUT_CHARS = 1600
_MIN_OUTPUT_CHARS = 24


@dataclass(frozen=True, slots=True)
class _Entry:
    """One documented name: `kind` is class, function or method, `signature` is Python source."""

    kind: str
    name: str
    signature: str
    doc: str


def library_rows() -> list[Row]:
    """Return the embedded rows, thousands of them, in an order that depends on the versions of Python and torch.

    Raises `DataError` if the library's source is not installed.
    """
    name = f"rows-{source_digest(__file__)}-python{platform.python_version()}-torch{version('torch')}"
    rows = cached_json(name, lambda: [astuple(row) for row in _build()])
    return [Row(*row) for row in rows]


def _build() -> list[Row]:
    rows: dict[Row, None] = {}  # a set that keeps its order
    for root, package, patterns in _sources():
        for path in _files(root, patterns):
            rows.update((_row(entry), None) for entry in _entries(path, _module_name(root, path, package)))
    if len(rows) < _MIN_ROWS:
        raise DataError(
            f"The embedded data set has {len(rows)} rows, expected at least {_MIN_ROWS}: the source of the standard "
            "library or of torch is not installed here. Give a file in the Alpaca layout with --data."
        )
    return list(rows)


def _sources() -> list[tuple[Path, str, tuple[str, ...]]]:
    """Return (root folder, package name or "", patterns) of the standard library and of torch."""
    library = (Path(sysconfig.get_paths()["stdlib"]), "", _LIBRARY_PARTS)
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return [library]
    return [library, (Path(spec.origin).parent, "torch", _TORCH_PARTS)]


def _files(root: Path, patterns: tuple[str, ...]) -> Iterator[Path]:
    for pattern in patterns:
        for path in sorted(root.glob(pattern)):
            if not any(_is_skipped(folder) for folder in path.relative_to(root).parts[:-1]):
                yield path


def _is_skipped(folder: str) -> bool:
    return folder in _SKIPPED_FOLDERS or folder.startswith(("config-", "_", "."))


def _module_name(root: Path, path: Path, package: str) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    if parts[-1] == "__init__":
        parts = parts[:-1]
    return ".".join((package, *parts) if package else parts)


def _entries(path: Path, module: str) -> Iterator[_Entry]:
    """Yield the documented public names of one file, in the order of its lines."""
    try:
        with warnings.catch_warnings():  # outdated escapes in other people's strings
            warnings.simplefilter("ignore")
            tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and _is_public(node.name):
            yield from _class_entries(node, f"{module}.{node.name}")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _is_public(node.name):
            yield from _documented("function", f"{module}.{node.name}", _signature(node), ast.get_docstring(node))
        elif isinstance(node, ast.Expr):
            yield from _added_docs(node.value)


def _class_entries(node: ast.ClassDef, name: str) -> Iterator[_Entry]:
    methods = [child for child in node.body if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)]
    bases = ", ".join(ast.unparse(base) for base in node.bases)
    header = f"class {node.name}({bases})" if bases else f"class {node.name}"
    yield from _documented("class", name, header, ast.get_docstring(node))
    for method in methods:
        if _is_public(method.name):
            yield from _documented("method", f"{name}.{method.name}", _signature(method), ast.get_docstring(method))


def _added_docs(call: ast.expr) -> Iterator[_Entry]:
    """Yield the entry of torch's `add_docstr(torch.name, text)`: the text's first line is the signature."""
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in _ADDERS and call.args):
        return
    texts = [node.value for node in ast.walk(call) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    signature, _, doc = inspect.cleandoc(max(texts, key=len, default="")).partition("\n")
    target = call.args[0]
    if isinstance(target, ast.Constant) and isinstance(target.value, str):
        yield from _documented("method", f"torch.Tensor.{target.value}", signature, doc)
    else:
        yield from _documented("function", ast.unparse(target), signature, doc)


def _documented(kind: str, name: str, signature: str, doc: str | None) -> Iterator[_Entry]:
    text = _cut(inspect.cleandoc(doc)) if doc else ""
    if len(text) >= _MIN_OUTPUT_CHARS:
        yield _Entry(kind, name, signature, text)


def _cut(text: str) -> str:
    """Keep whole paragraphs up to `_MAX_OUTPUT_CHARS` characters; a longer first paragraph is cut at a word."""
    if len(text) <= _MAX_OUTPUT_CHARS:
        return text.strip()
    head = text[:_MAX_OUTPUT_CHARS]
    paragraph = head.rfind("\n\n")
    return head[: paragraph if paragraph > 0 else head.rfind(" ")].strip()


def _is_public(name: str) -> bool:
    return not name.startswith("_")


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    prefix = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns is not None else ""
    return f"{prefix} {node.name}({ast.unparse(node.args)}){returns}"


def _row(entry: _Entry) -> Row:
    """Ask for the documentation or, once in five, for the signature.

    The name decides which, so that rows stay the same.
    """
    draw = zlib.crc32(entry.name.encode())
    if draw % 5 == 0:
        summary = entry.doc.partition("\n\n")[0]
        instruction = f"Write the signature of the {entry.kind} `{entry.name}` in Python, and its documentation."
        return Row(instruction, summary, f"{entry.signature}\n\n{entry.doc}")
    template = _INSTRUCTIONS[draw // 5 % len(_INSTRUCTIONS)]
    with_signature = draw // 25 % 3 != 0
    return Row(template.format(kind=entry.kind, name=entry.name), entry.signature if with_signature else "", entry.doc)


_INSTRUCTIONS = (
    "Describe the {kind} `{name}`.",
    "What does the {kind} `{name}` do?",
    "Write the documentation of the {kind} `{name}`, as its author would.",
    "Explain to a Python programmer what the {kind} `{name}` is for and how it is used.",
)
