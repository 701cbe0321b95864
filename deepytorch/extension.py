"""Our C++ extensions of torch: compiled in a wheel, or compiled at their first use and kept in the user's cache.

There are two, each in the package that uses it: collectives in `deepytorch.comm`, and attention on a CPU in
`deepytorch.passes.ops`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.machinery
import importlib.util
import json
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

BUILD_TIMEOUT = timedelta(minutes=15)
_FLAGS = ("-O3", "-std=c++20", "-fvisibility=hidden")  # torch 2.11 would ask for C++17
_ENDED = re.compile(r"\bKilled\b|\bSIGKILL\b|out of memory|Cannot allocate memory|\[code=(137|-9)\]")
_COMPLAINT = re.compile(r"\berror: |: not found$")  # an error of a compiler, or of the shell that starts it


class Extension:
    """One native module: the C++ in `csrc` of a folder, for this torch, this Python and this machine.

    Args:
        name: The module's name.
        home: The folder that holds `csrc`, and `built` if a wheel carries the module compiled.
        what: Its purpose, for messages: "collectives".
        without: A clause for messages on a run that has to do without it.
        flags: Flags for the compiler, besides those of all extensions.
        alone: The prefixes of sources that are compiled by themselves. All others are compiled as one file, since most
            of a compiler's time goes into torch's headers.
    """

    def __init__(
        self, name: str, home: Path, *, what: str, without: str, flags: tuple[str, ...] = (), alone: tuple[str, ...]
    ) -> None:
        self.name = name
        self.home = home
        self.what = what
        self.without = without
        self.flags = (*_FLAGS, *flags)
        self._alone = alone
        self._sources = home / "csrc"
        self._loading = threading.Lock()  # one thread loads: the module's types can be registered only once
        self._tried = False
        self._loaded: ModuleType | None = None
        self._compiler_process: subprocess.Popen[bytes] | None = None

    def load(self) -> ModuleType | None:
        """Return the native module, built if need be; None, with one warning, if it cannot be built."""
        with self._loading:
            if not self._tried:
                try:
                    self._loaded = self._import(self.build())
                except BuildError as error:
                    text = "%s: %s. `deepytorch doctor` says what is missing"
                    once(logging.WARNING, text, self.without, error)
                self._tried = True
            return self._loaded

    def loaded(self) -> ModuleType | None:
        """Return the native module if this process has loaded it, which it does before the first use."""
        return self._loaded

    def build(self, scratch: Path | None = None) -> Path:
        """Compile the native module unless the wheel or the cache holds it; return its file.

        This takes up to half a minute on two cores, once. If several processes call this at a time, one compiles.
        scratch: a folder to work in; None: in the cache. Raises `BuildError` if the module cannot be compiled.
        """
        found = self.carried()
        if found is not None:
            return found
        folder = self._folder()
        for directory in (cache_directory(), folder.parent, folder):
            refusal = prepare_private(directory)
            if refusal is not None:
                raise BuildError(f"the cache directory {directory} is not used: {refusal}")
        target = folder / f"{self.name}.so"
        if target.exists():
            return target
        asked, failure, killed = time.time(), folder / "failure", folder / "killed"
        try:
            with FileLock(folder / "build.lock", mode=0o600):
                if target.exists():
                    return target
                for told in (failure, killed):
                    if told.exists() and told.stat().st_mtime > asked:  # of a process that this one has waited for
                        raise BuildError(told.read_text(encoding="utf-8"))
                logger.info("compiling deepytorch's %s (up to half a minute, once)", self.what)
                with tempfile.TemporaryDirectory(dir=scratch or folder) as inside:
                    try:
                        made = target.with_suffix(".new")  # in the target's folder: a rename gives the whole file
                        shutil.move(self._compile(Path(inside)), made)
                        made.replace(target)
                        failure.unlink(missing_ok=True)
                        killed.unlink(missing_ok=True)
                    except BuildError as error:
                        once_more = isinstance(error, _Ended) and not killed.exists()
                        if not is_ending():  # else this process was ended, and the next one may succeed
                            (killed if once_more else failure).write_text(str(error), encoding="utf-8")
                        raise
        except OSError as error:
            raise BuildError(f"its C++ cannot be compiled into {folder}: {error}") from error
        return target

    def build_in_background(self) -> None:
        """Compile the module in a background process, unless one of this process already does."""
        if self.builds_in_background():
            return
        try:
            code = f"from deepytorch.extension import build_for; build_for({self._description()!r}, {{parent}})"
            self._compiler_process = start(code)
        except OSError as error:
            once(logging.WARNING, "%s: no process could be started to compile its C++ (%s)", self.without, error)

    def builds_in_background(self) -> bool:
        """Return whether the process that `build_in_background` has started still runs."""
        return self._compiler_process is not None and self._compiler_process.poll() is None

    def failed(self) -> str | None:
        """Why it could not be compiled, if that was tried before. `deepytorch build` tries again.

        A compiler that was killed, as where memory is short for a while, counts at its second time.
        """
        try:
            return (self._folder() / "failure").read_text(encoding="utf-8")
        except OSError:
            return None

    def is_built(self) -> bool:
        """Return whether the installed package or the cache holds the native module."""
        return self.carried() is not None or (self._folder() / f"{self.name}.so").exists()

    def is_being_built(self) -> bool:
        """Return whether some process of this user compiles the module now."""
        lock = self._folder() / "build.lock"
        if not lock.exists():
            return False
        try:
            with FileLock(lock, timeout=0):
                return False
        except OSError:  # a timeout of the lock is an OSError
            return True

    def carried(self) -> Path | None:
        """Return the native module of the installed package, if it fits this torch, Python and machine."""
        file = self.home / "built" / self.digest() / f"{self.name}.so"
        return file if file.exists() else None

    def carry(self, folder: Path) -> None:
        """Compile the native module into a package under construction, where `carried` finds it; for `setup.py`."""
        target = folder / self.digest() / f"{self.name}.so"
        with tempfile.TemporaryDirectory() as scratch:
            made = self._compile(Path(scratch))
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(made, target)

    @functools.cache  # noqa: B019 (there are two of them, for as long as the process lasts)
    def digest(self) -> str:
        """Return a digest of everything that the binary depends on."""
        found = hashlib.sha256()
        for path in sorted(path for path in self._sources.rglob("*") if path.is_file()):
            found.update(path.relative_to(self._sources).as_posix().encode() + b"\0" + path.read_bytes())
        compiler = process_environment().get("CXX", "")
        for part in (torch.__version__, sys.version, platform.machine(), *self.flags, compiler):
            found.update(part.encode() + b"\0")
        return found.hexdigest()[:16]

    def compile_here(self, folder: Path) -> None:
        """Compile into `folder`, in this process; for `build`, which calls this in a process of its own."""
        from torch.utils import cpp_extension

        cpp_extension.load(
            name=self.name,
            sources=[str(path) for path in self._translation_units(folder)],
            extra_cflags=list(self.flags),
            extra_include_paths=[str(self._sources)],
            build_directory=str(folder),
            is_python_module=False,
        )

    def _folder(self) -> Path:
        return cache_directory() / "native" / self.digest()

    def _description(self) -> str:
        """Return the description from which another process makes the same extension."""
        flags = self.flags[len(_FLAGS) :]
        described = {
            "name": self.name,
            "what": self.what,
            "without": self.without,
            "flags": flags,
            "alone": self._alone,
        }
        return json.dumps(described | {"home": str(self.home)})

    def _compile(self, scratch: Path) -> Path:
        """Compile in a process of its own, so that nothing of a half-made module stays in this one."""
        code = "import sys; from deepytorch.extension import compile_for; compile_for(*sys.argv[1:])"
        command = [sys.executable, "-c", NOT_FROM_HERE + code, self._description(), str(scratch)]
        environment = {**process_environment(), "TORCH_EXTENSIONS_DIR": str(scratch)}
        environment["PYTHONPATH"] = os.pathsep.join(entry or os.getcwd() for entry in sys.path)  # the same package
        scripts = sysconfig.get_path("scripts")  # pip put ninja here, also if the environment is not activated
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
        made = scratch / f"{self.name}.so"
        if done.returncode != 0 or not made.exists():
            lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
            wrong = next((line for line in lines if _COMPLAINT.search(line)), lines[-1] if lines else "no message")
            logger.debug("output of the compiler:\n%s", "\n".join(lines))
            ended = [line.strip()[:300] for line in lines if _ENDED.search(line)]
            if done.returncode < 0 or ended:
                raise _Ended(f"the compiler of its C++ was ended, as where memory is short: {(ended or [wrong])[0]}")
            raise BuildError(f"its C++ does not compile here: {wrong.strip()[:300]}")
        return made

    def _translation_units(self, folder: Path) -> list[Path]:
        """Return the files for the compiler: those of `alone`, and one that includes all others."""
        alone = [path for path in sorted(self._sources.glob("*.cpp")) if path.name.startswith(self._alone)]
        rest = [path.relative_to(self._sources) for path in sorted(self._sources.rglob("*.cpp")) if path not in alone]
        together = folder / "together.cpp"
        together.write_text("".join(f'#include "{path.as_posix()}"\n' for path in rest), encoding="utf-8")
        return [together, *alone]

    def _import(self, path: Path) -> ModuleType:
        loader = importlib.machinery.ExtensionFileLoader(self.name, str(path))
        spec = importlib.util.spec_from_file_location(self.name, path, loader=loader)
        assert spec is not None
        try:
            module = importlib.util.module_from_spec(spec)
            loader.exec_module(module)
        except ImportError as error:
            raise BuildError(f"its compiled C++ {path} does not load: {error}. Remove that file") from error
        return module


class _Ended(BuildError):
    """An error for a compiler that was killed or had too little memory, through no fault of the code."""


def build_for(description: str, parent: int) -> None:
    """Compile in the process that `build_in_background` starts, unless `parent` ends before."""
    with contextlib.suppress(BuildError, OSError), tempfile.TemporaryDirectory(prefix="deepytorch-") as scratch:
        end_with_parent(parent, Path(scratch))
        _described(description).build(Path(scratch))  # a failure is reported when the extension is used


def compile_for(description: str, folder: str) -> None:
    """Compile into `folder` in the process that `build` starts."""
    _described(description).compile_here(Path(folder))


def _described(description: str) -> Extension:
    kept = json.loads(description)
    name, home, flags, alone = kept["name"], Path(kept["home"]), tuple(kept["flags"]), tuple(kept["alone"])
    return Extension(name, home, what=kept["what"], without=kept["without"], flags=flags, alone=alone)
