"""The proof that a model computes the same packed as padded: both are run on a probe, a small batch of our own.

[Note: what is compared]
Compared are the values of every output at real positions, the loss, and gradients of both with respect to weights:
within rounding, in training mode, with every dropout at zero. In half precision a wrong mask may hide below the
rounding, so one more comparison is made, which is exact there: if a token of some rows is changed, packed outputs
change at no position at which padded outputs stay the same. Sharded weights (ZeRO-3, FSDP2) have no gradients of their
own here: of such models only outputs are compared, in evaluation mode.

State that the probe changes is restored. A model that changes in training by anything but its optimizer is declined.
"""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepytorch.compiler.step.agreement import HALF, Tolerance, largest_difference
from deepytorch.compiler.step.batch_facts import Refusal
from deepytorch.integrations.cached_prefix import NAMES, CachedPrefix, renewed
from deepytorch.integrations.packed_attention import CannotPack
from deepytorch.integrations.packed_batch import IGNORE_INDEX, MASKS, PackedBatch, Reading, RowKind
from deepytorch.parallel_modules import is_sharded
from deepytorch.torch_internals import tree_leaves

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

TOLERANCES = {
    "fp32": Tolerance(1e-5, 1e-5, 3e-4),
    "tf32": Tolerance(2e-3, 2e-4, 3e-2),
    "half": Tolerance(3e-2, 1e-3, 0.15),
}
MANY_WEIGHTS = 50_000_000  # above, only gradients of small weights (norms, biases) are compared: each layer has some
SMALL_WEIGHT = 1 << 16
_NOT_THE_MODELS = (os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(__file__)))

Run = Callable[..., Any]
RunPacked = Callable[[Mapping[str, Any]], tuple[Any, PackedBatch | Refusal | None]]


def prove(
    run: Run,
    run_packed: RunPacked,
    given: Mapping[str, Any],
    reading: Reading,
    weights: Sequence[Tensor],
    precision: str,
) -> str | None:
    """Return why packed and padded runs disagree under a reading, or None if they agree.

    Args:
        run: The module's own call.
        run_packed: The call with packing at model entry; returns the outputs, and the packed batch or a refusal.
        given: Arguments of a call of the user's, for their names, dtypes and widths. Their values do not matter, so
            that all ranks find the same.
        reading: The reading of a batch to try.
        weights: The weights whose gradients are compared.
        precision: The precision in which the model computes, a key of `TOLERANCES`.
    """
    try:
        probe = make_probe(given, reading)
        embeddings = [each for each in probe.values() if isinstance(each, Tensor) and each.requires_grad]
        prefix = CachedPrefix.of(probe)
        embeddings += [] if prefix is None else [each for each in prefix.tensors if each.requires_grad]
        changed = _with_other_tokens(probe)
        padded, padded_changed = run(**renewed(probe)), run(**renewed(changed))
        packed, batch = run_packed(renewed(probe))
        packed_changed, _ = run_packed(renewed(changed))
        if not isinstance(batch, PackedBatch):
            return batch.reason if isinstance(batch, Refusal) else "the model below was not called"
        return _difference(padded, packed, batch, [*weights, *embeddings], TOLERANCES[precision]) or _leak(
            (padded, padded_changed), (packed, packed_changed), batch
        )
    except CannotPack as error:
        return str(error)
    except (torch.OutOfMemoryError, KeyboardInterrupt):
        raise
    except Exception as error:
        return f"the probe failed{_place_in_model(error)} with {type(error).__name__}: {str(error)[:200]}"


def _place_in_model(error: BaseException) -> str:
    """Return the innermost line behind an error that is not torch's or ours, as " in function (file:line)"."""
    found = [
        f" in {frame.name} ({frame.filename.replace(os.sep, '/').rpartition('/')[2]}:{frame.lineno})"
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(_NOT_THE_MODELS)
    ]
    return found[-1] if found else ""


def _with_other_tokens(probe: Mapping[str, Any]) -> dict[str, Any]:
    """Return the probe with one token of every other row changed, in a column with a token in each row."""
    changed = dict(probe)
    for name in ("input_ids", "inputs_embeds"):
        if probe.get(name) is not None:
            changed[name] = probe[name].detach().clone()
            changed[name][::2, 5] = probe[name].detach()[::2, 6]
    return changed


def is_deterministic(run: Run, given: Mapping[str, Any], reading: Reading) -> bool:
    """Return whether two padded runs with different random numbers give the same."""
    try:
        probe = make_probe(given, reading)
        outputs = []
        for seed in (0, 1):
            torch.manual_seed(seed)
            outputs.append([each for each in tree_leaves(_plain(run(**renewed(probe)))) if isinstance(each, Tensor)])
        return not any(
            _moved(one.reshape(1, -1), other.reshape(1, -1)).any() for one, other in zip(*outputs, strict=True)
        )
    except (torch.OutOfMemoryError, KeyboardInterrupt):
        raise
    except Exception:
        return True  # the proof itself will fail, and gives the reason


