"""Packed steps by CUDA graphs, and steps that never wait for the device."""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from deepytorch import prefetch
from deepytorch.bench.back_to_back import Trainee
from deepytorch.bench.training_step import DTYPES, Batch, Precision
from deepytorch.compiler.report import LEDGER
from deepytorch.gpu_check.checks.models import COMPILED, COMPILES_S, compared, few_batches, start_of, trainee_of
from deepytorch.gpu_check.outcome import Check, Failed, Skipped


def checks(device: torch.device) -> Iterator[Check]:
    """Yield the checks of this subject."""
    for dtype in ("fp32", "bf16"):
        run = partial(graphs_train_as_eager, device, dtype)
        yield Check("CUDA graphs", f"llama, {dtype}", run, deadline_s=COMPILES_S, expected_s=35.0)
    run = partial(synchronisations, device)
    yield Check("synchronisations", "a packed step", run, deadline_s=COMPILES_S, expected_s=45.0)


def graphs_train_as_eager(device: torch.device, dtype: str) -> str:
    """Compare steps of sizes that come again with eager's, and see that graphs are replayed in the last ones.

    A CPU has no graphs: there the rounding of sizes is compared, which is what packed steps need for them.
    """
    graphs = device.type == "cuda"
    options: dict[str, Any] = {"mode": "reduce-overhead"} if graphs else {"round_sizes": True}
    data = few_batches("llama", device, 4)
    compiled = partial(COMPILED, options={"wait": True, **options})
    trainee = trainee_of(start_of("llama").to(device), data * 3, compiled)
    LEDGER.forget()
    text = compared(trainee, dtype)
    report = LEDGER.report()
    rounded, sizes = report.total("steps_rounded"), report.total("sizes_recorded")
    if not rounded:
        because = {str(reason) for region in report.regions for reason in region.own_sizes_because}
        raise Failed(f"no step had its sizes rounded: {'; '.join(because) or report.total('steps_packed')}")
    if not graphs:
        return f"{text}, {rounded} steps with {sizes} sizes; no graphs without a CUDA device"
    launches = _graph_launches(trainee, data, Precision(device, DTYPES[dtype]))
    if not launches:
        raise Failed("no CUDA graph was launched in steps of sizes that were there before")
    return f"{text}, {rounded} steps with {sizes} sizes, {launches} launches of graphs in {len(data)} steps"


def _graph_launches(trainee: Trainee, data: Sequence[Batch], precision: Precision) -> int:
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profiler:
        for batch in data:
            trainee.step(batch, precision)
        precision.synchronize()
    return sum(each.count for each in profiler.key_averages() if "GraphLaunch" in each.key)


def synchronisations(device: torch.device) -> str:
    """Count the synchronisations of steps after the warm-up, with batches moved by `deepytorch.prefetch`."""
    model = start_of("llama").to(device)
    call = COMPILED(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    counts = []
    for step, batch in enumerate(prefetch(few_batches("llama", torch.device("cpu"), 12), device)):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            _warn_of_synchronisations(device, step >= 6)
            try:
                call(**batch).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            finally:
                _warn_of_synchronisations(device, False)
        if step >= 6:
            counts.append(sum("synchroniz" in str(each.message).lower() for each in said))
    if device.type != "cuda":
        raise Skipped(f"{len(counts)} steps ran, and there is no CUDA device that they could wait for")
    if statistics.median(counts) > 0:
        raise Failed(f"{counts} synchronisations in the steps after the sixth; expected none")
    return f"{counts} in the steps after the sixth"


def _warn_of_synchronisations(device: torch.device, on: bool) -> None:
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("warn" if on else "default")
