"""The C++ of `csrc`: compiled at its first use, kept in the user's cache, loaded once in a process."""

from __future__ import annotations

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
import time
from datetime import timedelta
from pathlib import Path
from types import ModuleType

import torch
from filelock import FileLock

from deepytorch.config import process_environment
from deepytorch.errors import BuildError
from deepytorch.log import logger, once
from deepytorch.private_files import cache_directory, prepare_private

_SOURCES = Path(__file__).parents[1] / "csrc"
_NAME = "deepytorch_comm"
_FLAGS = ("-O3", "-std=c++20", "-fvisibility=hidden")  # torch 2.11 would ask for C++17
BUILD_TIMEOUT = timedelta(minutes=15)
_COMPLAINT = re.compile(r"\berror: |: not found$")  # of a compiler, or of the shell that was to start it


@functools.cache
def load() -> ModuleType | None:
    """The native module, built if need be; None, with one warning, where it cannot be built."""
    try:
        return _import(build())
    except BuildError as error:
        once(
            logging.WARNING,
            "the deepytorch process group runs on stock gloo and nccl: %s. `deepytorch doctor` says what is missing",
            error,
        )
        return None


def build() -> Path:
    """Compile the native module unless the cache holds it; return its file. Takes half a minute on two cores, once.

    Raises `BuildError` where it cannot be compiled. Several processes may call it at a time: one compiles.
    """
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
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                try:
                    shutil.move(_compile(Path(scratch)), target)
                except BuildError as error:
                    failure.write_text(str(error), encoding="utf-8")
                    raise
    except OSError as error:
        raise BuildError(f"its C++ cannot be compiled into {folder}: {error}") from error
    return target


def is_built() -> bool:
    """Whether the cache holds the native module."""
    return (_folder() / f"{_NAME}.so").exists()


def _folder() -> Path:
    return cache_directory() / "native" / digest()


def _compile(scratch: Path) -> Path:
    """Compile in a process of its own, so that nothing of a half-made module stays in this one."""
    # The working directory is no place to import from, unless this process imports from there too.
    code = "import sys; sys.path.remove(''); from deepytorch.comm.group import native; native.compile_here()"
    command = [sys.executable, "-c", code, str(scratch)]
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