def small_weights(module: nn.Module) -> list[Tensor]:
    """Return the weights whose gradients are compared; none if weights are sharded."""
    if is_sharded(module):
        return []
    # A user's hook on a weight would be called, so such weights are left out.
    trained = [each for each in module.parameters() if each.requires_grad and not each._backward_hooks]
    if sum(each.numel() for each in trained) <= MANY_WEIGHTS:
        return list(trained)
    return [each for each in trained if each.numel() <= SMALL_WEIGHT]


@contextlib.contextmanager
def quietly(module: nn.Module, *, training: bool, gradients: bool) -> Iterator[None]:
    """Put `module` in training mode without dropout, or in evaluation mode, inside of the block.

    gradients: whether they are on. The user's random generators are restored behind the block.
    """
    modes = {each: each.training for each in module.modules()}
    settings = [
        (each, name, value)
        for each in modes
        for name, value in vars(each).items()
        if isinstance(value, float) and value and (name == "p" or "drop" in name or "jitter" in name)
    ]
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    try:
        for each in modes:
            each.training = training
        for each, name, _ in settings:
            setattr(each, name, 0.0)
        with torch.random.fork_rng(devices), torch.set_grad_enabled(gradients):
            yield
    finally:
        for each, mode in modes.items():
            each.training = mode
        for each, name, value in settings:
            setattr(each, name, value)


class Unchanged:
    """The state of a model besides its parameters, kept over a probe."""

    def __init__(self, module: nn.Module) -> None:
        self._buffers = [(name, each, each.detach().clone()) for name, each in module.named_buffers()]
        self._module, self._held = module, self._attributes(module)

    @staticmethod
    def _attributes(module: nn.Module) -> dict[tuple[str, str], int]:
        return {
            (path, name): id(value)
            for path, each in module.named_modules()
            for name, value in vars(each).items()
            if isinstance(value, Tensor)
        }

    def put_back(self) -> str | None:
        """Restore buffers; return what had changed, or None."""
        found = None
        for name, buffer, before in self._buffers:
            if not torch.equal(buffer, before):
                found = f"the buffer {name}, which training changes"
                with torch.no_grad():
                    buffer.copy_(before)
        held = self._attributes(self._module)
        if held != self._held:
            (path, name) = next(iter(set(held.items()) ^ set(self._held.items())))[0]
            found = f"the tensor {path}.{name}, which the model keeps of its batch"
        return found


_PLAIN = frozenset({bool, int, float, str, type(None)})
# A call's kind has the mode; the other is set by transformers at the first call that asks for hidden states.
_OF_NO_MATTER = ("training", "_output_capturing_hooks_installed")


class Attributes:
    """The numbers, words and switches that a model's modules and configurations hold, which a proof rests on.

    What the model changes by itself when it runs (a counter) is left out, from the proof that shows it on.
    """

    def __init__(self) -> None:
        self._moving: set[tuple[int, str]] = set()  # the place of the object, and the attribute's name

    def read(self, modules: Sequence[nn.Module]) -> tuple[tuple[int, str, Any], ...]:
        """Return the attributes; equal as long as nobody has changed one. Modules of `torch.nn` are left out."""
        held = [vars(each) for each in modules if not type(each).__module__.startswith("torch.nn.")]
        configs = {id(each["config"]): each["config"] for each in held if "config" in each}
        held += [vars(each) for each in configs.values() if hasattr(each, "__dict__")]
        return tuple(
            (place, name, value)
            for place, each in enumerate(held)
            for name, value in each.items()
            if type(value) in _PLAIN and name not in _OF_NO_MATTER and (place, name) not in self._moving
        )

    def leave_out(self, before: Iterable[tuple[int, str, Any]], after: Iterable[tuple[int, str, Any]]) -> None:
        """Leave out from now on what differs between two readings, between which the model alone has run."""
        self._moving |= {(place, name) for place, name, _ in set(before) ^ set(after)}


