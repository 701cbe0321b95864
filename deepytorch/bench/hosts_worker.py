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
from deepytorch.bench.host_recipes import ARMS
from deepytorch.bench.models import SIZES, batch_kind, build_model
from deepytorch.bench.options import check_choice
from deepytorch.bench.results import decoded
from deepytorch.data import batches, load_rows, train_tokenizer
from deepytorch.errors import ConfigError, DataError

MODELS = ("llama", "bert", "t5")


@dataclass(frozen=True, kw_only=True, slots=True)
class HostsOptions:
    """The options of `deepytorch bench hosts`."""

    hosts: tuple[str, ...] = tuple(HOSTS)
    models: tuple[str, ...] = MODELS
    size: str = "demo"
    batch_size: int = 8
    max_length: int = 384
    steps: int = 20
    data: Path | None = None
    timeout_s: float = 900.0
    lowering: str = "inductor"

    def __post_init__(self) -> None:
        """Raise `ConfigError` for a value that is not accepted, `DataError` for a file that is not there."""
        check_choice(self, "hosts", ARMS)
        check_choice(self, "models", MODELS)
        check_choice(self, "size", SIZES)
        if self.steps < 4:
            raise ConfigError(f"steps is {self.steps}; expected 4 or more: the last two are repeated from checkpoints.")
        if self.data is not None and not self.data.is_file():
            raise DataError(f"The data file {self.data} is not there; expected a JSON file in Alpaca layout.")

    @property
    def save_at(self) -> int:
        """Return the step before which a checkpoint is written."""
        return self.steps - 2


@dataclass(frozen=True, kw_only=True, slots=True)
class HostJob:
    """The work of one process: train from step `first`, save on the way; then continue from `other`, if given."""

    options: HostsOptions
    host: str
    model: str
    save: Path
    first: int = 0
    resume: Path | None = None
    other: Path | None = None


def work(job: HostJob, folder: Path, turn: Turn | None = None) -> dict[str, Any]:
    """Run the job as this rank, its first training in turns; return its steps, and deepytorch's report."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    options = job.options
    if options.lowering != "inductor":
        deepytorch.configure(options={"lowering": options.lowering})
    rows = load_rows(options.data)
    tokenizer = train_tokenizer(rows, 512 if options.size == "tiny" else 2048)
    model = build_model(job.model, options.size, vocab_size=tokenizer.get_vocab_size())
    own = list(
        batches(
            rows,
            tokenizer,
            batch_size=options.batch_size,
            max_length=options.max_length,
            kind=batch_kind(job.model),
            seed=int(os.environ.get("RANK", "0")),
            steps=options.steps,
        )
    )
    loop = ARMS[job.host].loop(model, own, folder)
    loop.turn = turn
    found: dict[str, Any] = {}
    found["steps"] = [asdict(each) for each in loop.train(job.first, options.save_at, job.save, job.resume)]
    if turn is not None:
        turn.close()
        loop.turn = None
    if job.other is not None:
        found["resumed"] = [asdict(each) for each in loop.train(options.save_at, None, folder / "again", job.other)]
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
    job = decoded(HostJob, json.loads(path.read_text(encoding="utf-8")))
    found = work(job, path.parent, Turn(*pipes) if pipes else None)
    rank = os.environ.get("RANK", "0")
    (path.parent / f"rank{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
