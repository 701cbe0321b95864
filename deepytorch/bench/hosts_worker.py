"""The program of each rank of `deepytorch bench hosts`: `python -m deepytorch.bench.hosts_worker JOB.json [PIPE PIPE]`.

The same script runs with and without the import: DEEPYTORCH=off in the environment makes the import do nothing. The
pipes tell it when to run a step (`turns`).
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import deepytorch
from deepytorch.bench.alternation import Turn
from deepytorch.bench.host_loops import HOSTS
from deepytorch.bench.models import batch_kind, build_model
from deepytorch.data import batches, library_rows, read_alpaca, train_tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class HostJob:
    """The work of one process: train from `first`, save before `save_at`; then continue from `other`, if given."""

    host: str
    model: str
    size: str
    batch_size: int
    max_length: int
    steps: int
    save_at: int
    first: int
    save: str
    resume: str | None
    other: str | None
    data: str | None
    lowering: str


def work(job: HostJob, folder: Path, turn: Turn | None = None) -> dict[str, Any]:
    """Run the job as this rank, its first training in turns; return its steps, and deepytorch's report."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    if job.lowering != "inductor":
        deepytorch.configure(options={"lowering": job.lowering})
    rank = int(os.environ.get("RANK", "0"))
    rows = library_rows() if job.data is None else read_alpaca(Path(job.data))
    vocab_size = 256 if job.size == "tiny" else 2048
    tokenizer = train_tokenizer(rows, max(vocab_size, 512))
    model = build_model(job.model, job.size, vocab_size=tokenizer.get_vocab_size())
    own = list(
        batches(
            rows,
            tokenizer,
            batch_size=job.batch_size,
            max_length=job.max_length,
            kind=batch_kind(job.model),
            seed=rank,
            steps=job.steps,
        )
    )
    loop = HOSTS[job.host][0](model, own, folder)
    loop.turn = turn
    found: dict[str, Any] = {}
    resume = None if job.resume is None else Path(job.resume)
    found["steps"] = [asdict(each) for each in loop.train(job.first, job.save_at, Path(job.save), resume)]
    if turn is not None:
        turn.close()
        loop.turn = None
    if job.other is not None:
        steps = loop.train(job.save_at, None, folder / "again", Path(job.other))
        found["resumed"] = [asdict(each) for each in steps]
    report = deepytorch.report().to_json()
    found["report"] = {name: report[name] for name in ("steps_packed", "steps_padded", "recompiles")}
    found["regions"] = [
        {name: each[name] for name in ("name", "outcome", "fallbacks", "declined", "padded_because")}
        for each in report["regions"]
    ]
    return found


def main() -> None:
    """Run the job in the file `sys.argv[1]`; rank r writes `rankR.json` next to it."""
    path, pipes = Path(sys.argv[1]), [int(each) for each in sys.argv[2:4]]
    job = HostJob(**json.loads(path.read_text(encoding="utf-8")))
    found = work(job, path.parent, Turn(*pipes) if pipes else None)
    rank = os.environ.get("RANK", "0")
    (path.parent / f"rank{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
