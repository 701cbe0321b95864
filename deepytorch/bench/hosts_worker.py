"""A rank of `deepytorch bench hosts`: the same script with the import and without, as DEEPYTORCH says."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

import deepytorch
from deepytorch.bench.channel import DOING, Turns
from deepytorch.bench.host_loops import Loop, Step
from deepytorch.bench.hosts import ALL, HostJob
from deepytorch.bench.models import batch_kind, build_model
from deepytorch.compiler.report import LEDGER
from deepytorch.data import batches, load_rows, train_tokenizer
from deepytorch.errors import ParityError

Job = HostJob


def run(job: HostJob, turns: Turns) -> dict[str, Any]:
    """Train in turns, and then from the other checkpoint if there is one; return losses, seconds and the report."""
    assert job.scratch is not None
    first = job.save_at if job.begins else 0
    for _ in range(first):  # meanwhile the others write the checkpoint
        turns.take()
        turns.hand_on()
    turns.say(DOING, f"{job.model} in {job.host}")
    if job.lowering != "inductor":
        deepytorch.configure(options={"lowering": job.lowering})
    folder = job.scratch / job.saves
    folder.mkdir(exist_ok=True)  # by the first of the ranks
    loop = _loop(job, folder)
    loop.turns = turns
    begins = _checkpoint(job.scratch, job.begins) if job.begins else None
    trained = _whole(job, loop.train(first, job.save_at, _checkpoint(job.scratch, job.saves), begins), first)
    loop.turns = None
    again: Sequence[Step] = ()
    if job.then:
        turns.say(DOING, f"{job.model} in {job.host}, from the checkpoint of {job.then}")
        more = loop.train(job.save_at, None, folder / "again", _checkpoint(job.scratch, job.then))
        again = _whole(job, more, job.save_at)
    report = LEDGER.report()
    return {
        "losses": [each.loss for each in trained],
        "seconds": [each.seconds for each in trained],
        "again": [each.loss for each in again],
        "figures": {name: report.total(name) for name in ("steps_packed", "steps_padded")},
        "texts": {
            "padding": _where([each.name for each in report.regions if each.outcome == "packed"], bool(report.regions)),
            "fallbacks": "; ".join(said for each in report.regions for said in each.fallbacks),
        },
    }


def _loop(job: HostJob, folder: Path) -> Loop:
    torch.manual_seed(0)
    options = job.options
    rows = load_rows(options.data)
    tokenizer = train_tokenizer(rows, 512 if options.size == "tiny" else 2048)
    model = build_model(job.model, options.size, vocab_size=tokenizer.get_vocab_size())
    own = batches(
        rows,
        tokenizer,
        batch_size=options.batch_size,
        max_length=options.max_length,
        kind=batch_kind(job.model),
        seed=int(os.environ.get("RANK", "0")),
        steps=options.steps,
    )
    host = ALL[job.host]
    module, _, name = host.loop.rpartition(".")
    loop: Loop = getattr(import_module(f"deepytorch.bench.{module}"), name)(model, list(own), folder, **host.given)
    return loop


def _checkpoint(scratch: Path, name: str) -> Path:
    return scratch / name / "save"


def _whole(job: HostJob, steps: Sequence[Step], first: int) -> Sequence[Step]:
    """Return the steps if none is missing."""
    if len(steps) != job.options.steps - first:
        raise ParityError(f"{job.host} recorded {len(steps)} steps, expected {job.options.steps - first}")
    return steps


def _where(packed: Sequence[str], compiled: bool) -> str:
    """Return where padding was stripped. packed: the names of regions that run packed."""
    if any(name.startswith("model entry") for name in packed):
        return "at model entry"
    return "in the graph" if packed else "compiled, padded" if compiled else "left alone"
