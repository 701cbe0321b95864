"""Probe batches: small random batches, long enough for a mask to show its meaning, on which masks are evaluated."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass

import sympy
import torch
from torch import fx

from deepytorch.passes.base import Role
from deepytorch.passes.unpad.attentions import MASKED
from deepytorch.passes.unpad.layout import Symbols
from deepytorch.torch_internals import OpOverload, tree_flatten

aten = torch.ops.aten

# Probes are (rows, positions, positions). A constant of the mask above this many positions is left to a run-time check.
MAX_PROBE_POSITIONS = 2048


@dataclass
class Probe:
    """One small batch on which masks are evaluated; `sizes` by symbol."""

    sizes: dict[sympy.Symbol, int]
    domain: str
    generator: torch.Generator
    constants: list[int]


def role_of(node: fx.Node) -> Role | None:
    """Return the role of an input, or None for any other node."""
    return node.meta["input"].role if node.op == "placeholder" else None


def random_values(shape: list[int], dtype: torch.dtype, probe: Probe) -> torch.Tensor:
    """Return values that a batch may hold, including token masks of every kind."""
    choose = torch.randint(0, 2, shape, generator=probe.generator).bool()
    if len(shape) >= 2:  # one row starts with holes and one ends with holes, so that left and right padding both occur
        choose[0, ..., : shape[-1] // 2] = True
        choose[-1, ..., shape[-1] // 2 :] = True
        choose[..., shape[-1] // 3] = True  # no row is without a token
    if dtype is torch.bool:
        return choose
    if dtype.is_floating_point:
        if probe.domain == "additive":
            return torch.zeros(shape, dtype=dtype).masked_fill(~choose, -math.inf)
        return choose.to(dtype)
    if probe.domain == "binary":
        return choose.to(dtype)
    pool = {0, 1, 2, 7, *probe.constants}
    limits = torch.iinfo(dtype)
    chosen = torch.tensor(
        [c for c in sorted(pool) if max(limits.min, -(2**31)) <= c <= min(limits.max, 2**31)], dtype=dtype
    )
    other = chosen[torch.randint(0, len(chosen), shape, generator=probe.generator)]
    zero_or_one = choose.to(dtype)
    mixed = torch.rand(shape, generator=probe.generator) < 0.4
    return torch.where(mixed, other, zero_or_one)


def whole_numbers(subgraph: list[fx.Node]) -> list[int]:
    """Return the whole numbers that a mask is written with, one for each use: windows, pad ids.

    Open ends of slices and very low scores do not count.
    """
    found = []
    for node in subgraph:
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        flat, _ = tree_flatten((node.args, node.kwargs))
        for value in flat:
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
            if is_number and value == int(value) and MASKED < value < 2**31:
                found.append(int(value))
    return found


def probe_lengths(subgraph: list[fx.Node], symbols: Symbols) -> tuple[list[int], int | None]:
    """Return the lengths of the probes, and the length up to which they prove a meaning (None: any length).

    If positions are only added, subtracted and compared, a mask can change its form only at sums of its whole numbers,
    so probes longer than the total of these numbers settle its meaning. If a mask uses positions in any other way, or
    reads a buffer, only lengths up to the longest probe are proved.
    """
    positional, only_linear = _positional(subgraph)
    touched = [node for node in subgraph if node in positional or positional.intersection(node.all_input_nodes)]
    numbers = [abs(number) for number in whole_numbers(touched)]
    total = sum(number for number in numbers if number > 3)
    lengths = {5, 9, *(number + 4 for number in numbers if number + 4 <= MAX_PROBE_POSITIONS)}
    tables = [node for node in subgraph if role_of(node) is Role.BUFFER and node.meta["val"].numel() > 1]
    if not tables and only_linear and total + 4 <= MAX_PROBE_POSITIONS:
        return sorted({*lengths, total + 4}), None
    longest = MAX_PROBE_POSITIONS
    for table in tables:
        longest = min(longest, max(size for size in table.meta["val"].shape if isinstance(size, int)))
    return sorted({length for length in lengths if length < longest} | {longest}), longest


_POSITION_SOURCES = frozenset({
    aten.arange.default, aten.arange.start, aten.arange.start_step, aten.cumsum.default, aten.sym_size.int,
})  # fmt: skip
_COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge", "isin"})
_LOGICAL = frozenset({
    "__and__", "__or__", "__xor__", "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "logical_and",
    "logical_or", "logical_xor", "logical_not",
})  # fmt: skip
_LINEAR = frozenset({
    "add", "sub", "rsub", "neg", "abs", "minimum", "maximum", "min", "max", "clamp", "where", "masked_fill", "to",
    "_to_copy", "clone", "contiguous", "detach", "alias", "view", "reshape", "expand", "unsqueeze", "squeeze",
    "permute", "transpose", "t", "slice", "select", "cat", "stack", "index", "arange", "ones", "zeros", "full",
    "new_ones", "new_zeros", "new_full", "full_like", "ones_like", "zeros_like", "tril", "triu", "sym_size", "pad",
    "constant_pad_nd", "expand_as", "type_as", "lift_fresh_copy", "empty", "new_empty", "flatten", "gather",
})  # fmt: skip


def _positional(subgraph: list[fx.Node]) -> tuple[set[fx.Node], bool]:
    """Return the values that hold positions, and whether they are only used linearly.

    Linear use means sums, differences and comparisons with whole numbers, and nothing else.
    """
    positional: set[fx.Node] = set()
    only_linear = True
    for node in subgraph:
        name = _operator_name(node)
        if node.target in _POSITION_SOURCES:
            positional.add(node)
            only_linear = only_linear and node.target is not aten.arange.start_step
            continue
        if not positional.intersection(node.all_input_nodes):
            continue
        flat, _ = tree_flatten((node.args, node.kwargs))
        fraction = any(isinstance(value, float) and math.isfinite(value) and value != int(value) for value in flat)
        is_bool = node.meta["val"].dtype is torch.bool if isinstance(node.meta["val"], torch.Tensor) else False
        known = name in _COMPARISONS or name in _LINEAR or (is_bool and name in _LOGICAL)
        only_linear = only_linear and not fraction and known
        found_there = name in ("index", "gather", "index_select") and node.args[0] not in positional
        if not is_bool and not found_there:  # what stands at a position, or a truth about one, is no position
            positional.add(node)
    return positional, only_linear


def _operator_name(node: fx.Node) -> str:
    if isinstance(node.target, OpOverload):
        return node.target._schema.name.split("::")[-1]
    return getattr(node.target, "__name__", str(node.target))
