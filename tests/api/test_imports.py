"""`import deepytorch` is light and offers what it names; imports between the layers point down only."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

import deepytorch

ROOT = Path(__file__).parents[2]
# From low to high; a module may import from its own entry and from the ones before it.
LOWER_LAYERS = [
    {"device_reads", "errors", "log", "process_facts", "supported_versions", "switch", "version"},
    {"patches", "torch_internals"},
    {"private_files"},
    {"class_state", "ddp_modules", "fused_optimizers", "machine_code", "tuning"},
    {"config"},
    {"background", "kept_memory"},
    {"extension"},
    {"comm"},
    {"passes"},
    {"compiler"},
]


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_exported_names():
    names = ["compile", "configure", "disable", "enable", "explain", "optimize", "paused", "prefetch", "report"]
    assert deepytorch.__all__ == ["DeepytorchError", "__version__", *names]
    assert set(deepytorch.__all__) <= set(dir(deepytorch))
    for name in deepytorch.__all__:
        assert getattr(deepytorch, name) is not None


def test_explain_and_report_are_those_of_the_api():
    from deepytorch import api

    assert deepytorch.explain is api.explain
    assert deepytorch.report is api.report
    assert callable(deepytorch.explain)
    assert callable(deepytorch.report)


def test_a_report_at_the_end_of_a_process_that_traced_nothing():
    code = """
import atexit
import deepytorch
atexit.register(lambda: print(deepytorch.report()))
import torch.distributed
"""
    found = python(code)
    assert found.stdout == "deepytorch\nNothing was traced in this process.\n", found.stdout + found.stderr
    assert found.stderr == ""


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'padding'"):
        deepytorch.padding  # noqa: B018


@pytest.mark.parametrize("name", ["deepytorch", "deepytorch.comm"])
def test_no_submodule_takes_an_exported_name(name):
    # importing `deepytorch.report` as a module would replace the function `deepytorch.report`
    package = importlib.import_module(name)
    modules = {path.stem for path in (ROOT / name.replace(".", "/")).iterdir()}
    assert modules & set(package.__all__) == set()


def test_a_source_tree_without_an_entry_point_has_the_backend_all_the_same(tmp_path):
    for name in ("comm", "compiler", "deepytorch", "passes"):
        (tmp_path / name).symlink_to(ROOT / name)
    code = f"""
import sys
from importlib import metadata
sys.path.insert(0, {str(tmp_path)!r})
entry_points = metadata.entry_points  # of an environment in which nobody has installed us
metadata.entry_points = lambda **which: [] if which.get("name") == "deepytorch" else entry_points(**which)
import torch._dynamo.backends.registry as registry
registry._discover_entrypoint_backends = lambda: None
import deepytorch
assert deepytorch.__file__.startswith({str(tmp_path)!r})
import torch
call = torch.compile(torch.nn.Linear(3, 2), backend="deepytorch", options={{"lowering": "eager"}})
print(call(torch.ones(4, 3)).shape)
"""
    done = python(code)
    assert done.stdout.strip() == "torch.Size([4, 2])", done.stdout + done.stderr


def test_errors_have_one_root():
    from deepytorch import errors

    classes = [value for _, value in inspect.getmembers(errors, inspect.isclass) if value.__module__ == errors.__name__]
    assert len(classes) > 1
    assert all(issubclass(error, deepytorch.DeepytorchError) for error in classes)


@pytest.mark.parametrize("state", ["", "off"])
def test_import_loads_neither_torch_nor_the_compiler(state):
    code = """
import sys, deepytorch
deepytorch.__version__, deepytorch.DeepytorchError, dir(deepytorch)
heavy = {"torch", "sympy", "rich", "typer", "numpy", "transformers"}
ours = ("deepytorch.compiler", "deepytorch.api")
print(sorted(name for name in sys.modules if name in heavy or name.startswith(ours)))
"""
    done = python(code, **({"DEEPYTORCH": state} if state else {}))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_lower_layers_import_neither_the_root_nor_what_is_above_them():
    # import-linter checks the same edges where it is installed, except `from deepytorch import <attribute>`
    wrong = []
    allowed: set[str] = set()
    for layer in LOWER_LAYERS:
        allowed |= layer
        for file in (file for name in sorted(layer) for file in files_of(name)):
            for line, target in internal_imports(ast.parse(file.read_text())):
                if target not in allowed:
                    wrong.append(f"{file.relative_to(ROOT)}:{line} imports deepytorch{'.' if target else ''}{target}")
    assert wrong == []


def files_of(module: str) -> list[Path]:
    folder = ROOT / module
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [ROOT / "deepytorch" / f"{module}.py"]


def internal_imports(tree: ast.Module) -> list[tuple[int, str]]:
    """Line and first name below `deepytorch` of every import of ours; the name is empty for the package root itself."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "deepytorch" and node.level == 0:
            # a name that is no module is an attribute of the root
            targets = [f"deepytorch.{alias.name}" if is_module(alias.name) else "deepytorch" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative imports hide the direction"
            targets = [node.module or ""]
        else:
            continue
        found += [
            (node.lineno, ".".join(name.split(".")[1:2])) for name in targets if name.split(".")[0] == "deepytorch"
        ]
    return found


def is_module(name: str) -> bool:
    return (ROOT / "deepytorch" / name).is_dir() or (ROOT / "deepytorch" / f"{name}.py").is_file()


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import deepytorch", [(1, "")]),
        ("from deepytorch import explain", [(1, "")]),
        ("from deepytorch import errors", [(1, "errors")]),
        ("def f():\n    from deepytorch.api import report", [(2, "api")]),
        ("import deepytorch.passes.ops as ops, torch", [(1, "passes")]),
        ("import deepytorch_other", []),
    ],
)
def test_the_reading_of_imports_sees_every_spelling(source, expected):
    assert internal_imports(ast.parse(source)) == expected
