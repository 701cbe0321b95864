"""Which private names of torch the sources use, found in their syntax trees."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path

from deepytorch.torch_internals import ALIASES

ROOT = Path(__file__).parents[2]
FOLDERS = (ROOT / "comm", ROOT / "compiler", ROOT / "passes", ROOT / "deepytorch")
HOME = "torch_internals.py"  # where they may be used by their own names
# none of torch's: Python's, transformers' and Megatron-LM's
OTHERS = frozenset({
    "_CAN_RECORD_REGISTRY", "_CUDA_RNG_STATE_TRACKER", "_CUDA_RNG_STATE_TRACKER_INITIALIZED",
    "_asdict", "_exit", "_getframe", "_member_map_", "_missing_", "_name_", "_replace", "_value2member_map_", "_value_",
    "_attn_implementation",
})  # fmt: skip
Call = tuple[int, tuple[str, ...]]  # how many arguments by place, and which by name


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def names_used() -> dict[str, set[Call]]:
    """Each private name with the calls of it; what is only a step on the way to another one is left out."""
    found: dict[str, set[Call]] = {}
    for path in sources():
        Reader(found).visit(ast.parse(path.read_text(encoding="utf-8")))
    return {name: calls for name, calls in found.items() if not any(other.startswith(f"{name}.") for other in found)}


def names_used_elsewhere() -> set[str]:
    """Private names that a file uses by another way than through `torch_internals`."""
    found: dict[str, set[Call]] = {}
    for path in sources():
        if path.name != HOME:
            Reader(found, aliases={}).visit(ast.parse(path.read_text(encoding="utf-8")))
    return set(found)


def attributes_used() -> set[str]:
    """Private attributes of objects that our own sources give no such attribute."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in sources() if path.name != HOME]
    reached: set[str] = set()
    ours: set[str] = set()
    modules = {"torch", "aten", *ALIASES}  # whose names `names_used` sees
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            ours.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            parts = [
                part for target in targets for part in (target.elts if isinstance(target, ast.Tuple) else [target])
            ]
            ours |= {part.id for part in parts if isinstance(part, ast.Name)}
            ours |= {part.attr for part in parts if isinstance(part, ast.Attribute) and _is_self(part.value)}
        elif isinstance(node, ast.Attribute) and ast.unparse(node).partition(".")[0] not in modules:
            reached.add(node.attr)
    return {name for name in reached - ours - OTHERS if is_private(name)}


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def sources() -> list[Path]:
    return sorted({path.resolve() for folder in FOLDERS for path in folder.rglob("*.py")})


class Reader(ast.NodeVisitor):
    """Follows names that were imported from torch, or by their aliases, each in the functions that see it."""

    def __init__(self, found: dict[str, set[Call]], aliases: Mapping[str, str] = ALIASES) -> None:
        self._found, self._aliases = found, aliases
        self._scopes: list[dict[str, str]] = [{}]

    def visit_Module(self, node: ast.Module) -> None:
        self._in_scope(node, hidden=())

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        arguments = node.args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
        for decorator in node.decorator_list:
            self.visit(decorator)
        self._in_scope(node, hidden=tuple(each.arg for each in every if each is not None))

    def _in_scope(self, node: ast.Module | ast.FunctionDef, hidden: tuple[str, ...]) -> None:
        names = {name: full for name, full in self._scopes[-1].items() if name not in hidden}
        for each in _own_statements(node):
            if isinstance(each, ast.Import):
                for alias in each.names:
                    if alias.name.split(".")[0] == "torch":
                        names[alias.asname or "torch"] = alias.name if alias.asname else "torch"
            elif isinstance(each, ast.ImportFrom) and each.module == "deepytorch.torch_internals":
                names |= {
                    alias.asname or alias.name: self._aliases[alias.name]
                    for alias in each.names
                    if alias.name in self._aliases
                }
            elif isinstance(each, ast.ImportFrom) and (each.module or "").split(".")[0] == "torch":
                names |= {alias.asname or alias.name: f"{each.module}.{alias.name}" for alias in each.names}
        self._scopes.append(names)
        self.generic_visit(node)
        self._scopes.pop()

    def visit_Call(self, node: ast.Call) -> None:
        name = self._full(node.func)
        starred = any(isinstance(each, ast.Starred) for each in node.args) or any(k.arg is None for k in node.keywords)
        if name is not None and is_private(name):
            calls = self._found.setdefault(name, set())
            if not starred:
                calls.add((len(node.args), tuple(sorted(keyword.arg or "" for keyword in node.keywords))))
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._note(self._full(node))
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        self._note(self._full(node))

    def _note(self, name: str | None) -> None:
        if name is not None and is_private(name):
            self._found.setdefault(name, set())

    def _full(self, node: ast.expr) -> str | None:
        chain: list[str] = []
        while isinstance(node, ast.Attribute):
            chain.append(node.attr)
            node = node.value
        if isinstance(node, ast.Name) and node.id in self._scopes[-1]:
            return ".".join([self._scopes[-1][node.id], *reversed(chain)])
        return None


def _own_statements(node: ast.AST) -> list[ast.AST]:
    """What stands in a scope, without what stands in functions of its own."""
    found: list[ast.AST] = []
    left = list(ast.iter_child_nodes(node))
    while left:
        each = left.pop()
        found.append(each)
        if not isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            left += ast.iter_child_nodes(each)
    return found
