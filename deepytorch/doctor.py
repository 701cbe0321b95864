"""The check of this machine (`deepytorch doctor`): what it offers to deepytorch, what is missing and how to get it."""

from __future__ import annotations

import os
import platform
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import platformdirs
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from deepytorch.comm.group.native import native as collectives
from deepytorch.extension import Extension
from deepytorch.passes.ops.native import can_run
from deepytorch.passes.ops.native import native as operators
from deepytorch.patches import ledger
from deepytorch.process_facts import cpu_model
from deepytorch.run_hook import FOLDER
from deepytorch.supported_versions import PYTHON, TORCH, TRANSFORMERS, TRITON_OF_TORCH, Tested
from deepytorch.torch_internals import INTERNALS, troubles
from deepytorch.version import __version__

PACKAGES = ("torch", "triton", "numpy", "sympy", "transformers", "tokenizers", "accelerate", "matplotlib")

_BACKEND_GROUP = "torch_dynamo_backends"
_COMPILE_TIMEOUT_S = 60
# Inductor's generated C++ includes these headers: a compiler that lacks one would be found, and fail later.
_CPP_PROBE = "#include <Python.h>\n#include <omp.h>\nint main() { return omp_get_max_threads() > 0 ? 0 : 1; }\n"


def collect() -> dict[str, Any]:
    """Return everything that is known about this machine, as plain values for JSON.

    `missing` lists what is missing: `what`, `needed_for` and `how` to get it. `untested` lists the versions that
    deepytorch was not tested with. `patches` lists what the import has changed of torch in this process. Nothing on the
    machine changes: the C++ compiler is tried on a three-line file in a temporary folder, and folders are looked at,
    not made.
    """
    found: dict[str, Any] = {
        "deepytorch": __version__,
        "python": {"version": platform.python_version(), "platform": platform.platform(), "executable": sys.executable},
        "packages": {name: _version_of(name) for name in PACKAGES},
        "cpu": _cpu(),
        "cuda": _cuda(),
        "distributed": _distributed(),
        "compilers": {"cpp": _cpp(), "triton": _triton()},
        "collectives": _compiled(collectives, "a first run of several processes"),
        "cpu_attention": _cpu_attention(),
        "attention": _attention(),
        "backend": _backend(),
        "cache": _cache(Path(platformdirs.user_cache_dir("deepytorch"))),
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith("DEEPYTORCH")},
    }
    found["run"] = _started_by(found["environment"], sys.path)
    found["torch_internals"] = troubles()
    found["patches"] = [{"where": each.where, "why": each.why, "applied": each.applied} for each in ledger()]
    found["untested"] = untested(found)
    found["missing"] = missing(found)
    return found


def untested(found: dict[str, Any]) -> list[dict[str, str]]:
    """Return the versions in `found` that deepytorch was not tested with: `what`, `tested` range, `how` to go on."""
    answer: list[dict[str, str]] = []

    def look(tested: Tested, version: str | None, check: str) -> None:
        if version is None:
            return
        older, newer = tested.is_older(version), tested.is_newer(version)
        if older or newer:
            how = f"install {tested.name} {tested}" if older else f"{check}; or install {tested.name} {tested}"
            answer.append({"what": f"{tested.name} {version}", "tested": str(tested), "how": how})

    compare = "deepytorch verify YOUR_SCRIPT compares a run with the import and one without"
    look(PYTHON, found["python"]["version"], compare)
    internals = "python -m deepytorch.torch_internals lists what deepytorch uses of torch, and what this torch lacks"
    look(TORCH, found["packages"]["torch"], internals)
    look(TRANSFORMERS, found["packages"]["transformers"], compare)
    return answer


