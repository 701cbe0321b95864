"""The costs of collectives: alpha-beta links, measured or assumed, and the few formulas that algorithms consist of.

Times are in microseconds (us), sizes in bytes, rates in us per byte (1 / us_per_byte = MB/s). A formula takes numbers
or sympy symbols alike, so that docs/algorithms.md shows exactly what is computed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from deepytorch.comm.topology.checked_json import as_list, as_number, as_object, as_text, read_file
from deepytorch.errors import ConfigError, DataError

_OVER_NETWORK = re.compile(r"network/[1-9]\d*")

LinkName = Literal["engine", "loopback", "memory", "pcie", "nvlink"]


@dataclass(frozen=True, slots=True)
class Link:
    """The time of a transfer as a straight line over its bytes: `latency_us + us_per_byte * bytes`."""

    latency_us: float
    us_per_byte: float

    def time_us(self, num_bytes: float) -> float:
        """Return the time of `num_bytes`."""
        return self.latency_us + self.us_per_byte * num_bytes

    def scaled(self, *, latency: float = 1.0, rate: float = 1.0) -> Link:
        """Return this link with its latency and its us per byte multiplied."""
        return Link(self.latency_us * latency, self.us_per_byte * rate)

    @staticmethod
    def from_json(content: Any, where: str = "the link") -> Link:
        """Return the link that a JSON value holds.

        Raises:
            DataError: the value, which the error calls `where`, has another layout.
        """
        values = as_object(content, where, ("latency_us", "us_per_byte"))
        return Link(*(as_number(values[key], f"{where}, {key}") for key in ("latency_us", "us_per_byte")))


@dataclass(frozen=True)
class Links:
    """The links that calibration measured for one group.

    None, and an empty `network`: not measured (`nominal.complete`).

    Attributes:
        engine: the inner backend's all-reduce over this whole group; us over payload bytes.
        loopback: one hop of the inner backend between two ranks of one host; us over bytes sent.
        memory: the shared-memory all-reduce among the ranks of one host; us over payload bytes.
        network: number of parallel streams that leave a host -> one hop between two hosts with that many; us over all
            bytes that leave the host. `hop_link` derives it from a measured all-reduce among hosts.
        copy_bytes_per_s: bytes that one host copies per second with all its ranks copying, read and write counted as
            one.
        pcie: one copy between a GPU and the host's memory while the other GPUs copy too; us over bytes of that GPU.
        nvlink: one step among the GPUs of a host (launch and barrier included); us over bytes that one GPU receives.
        nominal: names of the fields above that are assumed, not measured.
        times_us: the fastest times so far that the links were fitted to, by payload bytes: all-reduces of the "engine",
            through "memory" and, of each local rank with its fellows, over "network/<connections>"; and a "copy".
    """

    engine: Link | None = None
    loopback: Link | None = None
    memory: Link | None = None
    network: Mapping[int, Link] = field(default_factory=dict)
    copy_bytes_per_s: float | None = None
    pcie: Link | None = None
    nvlink: Link | None = None
    nominal: frozenset[str] = frozenset()
    times_us: Mapping[str, Mapping[int, float]] = field(default_factory=dict)

    def link(self, name: LinkName) -> Link:
        """Return the link of that name.

        Raises:
            ConfigError: the link is neither measured nor assumed.
        """
        found: Link | None = getattr(self, name)
        if found is None:
            raise ConfigError(f"The links have no {name}, expected a measured or a nominal one: use nominal.complete.")
        return found

    def network_link(self, num_streams: int) -> Link:
        """Return the link for a number of parallel streams.

        The link is that of the largest measured number up to it, else of the smallest measured.

        Raises:
            ConfigError: nothing leaves the host.
        """
        if not self.network:
            raise ConfigError("The links have no network, expected a measured or a nominal one: use nominal.complete.")
        below = [measured for measured in self.network if measured <= num_streams]
        return self.network[max(below) if below else min(self.network)]

    def copy_us_per_byte(self) -> float:
        """Return the time of copying one byte while all ranks of the host copy.

        Raises:
            ConfigError: the time is not known.
        """
        if self.copy_bytes_per_s is None:
            raise ConfigError("The links have no copy_bytes_per_s, expected one: use nominal.complete.")
        return 1e6 / self.copy_bytes_per_s

    def to_json(self) -> dict[str, Any]:
        """Return the links as plain JSON values."""
        content: dict[str, Any] = json.loads(json.dumps({**asdict(self), "nominal": sorted(self.nominal)}))
        return content

    @staticmethod
    def from_json(content: Any) -> Links:
        """Return the links that a JSON value holds. Links that the value lacks are None.

        Raises:
            DataError: the value has another layout.
        """
        known = [entry.name for entry in fields(Links)]
        values = as_object(content, "the links", (), known)
        found = {
            name: Link.from_json(values[name], f"{name} of the links")
            for name in _LINK_NAMES
            if values.get(name) is not None
        }
        copy = values.get("copy_bytes_per_s")
        nominal = as_list(values.get("nominal", []), "nominal of the links")
        return Links(
            **found,
            network=_network_of_json(values.get("network", {})),
            copy_bytes_per_s=None if copy is None else as_number(copy, "copy_bytes_per_s", above_zero=True),
            nominal=frozenset(as_text(name, "a name in nominal", known) for name in nominal),
            times_us=_times_of_json(values.get("times_us", {})),
        )


_LINK_NAMES: tuple[LinkName, ...] = ("engine", "loopback", "memory", "pcie", "nvlink")


def read_links(path: Path) -> Links:
    """Read a file of links.

    Raises:
        DataError: the file cannot be read or has another layout.
    """
    return Links.from_json(read_file(path, "links file"))


def fit_link(sizes_bytes: Sequence[float], times_us: Sequence[float]) -> Link:
    """Return the line through measured times with the least squares of *relative* errors; neither part is negative.

    One size cannot tell latency from rate: its whole time is then attributed to the bytes (to latency, for 0 bytes).

    Raises:
        ConfigError: no measurement, unequal lengths, or times that are not above 0.
    """
    if not sizes_bytes or len(sizes_bytes) != len(times_us) or min(times_us) <= 0 or min(sizes_bytes) < 0:
        raise ConfigError(
            f"A line cannot be fitted to {len(sizes_bytes)} sizes and {len(times_us)} times, expected as many of each, "
            "at least one, sizes of 0 or more and times above 0."
        )
    # minimise the sum of (latency * u + rate * v - 1)^2 with u = 1 / time, v = size / time
    u = [1 / time for time in times_us]
    v = [size / time for size, time in zip(sizes_bytes, times_us, strict=True)]
    uu, uv, vv = (sum(a * b for a, b in zip(x, y, strict=True)) for x, y in ((u, u), (u, v), (v, v)))
    determinant = uu * vv - uv * uv
    latency, rate = 0.0, 0.0
    if len(set(sizes_bytes)) > 1 and determinant > 0:
        latency = (vv * sum(u) - uv * sum(v)) / determinant
        rate = (uu * sum(v) - uv * sum(u)) / determinant
    if latency <= 0 and vv > 0:
        return Link(0.0, max(rate, 0.0) if latency == 0 < rate else sum(v) / vv)
    return Link(latency, rate) if rate > 0 else Link(sum(u) / uu, 0.0)


def all_reduce_link(hop: Link, num_members: int) -> Link:
    """Return the ring all-reduce over the payload, from one hop over the bytes sent.

    `num_members` ranks pass on `2 (n - 1)` messages one after the other, which add up to `2 (n - 1) / n` of the
    payload.
    """
    return hop.scaled(latency=2 * (num_members - 1), rate=ring_share(num_members))


def hop_link(all_reduce: Link, num_members: int) -> Link:
    """Return one hop over the bytes sent, from a ring all-reduce over the payload: the inverse of `all_reduce_link`.

    Several rings that leave a host at once (one per local rank, each with a slice) are one all-reduce of the payload.
    """
    return all_reduce.scaled(latency=1 / (2 * (num_members - 1)), rate=1 / ring_share(num_members))


def ring_share(num_members: int) -> float:
    """Return the part of the payload that each member of a ring all-reduce sends: `2 (n - 1) / n`."""
    return 2 * (num_members - 1) / num_members


def pipeline_us(stages_us: Sequence[float], num_chunks: float, overlap: float = 1.0) -> float:
    """Return the time of `num_chunks` equal chunks through stages that overlap.

    Stages that cannot overlap count as one. The first chunk passes through all stages; after that, one chunk is
    completed in each turn of the slowest stage.

    Args:
        stages_us: The time of a chunk in each stage.
        num_chunks: The number of chunks.
        overlap: The part of the possible overlap that there is; 0: one stage runs at a time.
    """
    one_chunk_us = sum(stages_us[1:], stages_us[0])
    hidden_us = (num_chunks - 1) * (one_chunk_us - largest(stages_us))
    return num_chunks * one_chunk_us - overlap * hidden_us


def largest(values: Sequence[float]) -> float:
    """Return the largest of numbers, or sympy's `Max` of symbols."""
    try:
        return max(values)
    except TypeError:  # symbols have no order
        import sympy

        return sympy.Max(*values)


def cast_us_per_byte(copy_us_per_byte: float, ratio: float) -> float:
    """Return the time to cast a payload byte to `ratio` of it and back, at the speed of copies."""
    return (1 + ratio) * copy_us_per_byte


def _times_of_json(content: Any) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = {}
    networks = filter(_OVER_NETWORK.fullmatch, content if isinstance(content, dict) else ())
    for name, times in as_object(content, "times_us of the links", (), ("memory", "engine", "copy", *networks)).items():
        where = f"times_us of the links, {name}"
        if not isinstance(times, dict) or not times or not all(key.isdigit() and int(key) > 0 for key in times):
            raise DataError(f"{where}, is {times!r:.60}, expected times by the number of bytes, 1 or more.")
        found[name] = {int(size): as_number(time, f"{where}[{size}]", above_zero=True) for size, time in times.items()}
    return found


def _network_of_json(content: Any) -> dict[int, Link]:
    if not isinstance(content, dict) or not all(key.isdigit() and int(key) > 0 for key in content):
        raise DataError(f"network of the links is {content!r:.60}, expected links by the number of streams, 1 or more.")
    return {int(key): Link.from_json(value, f"network[{key}] of the links") for key, value in content.items()}
