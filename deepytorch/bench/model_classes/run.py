"""The runs of `deepytorch bench models`: two processes a model, and a line of JSON for each in a file."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from deepytorch.bench.model_classes.batches import STEPS_BEFORE
from deepytorch.bench.model_classes.catalog import TASKS, ModelClass, model_classes
from deepytorch.bench.options import check_at_least, check_choice
from deepytorch.bench.processes import ending, last_lines
from deepytorch.bench.results import Record, decoded
from deepytorch.config import process_environment
from deepytorch.errors import DataError, ScriptError
from deepytorch.version import __version__

LOWERINGS = ("aot_eager", "eager", "inductor")
EQUAL, WRONG, FAILS, EAGER_FAILS, NOT_BUILT = "equal", "wrong", "fails", "eager fails", "not built"
OUTCOMES = (EQUAL, WRONG, FAILS, EAGER_FAILS, NOT_BUILT)
GRAPH, ENTRY, PART, DECLINED = "in graph", "at entry", "in part", "declined"
_SERVER = Path(__file__).with_name("server.py")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelsOptions:
    """The options of `deepytorch bench models`.

    only: class names or families; empty: all. out: the file of lines, which a later run goes on with. again: measure
    what it has anew. jobs: models at a time. timeout_s: of each of a model's two processes.
    """

    out: Path
    tasks: tuple[str, ...] = tuple(TASKS)
    only: tuple[str, ...] = ()
    again: bool = False
    jobs: int = 1
    timeout_s: float = 180.0
    lowering: str = "aot_eager"

    def __post_init__(self) -> None:
        """Raise `ConfigError` for a value that is not accepted."""
        check_choice(self, "tasks", TASKS)
        check_choice(self, "lowering", LOWERINGS)
        check_at_least(self, 1, "jobs")
        check_at_least(self, 0, "timeout_s")


@dataclass(frozen=True, kw_only=True, slots=True)
class Line(Record):
    """One model class.

    Attributes:
        outcome: One of `OUTCOMES`.
        steps: How each step ran: "graph", "entry" (packed there), "part" (packed in some regions), "padded",
            "profiled" (in eager) or "eager".
        sides: The side of the pads in each.
        reasons: Why something was not packed, by the report.
        furthest: The number that is furthest from eager's, measured by what is allowed.
        difference: Its difference, relative; None: not finite, or nothing was compared.
        own: The most that one of eager's own numbers changes by if every weight is moved by its last bit.
        draws: Whether the forward draws random numbers without dropout: packed steps draw others.
        finite: Whether all of eager's numbers are finite.
        error: Why nothing was compared.
    """

    task: str
    family: str
    name: str
    outcome: str
    steps: list[str] = field(default_factory=list)
    sides: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    regions: list[str] = field(default_factory=list)
    has_mask: bool = False
    draws: bool = False
    finite: bool = True
    furthest: str = ""
    difference: float | None = None
    own: float | None = None
    allowed: float | None = None
    error: str = ""
    eager_seconds: float = 0.0
    seconds: float = 0.0
    compile_seconds: float = 0.0
    process_seconds: float = 0.0
    lowering: str = ""
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Return what tells lines apart."""
        return ModelClass(self.task, self.family, self.name).key

    @property
    def how(self) -> str:
        """Return where right-padded steps were packed, after the first ones of each graph."""
        right = [step for step, side in zip(self.steps, self.sides, strict=False) if side == "right"]
        kinds = set(right[STEPS_BEFORE:])
        if len(kinds) > 1:  # another length may be traced anew, and its first step is profiled
            kinds.discard("profiled")
        for kind, how in (("entry", ENTRY), ("graph", GRAPH)):
            if kinds and kinds <= {"graph", "entry"} and kind in kinds:
                return how
        return PART if kinds & {"graph", "entry", "part"} else DECLINED


def run_models(options: ModelsOptions, notify: Callable[[str], None] = lambda _: None) -> Iterator[Line]:
    """Run what the file does not have yet, and yield each new line once it is written."""
    wanted = model_classes(options.tasks, options.only)
    known = set() if options.again else {line.key for line in read_lines(options.out)}
    left: queue.SimpleQueue[ModelClass] = queue.SimpleQueue()
    count = 0
    for which in wanted:
        if which.key not in known:
            left.put(which)
            count += 1
    found: queue.SimpleQueue[Line | BaseException] = queue.SimpleQueue()
    stop = threading.Event()
    threads = [
        threading.Thread(target=_work, args=(options, left, found, stop), daemon=True)
        for _ in range(min(options.jobs, count))
    ]
    for thread in threads:
        thread.start()
    try:
        for number in range(count):
            notify(f"{number + 1} of {count}")
            line = found.get()
            if isinstance(line, BaseException):
                raise line
            _write(options.out, line)
            yield line
    finally:
        stop.set()
        for thread in threads:
            thread.join(options.timeout_s)


