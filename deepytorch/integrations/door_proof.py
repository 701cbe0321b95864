"""What shows that a model computes the same packed as padded: it is asked, with a small batch of our own.

[Note: what is compared]
Values of every output at real positions, and of the loss, within rounding. In half precision a wrong mask may hide
below the rounding, so one more thing is asked, which is exact there: where a token of some rows is changed, packed
outputs change at no position where padded ones stay as they were.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from deepytorch.compiler.facts import Refusal
from deepytorch.integrations.packed_attention import CannotPack
from deepytorch.integrations.packed_batch import IGNORE_INDEX, MASKS, PackedBatch, Reading, RowKind

# Rows of the probe, as tokens and pads, on the side of ids and on a decoder's.
PROBES = {
    RowKind.ANY: (
        ("xxxxxxxxxxxx", "xxxxxxx.....", ".....xxxxxxx", "xxx..xxxx..."),
        ("xxxxxxxxx", "xxxx.....", "..xxxxxxx", "xx.xxx..."),
    ),
    RowKind.CONTIGUOUS: (
        ("xxxxxxxxxxxx", "xxxxxxx.....", ".....xxxxxxx", "..xxxxxx...."),
        ("xxxxxxxxx", "xxxx.....", "..xxxxxxx", ".xxxx...."),
    ),
    RowKind.PREFIX: (
        ("xxxxxxxxxxxx", "xxxxxxx.....", "xxxxxxxxxx..", "xxxxxx......"),
        ("xxxxxxxxx", "xxxx.....", "xxxxxx...", "xx......."),
    ),
}

# Relative root mean square of what packed and padded may differ by. In fp32 the first is rounding of another order of
# sums; the second allows for TF32.
TOLERANCE = {"cpu": 1e-4, "other": 2e-3, "half": 3e-2}

Run = Callable[..., Any]
RunPacked = Callable[[Mapping[str, Any]], tuple[Any, PackedBatch | Refusal | None]]


def prove(run: Run, run_packed: RunPacked, given: Mapping[str, Any], reading: Reading) -> str | None:
    """Why packed and padded disagree under this reading, or None.

    run: the module's own call. run_packed: the same through the door, given the arguments; returns the outputs and the
    batch as it was packed, or why it was not. given: arguments of a call of the user's, for their names, dtypes and
    widths; what they hold does not matter, so that ranks find the same.
    """
    probe = make_probe(given, reading)
    changed = dict(probe)
    for name in ("input_ids", "inputs_embeds"):
        if probe.get(name) is not None:  # one token of every other row, in a column where each has one
            changed[name] = probe[name].clone()
            changed[name][::2, 5] = probe[name][::2, 6]
    padded, padded_changed = run(**probe), run(**changed)
    try:
        packed, batch = run_packed(probe)
        packed_changed, _ = run_packed(changed)
    except CannotPack as error:
        return str(error)
    except (torch.OutOfMemoryError, KeyboardInterrupt):
        raise
    except Exception as error:
        return f"the packed probe failed with {type(error).__name__}: {str(error)[:200]}"
    if not isinstance(batch, PackedBatch):
        return batch.reason if isinstance(batch, Refusal) else "the model below was not called"
    return _difference(padded, packed, batch) or _leak((padded, padded_changed), (packed, packed_changed), batch)


@contextlib.contextmanager
def quietly(module: nn.Module) -> Iterator[None]:
    """Inside, no dropout, no gradients, and no random number of the user's is used up."""
    training = {each: each.training for each in module.modules()}
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    try:
        for each in training:
            each.training = False
        with torch.random.fork_rng(devices), torch.no_grad():
            yield
    finally:
        for each, trains in training.items():
            each.training = trains


