"""The store of graphs compiled in the background: one entry a graph, found by a digest of all that its code depends on.

An entry holds the files that `torch.compile` left in a cache folder of the entry's own. To use an entry is to link its
files into the folder that torch looks in. Entries are folders that only their owner can reach; the least recently used
ones are dropped when there are too many.
"""

from __future__ import annotations

import json
import os
import shutil
import tarfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepytorch.config import Environment
from deepytorch.errors import DataError
from deepytorch.log import logger
from deepytorch.private_files import cache_directory, prepare_private, replace_file
from deepytorch.torch_internals import inductor_cache_dir

_FILES, _ABOUT, _KEY = "torch", "entry.json", "key.json"


@dataclass(frozen=True)
class Entry:
    """One compiled graph. about: its description, as JSON."""

    path: Path
    about: dict[str, Any]

    @property
    def digest(self) -> str:
        """Return the digest by which the entry is found."""
        return self.path.name

    @property
    def num_bytes(self) -> int:
        """Return the entry's size on disk."""
        return int(self.about["num_bytes"])

    @property
    def used(self) -> float:
        """Return the time of the entry's last use, or of its making, as `time.time()` counts."""
        return (self.path / _ABOUT).stat().st_mtime

    def key(self) -> dict[str, list[str]]:
        """Return the parts of the key by which torch finds the entry's code; empty if they were not written."""
        try:
            return dict(json.loads((self.path / _KEY).read_text(encoding="utf-8")))
        except (OSError, ValueError):
            return {}

    def install(self) -> None:
        """Let torch find the entry's files. Raises `OSError` if torch's cache folder cannot be written."""
        source, target = self.path / _FILES, Path(inductor_cache_dir())
        for file in sorted(each for each in source.rglob("*") if each.is_file()):
            place = target / file.relative_to(source)
            if not place.exists():
                place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                _link(file, place)
        os.utime(self.path / _ABOUT)


def folder() -> Path | None:
    """Return the folder of the entries; None, with a log message, if it is not for this user alone."""
    found = cache_directory() / "compiled"
    for directory in (cache_directory(), found):
        refusal = prepare_private(directory)
        if refusal is not None:
            logger.debug("compiled code is not kept in %s: %s", directory, refusal)
            return None
    return found


def find(digest: str) -> Entry | None:
    """Return the entry of a digest, if there is one."""
    place = folder()
    return None if place is None else _read(place / digest)


def entries() -> list[Entry]:
    """Return all entries, the most recently used first."""
    place = folder()
    if place is None:
        return []
    found = [_read(each) for each in place.iterdir() if not each.name.startswith(".") and each.is_dir()]
    return sorted((each for each in found if each is not None), key=lambda each: each.used, reverse=True)


def keep(made: Path, place: Path, about: dict[str, Any]) -> None:
    """Move the folder `made`, which `files_of` has filled, to its place. about: a description for people."""
    num_bytes = sum(each.stat().st_size for each in (made / _FILES).rglob("*") if each.is_file())
    replace_file(made / _ABOUT, json.dumps({**about, "num_bytes": num_bytes, "made": time.time()}))
    made.chmod(0o700)
    if place.exists():  # not a whole entry, or it would have been used
        shutil.rmtree(place)
    made.rename(place)


def write_key(made: Path, key: Mapping[str, Sequence[str]]) -> None:
    """Write the parts of the key of what the folder `made` holds, if there are any."""
    if key:
        replace_file(made / _KEY, json.dumps(key))


def files_of(made: Path) -> Path:
    """Make the folder `made`, which is to become an entry, anew; return the folder in it for torch's files."""
    shutil.rmtree(made, ignore_errors=True)
    found = made / _FILES
    found.mkdir(mode=0o700, parents=True)
    return found


def trim(limit_bytes: int | None = None) -> None:
    """Drop the least recently used entries, until the rest is within the limit."""
    left = Environment.read().cache_mb * 2**20 if limit_bytes is None else limit_bytes
    for entry in entries():
        left -= entry.num_bytes
        if left < 0:
            remove(entry)


def remove(entry: Entry) -> None:
    """Drop one entry. A process that has linked the entry's files keeps them."""
    shutil.rmtree(entry.path, ignore_errors=True)


def export(path: Path) -> int:
    """Write all entries into one compressed file, for another machine like this one; return their number."""
    found = entries()
    with tarfile.open(path, "w:gz") as archive:
        for entry in found:
            archive.add(entry.path, arcname=entry.digest)
    path.chmod(0o600)
    return len(found)


def take_in(path: Path) -> int:
    """Add the entries of a file that `export` has written to those of this user; return the number of new ones.

    Compiled code is run as it is: take in only files that you have made. Raises `DataError` for a file that holds
    anything else, or that others can write.
    """
    place = folder()
    if place is None:
        raise DataError(f"{cache_directory()} is not for this user alone; expected a folder of mode 0700")
    if not path.is_file():
        raise DataError(f"{path} is not a file; expected one that `deepytorch cache export` has written")
    status = path.stat()
    if hasattr(os, "getuid") and (status.st_uid not in (os.getuid(), 0) or status.st_mode & 0o022):
        raise DataError(
            f"others can write {path}, and it holds code that will run; expected a file of yours, mode 0600"
        )
    new = 0
    scratch = place / f".import-{os.getpid()}"
    try:
        with tarfile.open(path, "r:gz") as archive:
            members = archive.getmembers()
            for member in members:
                if not (member.isfile() or member.isdir()) or ".." in Path(member.name).parts or member.name[:1] == "/":
                    raise DataError(f"{path} holds {member.name!r}; expected compiled entries only")
                member.uid, member.gid, member.uname, member.gname = *_owner(), "", ""
            archive.extractall(scratch, members, **_EXTRACTS)
        for each in scratch.rglob("*"):
            each.chmod(0o700 if each.is_dir() else 0o600)
        for made in sorted(scratch.iterdir()):
            if _read(made) is not None and _read(place / made.name) is None:
                made.rename(place / made.name)
                new += 1
    except (tarfile.TarError, EOFError, OSError) as error:
        raise DataError(f"{path} is not a file that `deepytorch cache export` has written: {error}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return new


# Python before 3.10.12 and 3.11.4 has no filters: names, kinds and owners are checked, and modes set, by `take_in`.
_EXTRACTS: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}


def _owner() -> tuple[int, int]:
    return (os.getuid(), os.getgid()) if hasattr(os, "getuid") else (0, 0)


def remove_stale(place: Path, older_than_seconds: float = 86400.0) -> None:
    """Remove folders that a killed process has left half-made."""
    for each in _hidden(place):
        if time.time() - each.stat().st_mtime > older_than_seconds:
            shutil.rmtree(each, ignore_errors=True)


def _hidden(place: Path) -> Iterator[Path]:
    return (each for each in place.iterdir() if each.name.startswith(".") and each.is_dir())


def _read(path: Path) -> Entry | None:
    try:
        about = json.loads((path / _ABOUT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if prepare_private(path) is not None or not isinstance(about, dict) or not isinstance(about.get("num_bytes"), int):
        return None
    return Entry(path, about)


def _link(file: Path, place: Path) -> None:
    """Link a file to a place, or copy it if it cannot be linked. The place gets the whole file, or nothing."""
    temporary = place.with_name(f".{place.name}.{os.getpid()}")
    try:
        try:
            os.link(file, temporary)
        except OSError:
            shutil.copy2(file, temporary)
        temporary.replace(place)
    finally:
        temporary.unlink(missing_ok=True)
