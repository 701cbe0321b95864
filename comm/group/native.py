"""The C++ of `csrc`: carried compiled by a wheel, or compiled at its first use and kept in the user's cache."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.machinery
import importlib.util
import logging
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import ModuleType

import torch
from filelock import FileLock

from deepytorch.background import NOT_FROM_HERE, end_with_parent, is_ending, start
from deepytorch.config import process_environment
from deepytorch.errors import BuildError
from deepytorch.log import logger, once
from deepytorch.private_files import cache_directory, prepare_private

_SOURCES = Path(__file__).parents[1] / "csrc"
_CARRIED = Path(__file__).parents[1] / "built"  # of a wheel that was built so: see setup.py
_NAME = "deepytorch_comm"
_FLAGS = ("-O3", "-std=c++20", "-fvisibility=hidden")  # torch 2.11 would ask for C++17
BUILD_TIMEOUT = timedelta(minutes=15)
_COMPLAINT = re.compile(r"\berror: |: not found$")  # of a compiler, or of the shell that was to start it


def load() -> ModuleType | None:
    """The native module, built if need be; None, with one warning, where it cannot be built."""
    with _LOADING:  # by one thread: its types can be registered once
        return _load()


_LOADING = threading.Lock()


@functools.cache
def _load() -> ModuleType | None:
    global _LOADED
    try:
        _LOADED = _import(build())
        return _LOADED
    except BuildError as error:
        once(
            logging.WARNING,
            "the deepytorch process group runs on stock gloo and nccl: %s. `deepytorch doctor` says what is missing",
            error,
        )
        return None


def loaded() -> ModuleType | None:
    """The native module if this process has loaded it, as it has for its first group that is ours."""
    return _LOADED


_LOADED: ModuleType | None = None


def build(scratch: Path | None = None) -> Path:
    """Compile the native module unless the wheel or the cache holds it; return its file.

    Takes half a minute on two cores, once.

    scratch: a folder to work in; in the cache if none is given. Several processes may call it at a time: one compiles.
    Raises `BuildError` where it cannot be compiled.
    """
    found = carried()
    if found is not None:
        return found
    folder = _folder()
    for directory in (cache_directory(), folder.parent, folder):
        refusal = prepare_private(directory)
        if refusal is not None:
            raise BuildError(f"the cache directory {directory} is not used: {refusal}")
    target = folder / f"{_NAME}.so"
    if target.exists():
        return target
    asked, failure = time.time(), folder / "failure"
    try:
        with FileLock(folder / "build.lock", mode=0o600):
            if target.exists():
                return target
            if failure.exists() and failure.stat().st_mtime > asked:  # of a process that this one has waited for
                raise BuildError(failure.read_text(encoding="utf-8"))
            logger.info("compiling deepytorch's collectives (half a minute, once)")
            with tempfile.TemporaryDirectory(dir=scratch or folder) as inside:
                try:
                    made = target.with_suffix(".new")  # beside it: a whole file or none
                    shutil.move(_compile(Path(inside)), made)
                    made.replace(target)
                    failure.unlink(missing_ok=True)
                except BuildError as error:
                    if not is_ending():  # else it was ended, and the next one may do better
                        failure.write_text(str(error), encoding="utf-8")
                    raise
    except OSError as error:
        raise BuildError(f"its C++ cannot be compiled into {folder}: {error}") from error
    return target


def build_beside() -> None:
    """Have another process compile the native module, at low priority, unless one of this process's does already."""
    global _BESIDE
    if _BESIDE is not None and _BESIDE.poll() is None:
        return
    try:
        _BESIDE = start("from deepytorch.comm.group import native; native.build_for({parent})")
    except OSError as error:
        once(logging.WARNING, "collectives stay on gloo: no process could be started to compile them (%s)", error)


_BESIDE: subprocess.Popen[bytes] | None = None


def builds_beside() -> bool:
    """Whether the process that `build_beside` has started is still at it."""
    return _BESIDE is not None and _BESIDE.poll() is None


def build_for(parent: int) -> None:
    """In that process: compile, unless `parent` ends before."""
    with contextlib.suppress(BuildError, OSError), tempfile.TemporaryDirectory(prefix="deepytorch-") as scratch:
        end_with_parent(parent, Path(scratch))
        build(Path(scratch))  # who uses it will say what is wrong