def missing(found: dict[str, Any]) -> list[dict[str, str]]:
    """Return what `found` (the rest of `collect`'s answer) lacks, with what needs it and how to get it."""
    lacks: list[dict[str, str]] = []

    def add(what: str, needed_for: str, how: str) -> None:
        lacks.append({"what": what, "needed_for": needed_for, "how": how})

    packages, cuda, cpp, triton = (
        found["packages"],
        found["cuda"],
        found["compilers"]["cpp"],
        found["compilers"]["triton"],
    )
    if found["environment"].get("DEEPYTORCH", "").lower() == "off":
        add("deepytorch itself", "anything: DEEPYTORCH=off is set", "unset DEEPYTORCH")
    if not found["backend"]["registered"]:
        add(
            f"entry point ({found['backend']['reason']})",
            'torch.compile(model, backend="deepytorch")',
            "pip install deepytorch again in this environment",
        )
    if found["torch_internals"]:
        add(
            f"private names of torch ({', '.join(sorted(found['torch_internals']))})",
            "what each is used for: python -m deepytorch.torch_internals",
            f"install torch {TORCH}",
        )
    if not cpp["usable"]:
        add(
            f"C++ compiler ({cpp['reason']})",
            'compiled CPU code; options={"lowering": "aot_eager"} works without it',
            "install g++ (or clang with OpenMP) and Python's headers (python3-dev, python3-devel), or name one in CXX",
        )
    if not cuda["available"]:
        add(
            f"CUDA device ({cuda['reason']})",
            "GPU training",
            "on a machine with an NVIDIA GPU: its driver and torch's CUDA build",
        )
    elif not triton["usable"]:
        wanted = f"'triton=={triton['paired']}.*'" if triton["paired"] else "triton"
        add(f"Triton ({triton['reason']})", "compiled GPU code", f"pip install {wanted}")
    if triton["version"] and triton["paired"] and _minor(triton["version"]) != triton["paired"]:
        add(
            f"the Triton of this torch (found {triton['version']})",
            "Triton kernels, and torch's own imports of Triton",
            f"pip install 'triton=={triton['paired']}.*'",
        )
    if cuda["available"] and not found["attention"]["varlen_attn"]:
        add(
            f"varlen_attn ({found['attention']['reason']})",
            "the fastest packed attention on GPU",
            "a fallback is used; newer torch or GPU",
        )
    if not found["distributed"]["gloo"]:
        add("gloo", "several processes on CPU", "install a torch build with torch.distributed")
    if cuda["available"] and not found["distributed"]["nccl"]:
        add("NCCL", "several GPUs", "install torch's CUDA build for Linux")
    hugging_face = [name for name in ("transformers", "tokenizers", "accelerate", "matplotlib") if not packages[name]]
    if hugging_face:
        add(", ".join(hugging_face), "deepytorch demo, deepytorch bench", "pip install 'deepytorch[hf]'")
    if not found["cache"]["writable"]:
        add(
            "a cache folder that can be written",
            "a warm start of the demo",
            f"make {found['cache']['path']} writable, or set XDG_CACHE_HOME",
        )
    if found["cache"]["open_to_others"]:
        add(
            "a cache folder that is private (others have access to it)",
            "any use of it: it is left alone",
            f"chmod 700 {found['cache']['path']}",
        )
    return lacks


def render(found: dict[str, Any]) -> RenderableType:
    """Return `collect`'s answer as tables for a `rich` console."""
    cpu, cuda, cpp, triton = found["cpu"], found["cuda"], found["compilers"]["cpp"], found["compilers"]["triton"]
    cache, distributed = found["cache"], found["distributed"]
    table = Table(
        show_header=False,
        box=None,
        padding=(0, 2, 0, 0),
        title=f"deepytorch {found['deepytorch']}",
        title_justify="left",
    )
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")

    def row(name: str, value: object, good: bool | None = None) -> None:
        mark = {True: "[green]yes[/] ", False: "[yellow]no[/]  ", None: ""}[good]
        table.add_row(name, Text.from_markup(mark).append(str(value)))

    row("python", f"{found['python']['version']}, {found['python']['platform']}")
    row("packages", ", ".join(f"{name} {version}" for name, version in found["packages"].items() if version))
    row(
        "cpu",
        f"{cpu['model']}, {cpu['usable_cores']} of {cpu['cores']} cores, {cpu['capability']}, {cpu['threads']} threads",
    )
    row("cuda", cuda["reason"] or "; ".join(_describe_gpu(device) for device in cuda["devices"]), cuda["available"])
    row(
        "distributed", ", ".join(name for name in ("gloo", "nccl", "mpi") if distributed[name]) or distributed["reason"]
    )
    for name in ("collectives", "cpu_attention"):
        row(name.replace("cpu_", "CPU "), found[name]["state"], found[name]["compiled"])
    row("C++ compiler", cpp["reason"] or cpp["version"], cpp["usable"])
    row("triton", triton["reason"] or triton["version"], triton["usable"])
    row("varlen_attn", found["attention"]["reason"], found["attention"]["varlen_attn"])
    row("backend", found["backend"]["reason"] or found["backend"]["target"], found["backend"]["registered"])
    right = len(INTERNALS) - len(found["torch_internals"])
    row("torch internals", f"{right} of {len(INTERNALS)} private names are as expected", right == len(INTERNALS))
    row(
        "cache",
        f"{cache['path']}, "
        + (f"{cache['num_files']} files, {cache['size_bytes'] / 1e6:.1f} MB" if cache["exists"] else "empty"),
    )
    row("deepytorch run", found["run"])
    row(
        "environment",
        ", ".join(f"{name}={value}" for name, value in found["environment"].items()) or "no DEEPYTORCH variable is set",
    )

    parts: list[RenderableType] = [table]
    if found["patches"]:
        parts.append(_list("Changed by the import", {"what": "where", "what for": "why"}, found["patches"]))
        note = "Libraries such as transformers have theirs when they are imported. deepytorch.disable() undoes it all."
        parts.append(Text(note))
    if found["untested"]:
        columns = {"found": "what", "tested with": "tested", "what to do": "how"}
        parts.append(_list("Not tested", columns, found["untested"]))
    if found["missing"]:
        columns = {"what": "what", "needed for": "needed_for", "how to get it": "how"}
        parts.append(_list("Missing", columns, found["missing"]))
    else:
        parts.append(Text("\nNothing is missing.", style="green"))
    return Group(*parts)


