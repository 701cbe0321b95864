"""What is installed is what is in the folders, under the names that it has to have."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
MAPPED = ("comm", "compiler", "passes")
# Reached by a command that asks for the extra first: these may import it at the top.
EXTRA_ONLY = ("bench", "demo", "demo.py")
# Distribution names that differ from the module's.
DISTRIBUTION_OF = {"PIL": "pillow", "yaml": "pyyaml", "pynvml": "nvidia-ml-py", "megatron": "megatron-core"}
# What torch.utils.cpp_extension needs to compile the native code, and we never import.
USED_BY_TORCH = {"ninja", "setuptools"}


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def source_packages() -> dict[str, Path]:
    """Every package of the tree by its installed name, with its folder. A folder that holds Python is a package."""
    found = {}
    for top, name in [("deepytorch", "deepytorch"), *((folder, f"deepytorch.{folder}") for folder in MAPPED)]:
        for folder, subfolders, files in os.walk(ROOT / top):  # does not follow the links
            subfolders[:] = [subfolder for subfolder in subfolders if subfolder != "__pycache__"]
            if any(file.endswith(".py") for file in files):
                inner = Path(folder).relative_to(ROOT / top).parts
                found[".".join([name, *inner])] = Path(folder)
    return found


def source_files() -> list[Path]:
    return sorted(file for folder in source_packages().values() for file in folder.glob("*.py"))


def python(code: str, *, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=300, check=False
    )


def test_every_folder_is_listed_as_a_package():
    assert sorted(project()["tool"]["setuptools"]["packages"]) == sorted(source_packages())


def test_every_package_has_an_init():
    # without one, the folder is a namespace package: the guards and `exhaustive` layers would not see it
    assert [name for name, folder in source_packages().items() if not (folder / "__init__.py").is_file()] == []


def test_wheel_holds_every_module_and_nothing_else(tmp_path):
    build = f"from setuptools import build_meta; print(build_meta.build_wheel({str(tmp_path)!r}))"
    # in a copy: setuptools writes build/ and *.egg-info beside what it builds, and reads what an earlier build left
    copy = tmp_path / "tree"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (copy / name).write_bytes((ROOT / name).read_bytes())
    for file in [*source_files(), ROOT / "deepytorch" / "py.typed", *data_files()]:
        target = copy / file.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.read_bytes())
    built = python(build, cwd=copy)
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    expected = {
        "/".join([*name.split("."), file.name])
        for name, folder in source_packages().items()
        for file in folder.glob("*.py")
    }
    expected |= {"deepytorch/py.typed", *(installed_name(file) for file in data_files())}
    assert inside == expected
    scripts = zipfile.ZipFile(wheel).read(
        next(n for n in zipfile.ZipFile(wheel).namelist() if n.endswith("entry_points.txt"))
    )
    assert b"deepytorch.compiler.backend:deepytorch_backend" in scripts


def test_what_ci_runs_by_name_is_there():
    names = re.findall(r"^  '?(tests/\S+\.py)(?:::(\w+))?", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert len(names) > 20
    for file, test in names:
        assert f"def {test}" in (ROOT / file).read_text(), (file, test)


@pytest.mark.matrix  # compiles all of the C++
def test_a_wheel_may_carry_the_compiled_code(tmp_path):
    """It works in an environment without a compiler: a group of its own at once, and our attention."""
    tree = tmp_path / "tree"  # setuptools writes beside what it builds
    shutil.copytree(ROOT, tree, symlinks=True, ignore=shutil.ignore_patterns(".*", "build", "*.egg-info", "docs"))
    environment = {**os.environ, "DEEPYTORCH_NATIVE": "1", "PYTHONPATH": ""}
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    command = [*pip, "wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", str(tmp_path), str(tree)]
    built = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert built.returncode == 0, built.stdout[-3000:] + built.stderr[-3000:]
    (wheel,) = tmp_path.glob("*.whl")
    assert not wheel.name.endswith("none-any.whl"), wheel.name  # it is for this platform and this Python
    subprocess.run(
        [*pip, "install", "--quiet", "--no-deps", "--target", str(tmp_path / "site"), str(wheel)], check=True
    )

    script = tmp_path / "script.py"
    script.write_text(CARRIED)
    caches = tmp_path / "caches"
    caches.mkdir(mode=0o700)
    environment = {
        **os.environ,
        "PYTHONPATH": str(tmp_path / "site"),
        "XDG_CACHE_HOME": str(caches),
        "CXX": "",
        "PATH": "/nonexistent",  # no compiler to be had
        "DEEPYTORCH_COMPILE": "background",
    }
    ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(ranks, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert sorted(done.stdout.split()) == ["ours", "ours"]
    assert not list(caches.rglob("*.so"))


CARRIED = """
import sys, torch, torch.distributed as dist
import deepytorch
from deepytorch.doctor import collect
assert f"{sys.argv[0].rpartition('/')[0]}/site/" in deepytorch.__file__, deepytorch.__file__
dist.init_process_group("gloo")
total = torch.ones(4)
dist.all_reduce(total)
assert total.tolist() == [2.0] * 4
deepytorch.comm.chosen()  # raises for a group that is not ours
found = collect()
assert all("carried by the package" in found[name]["state"] for name in ("collectives", "cpu_attention"))
sys.stdout.write("ours\\n")
dist.destroy_process_group()
"""


def data_files() -> list[Path]:
    """What a package reads at run time and is no Python: has to be declared as package data."""
    return sorted(
        file
        for folder in (
            *source_packages().values(),
            ROOT / "comm/csrc",
            ROOT / "comm/csrc/backend",
            ROOT / "passes/ops/csrc",
        )
        for file in folder.iterdir()
        if file.is_file() and not file.name.startswith(".") and file.suffix not in {".py", ".pyc", ".typed"}
    )


def installed_name(file: Path) -> str:
    inside = file.relative_to(ROOT).as_posix()
    return inside if inside.startswith("deepytorch/") else f"deepytorch/{inside}"


@pytest.mark.parametrize("folder", MAPPED)
def test_a_mapped_folder_refuses_its_bare_name(folder):
    done = python(f"import {folder}", cwd=ROOT)
    assert done.returncode == 1
    assert f"import `deepytorch.{folder}` instead" in done.stderr


def test_a_submodule_of_a_mapped_folder_refuses_the_bare_name_too():
    done = python("import passes.ops", cwd=ROOT)
    assert done.returncode == 1
    assert "ImportError" in done.stderr


@pytest.mark.parametrize("folder", MAPPED)
def test_no_top_level_module_is_installed(folder, tmp_path):
    # from elsewhere than the root the name must not lead to us (it may be another project's, or nobody's)
    done = python(
        f"import importlib.util as u; spec = u.find_spec({folder!r}); print(spec.origin if spec else None)",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert str(ROOT) not in done.stdout


@pytest.mark.parametrize("folder", MAPPED)
def test_links_lead_tools_to_the_mapped_folders(folder):
    link = ROOT / "deepytorch" / folder
    assert link.is_symlink()
    assert os.readlink(link) == f"../{folder}"


def test_console_script_and_backend_are_entry_points():
    (script,) = metadata.entry_points(group="console_scripts", name="deepytorch")
    (backend,) = metadata.entry_points(group="torch_dynamo_backends", name="deepytorch")
    assert callable(script.load())
    assert callable(backend.load())


def test_torch_finds_the_process_group_without_an_import_of_ours():
    """As torch 2.14's `Backend._ensure_backend_registered` does, which older ones lack."""
    value = project()["project"]["entry-points"]["torch.distributed.backends"]["deepytorch"]
    code = f"""
import importlib.metadata, torch, torch.distributed as dist
registrar = importlib.metadata.EntryPoint("deepytorch", {value!r}, "torch.distributed.backends").load()
registrar()
assert "DEEPYTORCH" in dist.Backend._plugins
assert dist.Backend.DEEPYTORCH == "deepytorch"
from deepytorch.patches import ledger
assert not [each for each in ledger() if each.applied], "nothing but the name was asked for"
"""
    found = python(code, cwd=ROOT)
    assert found.returncode == 0, found.stderr