def make_probe(given: Mapping[str, Any], reading: Reading) -> dict[str, Any]:
    """Return arguments like `given`, with the rows of `PROBES`."""
    generator = torch.Generator().manual_seed(0)
    device = given["attention_mask"].device
    main, decoder = (
        torch.tensor([[mark == "x" for mark in row] for row in rows], device=device) for rows in PROBES[reading.rows]
    )
    last = decoder if reading.two_sided else main
    probe: dict[str, Any] = {}
    prefix = CachedPrefix.of(given)
    for name, value in given.items():
        if prefix is not None and name == prefix.name:
            probe[name] = prefix.like(len(main), generator)
            continue
        if name in NAMES and value is not None:
            raise CannotPack(f"{name} holds no keys that each row begins with")
        if not isinstance(value, Tensor) or value.dim() == 0:
            probe[name] = value
            continue
        grid = decoder if name.startswith("decoder") else last if name == "labels" else main
        of_tokens = value.dim() >= 2 and value.shape[:2] == _grid_of(name, given, reading)
        if name in MASKS:
            seen = F.pad(grid, (0 if prefix is None else prefix.length, 0), value=True)
            probe[name] = (seen if name == "attention_mask" else grid).to(value.dtype)
        elif not of_tokens:  # one value for each row
            probe[name] = value[:1].expand(len(main), *value.shape[1:]).clone()
        elif value.is_floating_point():
            probe[name] = torch.randn(*grid.shape, *value.shape[2:], generator=generator).to(value).detach()
            probe[name].requires_grad_(torch.is_grad_enabled())
        elif name == "position_ids":
            probe[name] = torch.arange(grid.shape[1], device=device).expand(grid.shape).clone()
        else:
            drawn = torch.randint(reading.bounds.get(name, 2), grid.shape, generator=generator).to(value)
            if name == "labels":
                drawn[:, 2::3] = IGNORE_INDEX
                drawn = _ignored_at_pads(drawn, grid, reading)
            elif name == "input_ids" and reading.pad_id is not None:
                drawn[0, 4] = reading.pad_id  # shows whether the model goes by the mask or by the ids
                if reading.pads_hold_pad_id:
                    drawn = drawn.masked_fill(~main, reading.pad_id)
            probe[name] = drawn
    if given["attention_mask"].dim() != 2:
        raise CannotPack("the attention mask is not one of 0 and 1 for each position")
    return probe


def _grid_of(name: str, given: Mapping[str, Any], reading: Reading) -> tuple[int, ...]:
    if reading.two_sided and (name == "labels" or name.startswith("decoder")):
        return tuple(given[name].shape[:2])
    prefix = CachedPrefix.of(given)
    rows, columns = given["attention_mask"].shape[:2]
    return rows, columns - (0 if prefix is None else prefix.length)


def _ignored_at_pads(labels: Tensor, grid: Tensor, reading: Reading) -> Tensor:
    """Return labels that count at real tokens only, at a row's first one too, which shows whether the loss shifts."""
    if reading.unsure:
        return labels.masked_fill(~grid, IGNORE_INDEX).masked_fill(_after_pad(grid), IGNORE_INDEX)
    if not reading.shifted:
        return labels.masked_fill(~grid, IGNORE_INDEX)
    labels = labels.masked_fill(_after_pad(grid), IGNORE_INDEX)  # a label is compared with the position before
    labels[-1].masked_fill_(~grid[-1], IGNORE_INDEX)
    return labels


def _after_pad(grid: Tensor) -> Tensor:
    return ~F.pad(grid, (1, 0), value=True)[:, :-1]


def _compared(outputs: Any, batch: PackedBatch) -> list[Tensor]:
    """Return every floating tensor of the outputs, as (..., features); of tensors with positions only real ones."""
    found = []
    for value in tree_leaves(_plain(outputs)):
        if isinstance(value, Tensor) and value.is_floating_point():
            for side in batch.grids:
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
    """Return outputs as nested lists of tensors, those of a key-value cache among them."""
    if isinstance(outputs, Mapping):
        return [_plain(value) for value in outputs.values()]
    if isinstance(outputs, tuple | list):
        return [_plain(value) for value in outputs]
    if hasattr(outputs, "self_attention_cache"):
        return [_plain(outputs.self_attention_cache), _plain(outputs.cross_attention_cache)]
    if hasattr(outputs, "layers"):
        return [(getattr(layer, "keys", None), getattr(layer, "values", None)) for layer in outputs.layers]
    return outputs


def _difference(
    padded: Any, packed: Any, batch: PackedBatch, weights: Sequence[Tensor], tolerance: Tolerance
) -> str | None:
    expected, found = _compared(padded, batch), _compared(packed, batch)
    if [(each.shape, each.dtype) for each in expected] != [(each.shape, each.dtype) for each in found]:
        return "the packed probe's outputs have other shapes or dtypes than the padded one's"
    worst = largest_difference(expected, found, weights if torch.is_grad_enabled() else [], tolerance)
    return None if worst.is_allowed else f"packed and padded probes differ: {worst.what} by {worst.found:.1e}"


def _leak(padded: tuple[Any, Any], packed: tuple[Any, Any], batch: PackedBatch) -> str | None:
    """Return a message if a changed token changes packed outputs at a position where padded ones stay; else None."""
    moved = []
    for pair in (padded, packed):
        compared = zip(*(_compared(each, batch) for each in pair), strict=True)
        moved.append([_moved(one, other) for one, other in compared if one.dim() > 1])
    for expected, found in zip(*moved, strict=True):
        if (found & ~expected).any():
            return "a token shows where it does not in the padded run"
    return None


def _moved(one: Tensor, other: Tensor) -> Tensor:
    """Return which rows of (rows, ...) differ.

    In fp32 the difference must exceed rounding, since grouped matrix products round by group.
    """
    one, other = one.detach(), other.detach()
    change = (one.double() - other.double()).abs().flatten(1).amax(1)
    if one.dtype in HALF:
        return change > 0
    return change > 1e-5 * one.double().square().mean().sqrt()
