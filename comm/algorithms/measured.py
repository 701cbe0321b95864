"""Measured choices for GPUs: the algorithm that was fastest at each size, as measured and not predicted.

The results are kept on disk by the hosts, their GPUs and the versions of torch and NCCL, and read by later groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch

from deepytorch.comm.algorithms.base import COMPRESSED_BYTES, KINDS, Choice, Compression, OperationKind
from deepytorch.comm.algorithms.select import COLLECTIVES, ENGINE, ENGINE_MARGIN, Range, ranges_of
from deepytorch.comm.topology.checked_json import as_count, as_list, as_object, as_text
from deepytorch.comm.topology.topology import Topology
from deepytorch.config import Environment
from deepytorch.errors import DataError
from deepytorch.private_files import cache_directory, read_private_json, write_private_json

Tables = Mapping[OperationKind, tuple[Range, ...]]

_VERSION = 2
_NAMES = tuple(found.name for found in COLLECTIVES)


@dataclass(frozen=True, slots=True)
class Measured:
    """The measured choices: for each kind of collective, which algorithm runs at which size.

    Also, the number of bytes from which NCCL's all-reduces are faster in registered memory (None: never).
    """

    tables: Tables
    registered_from: int | None = None


def faster_from(times_us: Mapping[int, tuple[float, float]]) -> int | None:
    """Return the size from which the second way was over 1.10 times as fast at every size.

    The result is None if the second way was not so fast at the largest size. times_us: by payload bytes, ascending, the
    times of the first and the second way.
    """
    found = None
    for size, (first, second) in reversed(list(times_us.items())):
        if second * ENGINE_MARGIN >= first:
            break
        found = size
    return found


def table_of(times_us: Mapping[int, Mapping[Choice, float]]) -> tuple[Range, ...]:
    """Return the ranges that measured times give: for each size, and up to the next one, its fastest choice.

    times_us: by payload bytes, ascending, the time of each choice. The engine's time must be given, and the engine
    stays unless it takes over 1.10 times as long as the best.
    """
    return ranges_of((size, _fastest(times)) for size, times in times_us.items())


def _fastest(times_us: Mapping[Choice, float]) -> Choice:
    engine = next(choice for choice in times_us if choice.algorithm == ENGINE.name)
    best = min(times_us, key=lambda choice: times_us[choice])
    return best if times_us[best] * ENGINE_MARGIN < times_us[engine] else engine


def to_json(found: Measured) -> dict[str, Any]:
    """Return the measured choices as JSON values."""
    tables = {
        kind: [{"from_bytes": each.from_bytes, **asdict(each.choice)} for each in ranges]
        for kind, ranges in found.tables.items()
    }
    return {"tables": tables, "registered_from_bytes": found.registered_from}


def from_json(content: Any) -> Measured:
    """Return the measured choices that `to_json` wrote.

    Raises:
        DataError: the value has another layout.
    """
    values = as_object(content, "what was measured", ("tables", "registered_from_bytes"))
    tables = as_object(values["tables"], "the measured tables", (), KINDS)
    registered = values["registered_from_bytes"]
    return Measured(
        {cast(OperationKind, kind): _ranges(kind, given) for kind, given in tables.items()},
        None if registered is None else as_count(registered, "registered_from_bytes", 1),
    )


def _ranges(kind: str, given: Any) -> tuple[Range, ...]:
    ranges = []
    for place, each in enumerate(as_list(given, kind)):
        where = f"{kind}[{place}]"
        fields = as_object(each, where, ("from_bytes", "algorithm", "chunk_bytes", "num_streams", "compress"))
        compress = fields["compress"]
        if compress is not None:
            compress = cast(Compression, as_text(compress, f"{where}, compress", COMPRESSED_BYTES))
        choice = Choice(
            as_text(fields["algorithm"], f"{where}, algorithm", _NAMES),
            as_count(fields["chunk_bytes"], f"{where}, chunk_bytes", 0),
            as_count(fields["num_streams"], f"{where}, num_streams", 1),
            compress,
        )
        ranges.append(Range(as_count(fields["from_bytes"], f"{where}, from_bytes", 0), choice))
    starts = [each.from_bytes for each in ranges]
    if not ranges or starts[0] != 0 or starts != sorted(set(starts)):
        raise DataError(f"{kind} begins at {starts}; expected 0 first, and then larger ones.")
    return tuple(ranges)


def remembered(topology: Topology, gpus: Sequence[str]) -> Measured | None:
    """Return the choices measured on these hosts with these GPUs; None if there are none, or none may be remembered."""
    content = read_private_json(_path(topology, gpus)) if Environment.read().remember_links else None
    try:
        return None if content is None else from_json(content)
    except DataError:
        return None


def remember(topology: Topology, gpus: Sequence[str], found: Measured) -> None:
    """Keep the measured choices for later groups on these hosts.

    Nothing is kept if other users have access to the folder.
    """
    write_private_json(_path(topology, gpus), to_json(found))


def _path(topology: Topology, gpus: Sequence[str]) -> Path:
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "none"
    models = "-".join(sorted({"".join(each if each.isalnum() else "_" for each in name) for name in gpus})) or "cpu"
    name = f"measured-{topology.shape_digest}-{models}-nccl{nccl}-torch{torch.__version__}-{_VERSION}.json"
    return cache_directory() / "links" / name
