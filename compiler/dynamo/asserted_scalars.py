"""Models whose code reads numbers out of tensors only to assert something of them, such as XLM's lengths of rows.

Dynamo cuts a graph where Python reads such a number. A number that is only asserted of decides nothing, so it can stay
in the graph, with the assertion: Dynamo's setting `capture_scalar_outputs`. Other uses (a size, a branch) may need a
number that no trace has, and stay cut.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterable, Iterator

from torch import nn

_READS = ("item", "tolist")
_MAY_ASSERT = re.compile(r"^\s+assert .*\.item\(\)", re.MULTILINE)


def asserts_scalars(module: nn.Module) -> bool:
    """Return whether files that define classes in `module` read numbers out of tensors in assertions, and only there.

    Those of torch do not count.
    """
    names = {type(each).__module__ for each in module.modules()}
    sources = [_source(name) for name in names if name.partition(".")[0] != "torch"]
    if not any(_MAY_ASSERT.search(source) for source in sources):
        return False
    try:
        trees = [ast.parse(source) for source in sources]
    except SyntaxError:  # a file that is being edited
        return False
    nodes = [node for tree in trees for node in ast.walk(tree)]
    asserted = {read for node in nodes if isinstance(node, ast.Assert) for read in _reads(ast.walk(node))}
    return bool(asserted) and asserted == set(_reads(nodes))


def _source(name: str) -> str:
    try:
        return inspect.getsource(sys.modules[name])
    except (KeyError, OSError, TypeError):  # written in C, or in an interactive session
        return ""


def _reads(nodes: Iterable[ast.AST]) -> Iterator[ast.Call]:
    """Yield the calls that read numbers out of a tensor."""
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _READS:
            yield node