def failed() -> str | None:
    """Why it could not be compiled, if that was tried before. `deepytorch build` tries again."""
    try:
        return (_folder() / "failure").read_text(encoding="utf-8")
    except OSError:
        return None


def is_built() -> bool:
    """Whether the installed package or the cache holds the native module."""
    return carried() is not None or (_folder() / f"{_NAME}.so").exists()


def is_being_built() -> bool:
    """Whether some process of this user compiles it now."""
    lock = _folder() / "build.lock"
    if not lock.exists():
        return False
    try:
        with FileLock(lock, timeout=0):
            return False
    except OSError:  # a timeout is one
        return True


def carried() -> Path | None:
    """The native module that the installed package brought, if it fits this torch, this Python and this machine."""
    file = _CARRIED / digest() / f"{_NAME}.so"
    return file if file.exists() else None


def carry(folder: str) -> None:
    """Compile the native module into a package that is being built, for `carried` to find it; for `setup.py`."""
    target = Path(folder) / digest() / f"{_NAME}.so"
    with tempfile.TemporaryDirectory() as scratch:
        made = _compile(Path(scratch))
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(made, target)


def _folder() -> Path:
    return cache_directory() / "native" / digest()


def _compile(scratch: Path) -> Path:
    """Compile in a process of its own, so that nothing of a half-made module stays in this one."""
    code = "from deepytorch.comm.group import native; native.compile_here()"
    command = [sys.executable, "-c", NOT_FROM_HERE + code, str(scratch)]
    environment = {**process_environment(), "TORCH_EXTENSIONS_DIR": str(scratch)}
    environment["PYTHONPATH"] = os.pathsep.join(entry or os.getcwd() for entry in sys.path)  # this very package
    scripts = sysconfig.get_path("scripts")  # where pip put ninja, also for an environment that was not activated
    environment["PATH"] = os.pathsep.join([scripts, environment.get("PATH", os.defpath)])
    try:
        done = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            timeout=BUILD_TIMEOUT.total_seconds(),
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"its C++ was not compiled: {error}") from error
    made = scratch / f"{_NAME}.so"
    if done.returncode != 0 or not made.exists():
        lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        wrong = next((line for line in lines if _COMPLAINT.search(line)), lines[-1] if lines else "no message")
        logger.debug("output of the compiler:\n%s", "\n".join(lines))
        raise BuildError(f"its C++ does not compile here: {wrong.strip()[:300]}")
    return made


def compile_here() -> None:
    """Compile into the folder named by the first argument of this process; for `build` only."""
    from torch.utils import cpp_extension

    folder = Path(sys.argv[1])
    cpp_extension.load(
        name=_NAME,
        sources=[str(path) for path in _translation_units(folder)],
        extra_cflags=list(_FLAGS),
        extra_include_paths=[str(_SOURCES)],
        build_directory=str(folder),
        is_python_module=False,
    )


def _translation_units(folder: Path) -> list[Path]:
    """What the compiler is given: reading torch's headers takes most of its time, so most files are read as one.

    The kernels stay alone, each with its instructions; the bindings too, so that two cores have as much to do each.
    """
    alone = [path for path in sorted(_SOURCES.glob("*.cpp")) if path.name.startswith(("bindings", "kernels"))]
    rest = [path.relative_to(_SOURCES) for path in sorted(_SOURCES.rglob("*.cpp")) if path not in alone]
    together = folder / "together.cpp"
    together.write_text("".join(f'#include "{path.as_posix()}"\n' for path in rest), encoding="utf-8")
    return [together, *alone]


@functools.cache
def digest() -> str:
    """A digest of everything that the binary depends on."""
    found = hashlib.sha256()
    for path in sorted(path for path in _SOURCES.rglob("*") if path.is_file()):
        found.update(path.relative_to(_SOURCES).as_posix().encode() + b"\0" + path.read_bytes())
    for part in (torch.__version__, sys.version, platform.machine(), *_FLAGS, process_environment().get("CXX", "")):
        found.update(part.encode() + b"\0")
    return found.hexdigest()[:16]


def _import(path: Path) -> ModuleType:
    loader = importlib.machinery.ExtensionFileLoader(_NAME, str(path))
    spec = importlib.util.spec_from_file_location(_NAME, path, loader=loader)
    assert spec is not None
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        raise BuildError(f"its compiled C++ {path} does not load: {error}. Remove that file") from error
    return module
