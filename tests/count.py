"""Counts how much there is to read: lines, what is kept at module level, the files that a settled step goes through.

    python -m tests.count [--json FILE]

The step is one of a 2-layer Llama whose loss is inside and whose logits nobody reads, lowered to AOT graphs, after it
has been traced and compiled: `sys.setprofile` sees every call of our functions in it, in the forward and the backward.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
PRODUCT = ("comm", "compiler", "deepytorch", "passes")
SOURCES = (".py", ".cpp", ".h", ".cu")
# First words of a docstring that do not name its subject.
UNCLEAR = ("What", "Whether", "Which", "Who", "Where", "How", "Of", "As", "It", "They", "Those", "The same")
SHORT = 60  # lines of a file that is hardly one


def main() -> int:
    """Print the counts; with `--json FILE` they are written there too."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the counts to this file")
    arguments = parser.parse_args()
    counts = {**read(), **settled_step()}
    for name, count in counts.items():
        print(f"{name:45} {count:>8,}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(counts, indent=1) + "\n")
    return 0


def read() -> dict[str, int]:
    """Counts of what stands in the sources that git knows of."""
    product, tests, trees = _sources(PRODUCT), _sources(("tests",)), trees_of_product()
    importers = _importers(trees)
    return {
        "files of product": len(product),
        "lines of product": sum(map(_num_lines, product)),
        "lines of tests": sum(map(_num_lines, tests)),
        f"product files of {SHORT} lines or less": sum(_num_lines(path) <= SHORT for path in product),
        "product files imported by one other": sum(len(found) == 1 for found in importers.values()),
        "docstrings": sum(len(list(_docstrings(tree))) for tree in trees.values()),
        "docstrings with an unclear first word": sum(len(unclear_docstrings(*each)) for each in trees.items()),
        "context variables": sum(_calls(tree, "ContextVar") for tree in trees.values()),
        "registries at module level": sum(map(_registries, trees.values())),
    }


def trees_of_product() -> dict[Path, ast.Module]:
    """Return the syntax tree of each Python file of the product that git knows of."""
    python = [path for path in _sources(PRODUCT) if path.suffix == ".py"]
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in python}


def unclear_docstrings(path: Path, tree: ast.Module) -> list[str]:
    """Return a line `file:line: text` for each docstring of a file that begins with one of `UNCLEAR`."""
    name = path.relative_to(ROOT).as_posix()
    return [f"{name}:{line}: {text.splitlines()[0]}" for line, text in _docstrings(tree) if is_unclear(text)]


def is_unclear(docstring: str) -> bool:
    """Return whether a docstring begins with a word that does not name its subject."""
    return re.match(rf"({'|'.join(UNCLEAR)})\b", docstring) is not None


def settled_step() -> dict[str, int]:
    """Counts of our functions' calls in one training step that is traced and compiled."""
    called = files_of_a_settled_step()
    return {
        "our files in a settled step": len(set(called)),
        "calls of our functions in it": len(called),
        "of these into another file than the last one": sum(one != next_one for one, next_one in pairwise(called)),
        "of these for deferred outputs and double backward": sum(
            count for file, count in Counter(called).items() if "/outputs/" in file or "second_backward" in file
        ),
    }


def files_of_a_settled_step() -> list[str]:
    """The file of each call of our functions in one training step that is traced and compiled, from the root."""
    import torch

    import deepytorch

    deepytorch.configure(options={"lowering": "aot_eager", "wait": True})
    tiny = importlib.import_module("tests.scripts.scenarios.tiny")
    torch.manual_seed(0)
    model = tiny.llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(number: int) -> None:
        ids, mask, labels = tiny.batch(number)
        loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for number in range(8):
        step(number)
    packed = deepytorch.report().to_json()["steps_packed"]
    called: list[str] = []

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and (file := _own_file(frame)) is not None:
            called.append(file)

    sys.setprofile(profile)
    try:
        step(8)
    finally:
        sys.setprofile(None)
    assert deepytorch.report().to_json()["steps_packed"] == packed + 1, "the step that was counted was not packed"
    return [str(Path(each).resolve().relative_to(ROOT)) for each in called]  # deepytorch/compiler is a link


def _own_file(frame: FrameType) -> str | None:
    file = frame.f_code.co_filename
    return file if any(file.startswith(str(ROOT / folder) + "/") for folder in PRODUCT) else None


def _sources(folders: tuple[str, ...]) -> list[Path]:
    listed = subprocess.run(["git", "ls-files", *folders], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in listed.stdout.splitlines() if name.endswith(SOURCES)]


def _num_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def _docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line that each docstring begins in, and its text."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found = ast.get_docstring(node)
            if found:
                yield node.body[0].lineno, found


def _importers(trees: dict[Path, ast.Module]) -> dict[str, set[Path]]:
    """For each module of ours the files that import it, or a name from it."""
    importers: dict[str, set[Path]] = {}
    for path in trees:
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        importers[name if name.startswith("deepytorch") else f"deepytorch.{name}"] = set()
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                names = [node.module, *(f"{node.module}.{each.name}" for each in node.names)]
            elif isinstance(node, ast.Import):
                names = [each.name for each in node.names]
            else:
                continue
            for name in names:
                if name in importers:
                    importers[name].add(path)
    return importers


def _calls(tree: ast.Module, name: str) -> int:
    called = (ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call))
    return sum(function.partition("[")[0].rpartition(".")[2] == name for function in called)


def _registries(tree: ast.Module) -> int:
    """Containers at the level of the module that are empty at first: something is put into them while it runs."""
    empty = r"(\{\}|\[\]|(set|dict|list|deque|OrderedDict|\w*Weak\w*)(\[.*\])?\(\))"
    return sum(
        isinstance(node, ast.Assign | ast.AnnAssign)
        and node.value is not None
        and re.fullmatch(empty, ast.unparse(node.value)) is not None
        for node in tree.body
    )


if __name__ == "__main__":
    raise SystemExit(main())
