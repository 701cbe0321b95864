"""Gradients into their bucket and cast on the way, against the device's own copy of as many bytes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from deepytorch.comm.kernels.buckets import Slots, pack
from deepytorch.gpu_check.figures.timing import OURS, median_ms, timed
from deepytorch.gpu_check.outcome import Check, Failed, Found
from deepytorch.torch_internals import foreach_copy

_SUBJECT = "speed of gradient buckets"
# Those of a Llama-like layer of 2048: matrices and norms.
_SHAPES = ((2048, 2048),) * 4 + ((8192, 2048),) * 3 + ((2048,),) * 2


def checks(device: torch.device) -> Iterator[Check]:
    """Yield the checks of this subject."""
    for setup in (OURS, "foreach copy", "one copy"):
        for source, target in (("fp32", "bf16"), ("bf16", "fp32")):
            run = partial(timed_bucket, device, setup, source, target)
            yield Check(f"{_SUBJECT}: {setup}", f"{source} to {target}", run, False, is_timed=True, expected_s=2.0)


def timed_bucket(device: torch.device, setup: str, source: str, target: str) -> Found:
    """Time a layer's gradients into a bucket of another type. one copy: of as many bytes, without a cast."""
    kinds = {"fp32": torch.float32, "bf16": torch.bfloat16}
    shapes = _SHAPES if device.type == "cuda" else ((64, 64), (64,))
    gradients = [torch.randn(shape, device=device).to(kinds[source]) for shape in shapes]
    bucket = torch.empty(sum(each.numel() for each in gradients), dtype=kinds[target], device=device)
    parts = bucket.split([each.numel() for each in gradients])
    views = [part.view(each.shape) for part, each in zip(parts, gradients, strict=True)]
    num_bytes = bucket.nbytes + sum(each.nbytes for each in gradients)
    slots = Slots(views)
    if setup == "one copy":
        halves = torch.empty(2, num_bytes // 2, dtype=torch.uint8, device=device)
        return timed(device, median_ms(lambda: halves[0].copy_(halves[1]), device), num_bytes=num_bytes)
    run = {OURS: lambda: pack(gradients, slots), "foreach copy": lambda: foreach_copy(views, gradients)}[setup]
    ms = median_ms(run, device)
    if not all(torch.equal(view, each.to(view.dtype)) for view, each in zip(views, gradients, strict=True)):
        raise Failed("the bucket does not hold the gradients")
    return timed(device, ms, num_bytes=num_bytes)