def _started_by(environment: Mapping[str, str], path: Sequence[str]) -> str:
    """Return whether this process was started by `deepytorch run`, in words."""
    if environment.get("DEEPYTORCH_RUN", "").lower() != "on":
        return "did not start this process"
    if FOLDER not in path:
        return f"started this process, and has no effect in it: {FOLDER} is not in PYTHONPATH any more"
    return "started this process: Python processes that it starts train with the import"


def _list(title: str, columns: dict[str, str], items: list[dict[str, Any]]) -> Table:
    """Return a table of items. columns: the heading of each, and the key of its values."""
    table = Table(title=f"\n{title}", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for heading in columns:
        table.add_column(heading, overflow="fold")
    for item in items:
        table.add_row(*(Text(item[key]) for key in columns.values()))
    return table


def _compiled(extension: Extension, when: str) -> dict[str, Any]:
    """Return whether an extension is compiled for this torch, and its `state` in words. when: who else compiles it."""
    failure = extension.failed()
    if extension.carried() is not None:
        state = f"compiled, carried by the package: {extension.carried()}"
    elif extension.is_built():
        state = "compiled, in the cache"
    elif extension.is_being_built():
        state = "being compiled"
    elif failure is not None:
        state = f"{failure.splitlines()[0] if failure else 'it did not compile'}; `deepytorch build` tries again"
    else:
        state = f"not compiled yet: {when} does it beside, `deepytorch build` ahead"
    return {"compiled": extension.is_built(), "state": state}


def _cpu_attention() -> dict[str, Any]:
    if can_run():
        return _compiled(operators, "a run of more than a minute that packs")
    return {"compiled": False, "state": "torch's own kernel: ours needs x86-64 with AVX2, on Linux"}


def _version_of(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _cpu() -> dict[str, Any]:
    import torch

    return {
        "model": cpu_model(),
        "architecture": platform.machine(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
    }


def _cuda() -> dict[str, Any]:
    import torch

    found: dict[str, Any] = {
        "available": torch.cuda.is_available(),
        "built_for": torch.version.cuda,
        "devices": [],
        "reason": None,
    }
    if torch.version.cuda is None:
        found["reason"] = "this torch is built without CUDA"
    elif not found["available"]:
        found["reason"] = "no device answers: no GPU, or no driver for it"
    else:
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            found["devices"].append(
                {
                    "name": properties.name,
                    "capability": f"{properties.major}.{properties.minor}",
                    "memory_bytes": properties.total_memory,
                }
            )
    return found


def _describe_gpu(device: dict[str, Any]) -> str:
    return f"{device['name']} (sm {device['capability']}, {device['memory_bytes'] / 2**30:.0f} GiB)"


def _distributed() -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        reason = "this torch is built without torch.distributed"
        return {"gloo": False, "nccl": False, "mpi": False, "nccl_version": None, "reason": reason}
    nccl = dist.is_nccl_available() and torch.cuda.is_available()
    return {
        "gloo": dist.is_gloo_available(),
        "nccl": nccl,
        "mpi": dist.is_mpi_available(),
        "nccl_version": ".".join(map(str, torch.cuda.nccl.version())) if nccl else None,
        "reason": None,
    }


def _cpp() -> dict[str, Any]:
    """Return the compiler that Inductor would call for CPU code, tried on a file with the headers of such code."""
    found: dict[str, Any] = {"path": None, "version": None, "usable": False, "reason": None}
    candidates = [os.environ["CXX"]] if os.environ.get("CXX") else ["clang++" if sys.platform == "darwin" else "g++"]
    found["path"] = next((path for name in candidates if (path := shutil.which(name))), None)
    if found["path"] is None:
        found["reason"] = f"none of {', '.join(candidates)} is on PATH"
        return found
    try:
        found["version"] = _run([found["path"], "--version"]).stdout.partition("\n")[0]
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "probe.cpp")
            source.write_text(_CPP_PROBE)
            includes = {f"-I{sysconfig.get_path(kind)}" for kind in ("include", "platinclude")}
            tried = _run(
                [found["path"], *sorted(includes), "-fopenmp", "-c", str(source), "-o", str(source.with_suffix(".o"))]
            )
    except (OSError, subprocess.TimeoutExpired) as error:
        found["reason"] = f"{found['path']} does not run: {error}"
        return found
    found["usable"] = tried.returncode == 0
    if not found["usable"]:
        errors = (
            [line for line in tried.stderr.splitlines() if "error" in line]
            or tried.stderr.splitlines()
            or ["no message"]
        )
        found["reason"] = f"{found['path']} cannot compile what Inductor writes: {errors[0]}"
    return found


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S, check=False, stdin=subprocess.DEVNULL
    )


def _triton() -> dict[str, Any]:
    from deepytorch.torch_internals import has_triton, has_triton_package

    torch_version, version = _version_of("torch"), _version_of("triton")
    paired = TRITON_OF_TORCH.get(_minor(torch_version or ""))
    usable = bool(has_triton())
    reason = None
    if not usable:
        reason = "no device that it compiles for; its interpreter works" if has_triton_package() else "not installed"
    return {"version": version, "paired": paired, "usable": usable, "reason": reason}


def _attention() -> dict[str, Any]:
    import torch

    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError as error:
        return {"varlen_attn": False, "reason": f"this torch has none: {error}"}
    if not torch.cuda.is_available():
        return {"varlen_attn": False, "reason": "CUDA only; CPU uses deepytorch's own packed attention"}
    if torch.cuda.get_device_capability() < (8, 0):
        return {"varlen_attn": False, "reason": "needs an Ampere GPU or newer"}
    return {"varlen_attn": True, "reason": f"{varlen_attn.__module__}, fp16 and bf16"}


def _backend() -> dict[str, Any]:
    """Return whether torch finds the backend by name, and whether the named module can be imported."""
    points = list(metadata.entry_points(group=_BACKEND_GROUP, name="deepytorch"))
    if not points:
        return {"registered": False, "target": None, "reason": f"no entry point in the group {_BACKEND_GROUP}"}
    point = points[0]
    try:
        point.load()
    except Exception as error:
        return {"registered": False, "target": point.value, "reason": f"{point.value} does not load: {error!r}"}
    return {"registered": True, "target": point.value, "reason": None}


def _cache(path: Path) -> dict[str, Any]:
    """Return the state of the cache folder; if it does not exist yet, it is as writable as its nearest parent."""
    exists = path.is_dir()
    files = [file for file in path.rglob("*") if file.is_file()] if exists else []
    nearest = next(parent for parent in (path, *path.parents) if parent.exists())
    mode = stat.S_IMODE(path.stat().st_mode) if exists else None
    return {
        "path": str(path),
        "exists": exists,
        "writable": nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK),
        "mode": None if mode is None else f"{mode:04o}",
        "open_to_others": mode is not None and bool(mode & 0o077),
        "num_files": len(files),
        "size_bytes": sum(file.stat().st_size for file in files),
    }