def test_dynamo_finds_the_backend_without_an_import_of_ours(tmp_path):
    code = """
import sys, torch
from torch._dynamo import list_backends, lookup_backend
assert "deepytorch" in list_backends(), list_backends()
assert not any(name.split(".")[0] == "deepytorch" for name in sys.modules), "listing must not load it"
backend = lookup_backend("deepytorch")
assert backend is lookup_backend("deepytorch")
print(backend.__module__, backend.__name__)
"""
    done = python(code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["deepytorch.compiler.backend", "deepytorch_backend"]


def test_every_imported_distribution_is_declared():
    # a user installs what is declared, and has nothing else; torch brings numpy only when asked
    core = requirements(project()["project"]["dependencies"])
    extras = project()["project"]["optional-dependencies"]
    optional = core | requirements(extras["hf"]) | requirements(extras["bench"]) | requirements(extras["hosts"])
    optional |= {"triton", "deepspeed"}  # come with torch; are built against it: docs/hosts/deepspeed.md
    optional |= {"flash_attn", "liger_kernel", "sentence_transformers"}  # rivals, measured where they are installed
    undeclared = []
    for file in source_files():
        tree = ast.parse(file.read_text())
        needs_extra = any(file.is_relative_to(ROOT / "deepytorch" / name) for name in EXTRA_ONLY)
        needs_extra |= file.stem.endswith(("_triton", "_kernel", "_kernels"))  # imported where Triton is only
        for node in ast.walk(tree):
            for module in imported_modules(node):
                top = module.split(".")[0]
                name = DISTRIBUTION_OF.get(top, top)
                on_the_spot = node not in tree.body
                allowed = optional if on_the_spot or needs_extra else core
                if top not in sys.stdlib_module_names and top != "deepytorch" and name not in allowed:
                    undeclared.append(f"{file.relative_to(ROOT)}:{node.lineno} imports {top}")
    assert undeclared == []


def test_every_declared_dependency_is_used():
    used = {
        module.split(".")[0]
        for file in source_files()
        for node in ast.walk(ast.parse(file.read_text()))
        for module in imported_modules(node)
    }
    assert requirements(project()["project"]["dependencies"]) - used - USED_BY_TORCH == set()


def imported_modules(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module] if isinstance(node, ast.ImportFrom) and node.module else []


def requirements(lines: list[str]) -> set[str]:
    return {re.split(r"[^A-Za-z0-9_.-]", line, maxsplit=1)[0].lower() for line in lines}


def test_readme_has_two_commands_and_the_ci_types_the_second():
    readme = (ROOT / "README.md").read_text()
    shell = [block.strip() for block in re.findall(r"^```(?:bash|sh|shell|console)\n(.*?)^```", readme, re.M | re.S)]
    assert shell == ["pip install -e '.[hf]' && deepytorch demo", "pip install -e '.[test]' && pytest"]
    # --quiet is the one difference: it keeps the log readable
    assert shell[1] in (ROOT / ".ci" / "run").read_text().replace("pip install --quiet ", "pip install ")


def test_local_links_of_the_documents_lead_somewhere():
    broken = [
        f"{document.name}: {target}"
        for document in ROOT.glob("*.md")
        for target in re.findall(r"\]\(([^)#]+)\)", document.read_text())
        if "://" not in target and not (ROOT / target).exists()
    ]
    assert broken == []