def make_probe(given: Mapping[str, Any], reading: Reading) -> dict[str, Any]:
    """Arguments like `given`, with the rows of `PROBES`."""
    generator = torch.Generator().manual_seed(0)
    device = given["attention_mask"].device
    main, decoder = (
        torch.tensor([[mark == "x" for mark in row] for row in rows], device=device) for rows in PROBES[reading.rows]
    )
    last = decoder if reading.two_sided else main
    probe: dict[str, Any] = {}
    for name, value in given.items():
        if not isinstance(value, Tensor) or value.dim() == 0:
            probe[name] = value
            continue
        grid = decoder if name.startswith("decoder") else last if name == "labels" else main
        if name in MASKS:
            probe[name] = grid.to(value.dtype)
        elif value.dim() == 1:  # one of every row
            probe[name] = value[:1].expand(len(main)).clone()
        elif value.is_floating_point():
            probe[name] = torch.randn(*grid.shape, *value.shape[2:], generator=generator).to(value)
        elif name == "position_ids":
            probe[name] = torch.arange(grid.shape[1], device=device).expand(grid.shape).clone()
        else:
            drawn = torch.randint(reading.bounds.get(name, 2), grid.shape, generator=generator).to(value)
            if name == "labels":
                drawn[:, ::3] = IGNORE_INDEX
                drawn = _ignored_at_pads(drawn, grid)
            elif name == "input_ids" and reading.pad_id is not None:
                drawn[0, 4] = reading.pad_id  # whether the mask counts or the ids do
                if reading.pads_hold_pad_id:
                    drawn = drawn.masked_fill(~main, reading.pad_id)
            probe[name] = drawn
    return probe


def _ignored_at_pads(labels: Tensor, grid: Tensor) -> Tensor:
    """Whether a label is compared with its own position or with the one before."""
    before = torch.nn.functional.pad(grid, (1, 0))[:, :-1]
    return labels.masked_fill(~(grid & before), IGNORE_INDEX)


def _compared(outputs: Any, batch: PackedBatch) -> list[Tensor]:
    """Every floating tensor of the outputs, at real positions where it has positions, as (..., features)."""
    found = []
    for value in tree_leaves(_plain(outputs)):
        if isinstance(value, Tensor) and value.is_floating_point():
            for side in batch.sides:
                grid = (side.num_rows, side.num_positions)
                if value.dim() >= 2 and tuple(value.shape[:2]) == grid:
                    value = value.flatten(0, 1)[side.indices]
                    break
                if value.dim() == 4 and (value.shape[0], value.shape[2]) == grid:
                    value = value.transpose(1, 2).flatten(0, 1)[side.indices]
                    break
            found.append(value)
    return found


def _plain(outputs: Any) -> Any:
    """Outputs as lists of tensors, with what a cache holds."""
    if isinstance(outputs, Mapping):
        return [_plain(value) for value in outputs.values()]
    if isinstance(outputs, tuple | list):
        return [_plain(value) for value in outputs]
    if hasattr(outputs, "self_attention_cache"):
        return [_plain(outputs.self_attention_cache), _plain(outputs.cross_attention_cache)]
    if hasattr(outputs, "layers"):
        return [(getattr(layer, "keys", None), getattr(layer, "values", None)) for layer in outputs.layers]
    return outputs


def _difference(padded: Any, packed: Any, batch: PackedBatch) -> str | None:
    expected, found = _compared(padded, batch), _compared(packed, batch)
    if [each.shape for each in expected] != [each.shape for each in found]:
        return "the packed probe's outputs have other shapes than the padded one's"
    for one, other in zip(expected, found, strict=True):
        if one.dtype != other.dtype:
            return "the packed probe's outputs have other dtypes than the padded one's"
        reference = one.double()
        error = (other.double() - reference).square().mean().sqrt()
        scale = reference.square().mean().sqrt()
        if not error <= _tolerance(one) * scale + 1e-12:
            return f"packed and padded probes differ by {float(error / scale):.1e}"
    return None


def _tolerance(tensor: Tensor) -> float:
    half = tensor.dtype in (torch.float16, torch.bfloat16) or torch.is_autocast_enabled(tensor.device.type)
    return TOLERANCE["half" if half else tensor.device.type if tensor.device.type == "cpu" else "other"]


def _leak(padded: tuple[Any, Any], packed: tuple[Any, Any], batch: PackedBatch) -> str | None:
    """Whether a changed token shows, packed, where it does not padded."""
    moved = []
    for pair in (padded, packed):
        compared = zip(*(_compared(each, batch) for each in pair), strict=True)
        moved.append([_moved(one, other) for one, other in compared if one.dim() > 1])
    for expected, found in zip(*moved, strict=True):
        if (found & ~expected).any():
            return "a token shows where it does not in the padded run"
    return None


def _moved(one: Tensor, other: Tensor) -> Tensor:
    """Which rows of (rows, ...) differ; in fp32 by more than rounding: grouped matrix products round by group."""
    change = (one.double() - other.double()).abs().flatten(1).amax(1)
    if one.dtype in (torch.float16, torch.bfloat16):
        return change > 0
    return change > _tolerance(one) * one.double().square().mean().sqrt()
