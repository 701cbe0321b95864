"""A reader for the recorder that the ranks of a running process's groups keep in their shared memory."""

from __future__ import annotations

from pathlib import Path

from deepytorch.comm.group.native import native
from deepytorch.errors import ConfigError, DataError

_SEGMENT = "/memfd:deepytorch"


def read_groups(process: int) -> list[str]:
    """Return a text for each process group that `process` shares memory in: the last calls of its ranks on this host.

    A text has the last 64 collectives of each rank with dtype, size and reduction, whether each waits, runs or is done,
    and for how long. The process may be stopped or wait for others, and is not disturbed. Raises `ConfigError` where
    there is no such process or reading is not permitted, `DataError` where it has no group whose ranks share memory.
    """
    folder = Path(f"/proc/{process}/fd")
    try:
        found = [(entry.name, entry.readlink()) for entry in folder.iterdir()]
    except OSError as error:
        raise ConfigError(
            f"process {process} cannot be looked into: {error}. Expected a running process of yours, such as a rank"
        ) from error
    module = native.load()
    if module is None:
        raise ConfigError("deepytorch's C++ is not built here: see `deepytorch doctor`")
    texts = []
    for number in sorted(int(name) for name, target in found if str(target).startswith(_SEGMENT)):
        try:
            texts.append(module.Segment.look(process, number))
        except module.CommError as error:
            raise DataError(str(error)) from error
    texts = [text for text in texts if text]
    if not texts:
        raise DataError(
            f"process {process} has no process group of deepytorch that has called a collective through shared memory"
        )
    return texts