def read_lines(path: Path) -> list[Line]:
    """Return the lines of a file, of each model the last one, by task and name. A file that is not there has none."""
    if not path.exists():
        return []
    lines: dict[str, Line] = {}
    try:
        for text in path.read_text(encoding="utf-8").splitlines():
            line = decoded(Line, json.loads(text))
            lines[line.key] = line
    except (OSError, ValueError) as error:
        raise DataError(f"The file {path} cannot be read: {error}.") from error
    order = list(TASKS)
    return sorted(lines.values(), key=lambda line: (order.index(line.task), line.name))


def _write(path: Path, line: Line) -> None:
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line.to_json()) + "\n")
    except OSError as error:
        raise DataError(f"The file {path} cannot be written: {error.strerror}. Give another --out path.") from error


def _work(
    options: ModelsOptions,
    left: queue.SimpleQueue[ModelClass],
    found: queue.SimpleQueue[Line | BaseException],
    stop: threading.Event,
) -> None:
    try:
        with _Server() as server:
            while not stop.is_set():
                try:
                    which = left.get_nowait()
                except queue.Empty:
                    return
                found.put(_line(options, which, server))
    except BaseException as error:  # told in the thread that waits for lines
        found.put(error)


class _Server:
    """The process that forks those of the models, see `server`."""

    def __enter__(self) -> _Server:
        self._scratch = tempfile.TemporaryDirectory(prefix="deepytorch-bench-")
        self.folder = Path(self._scratch.name)
        environment = dict(process_environment())
        paths = [str(Path(__file__).parents[3]), environment.get("PYTHONPATH")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        self._errors = (self.folder / "server.log").open("wb")
        self._process = subprocess.Popen(
            [sys.executable, str(_SERVER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment,
            text=True,
        )
        return self

    def run(self, **job: Any) -> int | None:
        """Run one job; return its exit status, or None if it was not over in time."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            said = "\n".join(last_lines(self.folder / "server.log", 12))
            raise ScriptError(f"The process that starts those of the models has ended. Its last lines:\n{said}")
        status: int | None = json.loads(answer)
        return status

    def __exit__(self, *_: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        self._process.kill()
        self._process.wait()
        self._errors.close()
        self._scratch.cleanup()


def _line(options: ModelsOptions, which: ModelClass, server: _Server) -> Line:
    """Return the line of one model: without the import in a process, then with it in another."""
    began = time.monotonic()
    given: dict[str, Any] = {"task": which.task, "family": which.family, "name": which.name}
    given |= {"lowering": options.lowering, "versions": _versions()}
    with tempfile.TemporaryDirectory(dir=server.folder) as scratch:
        found = _part("eager", options, which, server, Path(scratch))
        if "outcome" not in found:
            found |= _part("import", options, which, server, Path(scratch))
        elif found["outcome"] == FAILS:
            found["outcome"] = EAGER_FAILS
    for name in ("difference", "own", "allowed"):
        if found.get(name) == float("inf"):
            found[name] = None
    return Line(**given, **found, process_seconds=time.monotonic() - began)


def _part(part: str, options: ModelsOptions, which: ModelClass, server: _Server, folder: Path) -> dict[str, Any]:
    environment = {"DEEPYTORCH": "off" if part == "eager" else "on", "DEEPYTORCH_COMPILE": "wait"}
    if options.lowering == "inductor":  # nothing is taken from an earlier run
        environment |= {"TORCHINDUCTOR_CACHE_DIR": str(folder)}
    log = folder / f"{part}.log"
    status = server.run(
        environment=environment,
        arguments={
            "folder": str(folder),
            "part": part,
            "which": [which.task, which.family, which.name],
            "lowering": options.lowering,
        },
        log=str(log),
        timeout_s=options.timeout_s,
    )
    if status is None:
        return {"outcome": FAILS, "error": f"not over in {options.timeout_s:g} seconds"}
    if status:
        said = last_lines(log, 1)
        return {"outcome": FAILS, "error": f"{ending(status, 'exit status')}: {' '.join(said)}"[:300]}
    answer: dict[str, Any] = json.loads((folder / f"{part}.json").read_text(encoding="utf-8"))
    return answer


def _versions() -> dict[str, str]:
    found = {"torch": version("torch"), "transformers": version("transformers"), "deepytorch": __version__}
    commit = _commit()
    if commit:
        found["commit"] = commit
    return found


def _commit() -> str | None:
    """Return the commit of the sources, if they are a git tree's."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return None
