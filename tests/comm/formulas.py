"""The cost of each algorithm as a sympy expression: the result of its cost function for symbols."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy

from deepytorch.comm.algorithms.cpu_reduce import TURN_US, cpu_reduce_us, reduce_us_per_byte
from deepytorch.comm.algorithms.hierarchical import hierarchical_us
from deepytorch.comm.algorithms.nvlink import CopyEngines, Multimem, OneShot, TwoShot, symmetric_us
from deepytorch.comm.algorithms.streams import streams_us
from deepytorch.comm.topology.cost import Link, all_reduce_link, cast_us_per_byte

# The meaning of the symbols. A link X has a latency a_X (us) and a rate b_X (us per byte).
SYMBOLS = {
    "S": "payload bytes",
    "n": "ranks",
    "H": "hosts",
    "L": "ranks on a host",
    "K": "waves: chunks / streams",
    "x": "bytes between hosts for each payload byte: 1 exact, 1/2 for fp32 as bf16",
    "o": "the part of the possible overlap of stages that there is: 1, or less where ranks on a CPU leave no core free",
    "c": "us to copy a byte, all ranks of the host at it",
    "engine": "the inner backend's all-reduce, over payload bytes",
    "memory": "the all-reduce through the host's memory, over payload bytes",
    "network": "a hop between hosts with the streams in use, over all bytes that leave a host",
    "pcie": "a copy between a GPU and the host's memory",
    "nvlink": "a step among the GPUs of a host, over the bytes that one receives",
}


def formulas() -> Mapping[str, sympy.Expr]:
    """Return the time in us of an all-reduce by each algorithm.

    Symbols: see `SYMBOLS`. Only the compressed forms contain casts.
    """
    s, n, h, per_host, waves, ratio, overlap, copy = _symbols("S n H L K x o c")
    engine, memory, network, pcie, nvlink = map(_link, ("engine", "memory", "network", "pcie", "nvlink"))
    between = all_reduce_link(network, h)
    none: Any = Link(0, 0)
    reduce = Link(TURN_US, reduce_us_per_byte(copy, per_host))
    cast = cast_us_per_byte(copy, ratio)
    found: dict[str, Any] = {
        "engine": engine.time_us(s),
        "shared_memory": memory.time_us(s),
        "hierarchical": hierarchical_us(s, waves, h, memory, network, 1, 0, 1, overlap),
        "hierarchical, compressed": hierarchical_us(s, waves, h, memory, network, ratio, cast, 1, overlap),
        "streams": streams_us(s, waves, engine, 1, 0),
        "streams, compressed": streams_us(s, waves, engine, ratio, cast * per_host),
        "cpu_reduce": cpu_reduce_us(s, waves, pcie, reduce, none, 1),
        "cpu_reduce, several hosts": cpu_reduce_us(s, waves, pcie, reduce, between, 1),
    }
    for each in (OneShot(), TwoShot(), CopyEngines(), Multimem()):
        found[each.name] = symmetric_us(s, nvlink, each.num_steps(n), each.share(n))
    return found


def _symbols(names: str) -> Any:
    return sympy.symbols(names, positive=True)


def _link(name: str) -> Link:
    return Link(*_symbols(f"a_{name} b_{name}"))
