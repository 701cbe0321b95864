"""Index tensors of a batch, rows of tokens and buckets of gradients: the copies around a packed step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from deepytorch.bench.training_step import DTYPES
from deepytorch.comm.kernels.buckets import Slots, pack
from deepytorch.gpu_check.outcome import Check, Failed, Skipped
from deepytorch.passes.ops.pack import pack_rows, unpack_rows
from deepytorch.passes.ops.pack_facts import Packing, Target, pack_facts, takes
from deepytorch.passes.ops.reference import pack_facts_reference

_SIZES = ((3, 5), (0, 4), (1,), (37, 129), (1024, 65), (7,), (2, 0))  # of gradients; some without elements


def checks(device: torch.device) -> Iterator[Check]:
    """Yield the checks of this subject."""
    for size in ((5, 61), (37, 701)):  # in one launch and in two
        yield Check("packing", f"facts of {size[0]} rows of {size[1]}", partial(facts_are_right, device, size))
    for dtype in DTYPES:
        yield Check("packing", f"rows in {dtype}, there and back", partial(rows_are_right, device, dtype))
    for source in DTYPES:
        for target in DTYPES:
            run = partial(buckets_are_right, device, source, target)
            yield Check("gradient buckets", f"{source} to {target}", run, expected_s=2.0)


def facts_are_right(device: torch.device, size: tuple[int, int]) -> str:
    """Compare every index tensor and count with the reference."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(size, generator=generator) < 0.7
    target = torch.randint(-1, 2, size, generator=generator)
    given = Target(target.to(device), -1)
    if not takes(mask.to(device), "nonzero", given):
        raise Skipped("no CUDA device, or no Triton")
    found, wanted = pack_facts(mask.to(device), "nonzero", given), pack_facts_reference(mask, target != -1)
    for name in Packing.__slots__:
        expected = getattr(wanted, name)
        # Values behind the last index are undefined.
        if not torch.equal(getattr(found, name)[: len(expected)].cpu(), expected):
            raise Failed(f"{name} differs from the reference")
    return f"{int(wanted.counts[0].sum())} tokens where they are"


def rows_are_right(device: torch.device, dtype: str) -> str:
    """Compare packing, unpacking and both gradients with indexing, bit by bit; large enough for the kernel."""
    generator = torch.Generator().manual_seed(0)
    rows, width = 12_000, 1_000  # more than the 16 MiB from which a kernel runs
    if device.type == "cpu":
        rows, width = 120, 10
    indices = (torch.rand(rows, generator=generator) < 0.6).nonzero().flatten().to(device)
    full = torch.randn(rows, width, generator=generator).to(device, DTYPES[dtype]).requires_grad_()
    packed = pack_rows(full, indices)
    spread = unpack_rows(packed, indices, rows)
    wanted = torch.zeros_like(full).index_copy(0, indices, full.detach()[indices])
    [gradient] = torch.autograd.grad(spread, full, wanted)
    for name, found, expected in (
        ("packed", packed, full.detach()[indices]),
        ("unpacked", spread, wanted),
        ("gradient", gradient, wanted),
    ):
        if not torch.equal(found, expected):
            raise Failed(f"{name} differs from indexing in {int((found != expected).sum())} values")
    return f"{len(indices)} of {rows} rows have their bits"


def buckets_are_right(device: torch.device, source: str, target: str) -> str:
    """Compare gradients in their slots, and back, with torch's casts, bit by bit."""
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(size, generator=generator).to(device, DTYPES[source]) for size in _SIZES]
    views = _slots(DTYPES[target], device)
    slots = Slots(views)
    pack(gradients, slots)
    back = [torch.empty_like(each) for each in gradients]
    pack(views, Slots(back))
    for number, (gradient, view, again) in enumerate(zip(gradients, views, back, strict=True)):
        if not torch.equal(view, gradient.to(view.dtype)):
            raise Failed(f"gradient {number} of shape {tuple(gradient.shape)} is not what a cast makes of it")
        if not torch.equal(again, view.to(again.dtype)):
            raise Failed(f"gradient {number} of shape {tuple(gradient.shape)} does not come back")
    if device.type == "cuda" and slots.tables is None:
        raise Failed("torch's copies ran instead of the kernel")
    return f"{len(gradients)} tensors have their bits"


def _slots(dtype: torch.dtype, device: torch.device) -> Sequence[Tensor]:
    """Return views of one piece of memory, of the shapes of `_SIZES`, each after a gap."""
    counts = [torch.Size(size).numel() for size in _SIZES]
    memory, begin, views = torch.zeros(sum(counts) + 8 * len(counts), dtype=dtype, device=device), 0, []
    for size, count in zip(_SIZES, counts, strict=True):
        views.append(memory[begin : begin + count].view(size))
        begin += -(-count // 8) * 8
    return views
