"""The command: `python -m tests.fuzz --minutes 10`."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

os.environ.update(DEEPYTORCH_COMPILE="wait", HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")

import torch

from deepytorch.errors import BuildError
from deepytorch.passes.ops.native import can_run, native
from deepytorch.switch import SWITCH
from tests.fuzz.children import outcomes
from tests.fuzz.grammar import MODEL, Trial, draw
from tests.fuzz.journal import Journal
from tests.fuzz.shrink import shrink
from tests.fuzz.source import script
from tests.fuzz.training import Outcome


def main() -> int:
    """Run trials until the time is over; returns 1 where something was found."""
    arguments = _arguments()
    SWITCH.enabled = False
    torch.set_num_threads(1)
    if can_run():
        try:
            native.build()
        except BuildError as error:
            print(error)
    if arguments.trial is not None:
        return _one(arguments)
    journal = _journal(arguments)
    if not arguments.summary:
        _many(arguments, journal)
    summary = {**journal.summary(), "among": arguments.among, "torch": torch.__version__}
    print(json.dumps(summary, indent=1))
    if arguments.result:
        runs = json.loads(arguments.result.read_text())["runs"] if arguments.result.exists() else []
        runs = [run for run in runs if run["seed"] != arguments.seed] + [summary]
        arguments.result.write_text(json.dumps({"runs": runs}, indent=1) + "\n")
    return bool(journal.finds())


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=96, help="of each trial: kinds of batches for one model")
    parser.add_argument(
        "--among", action="append", default=[], metavar="NAME=VALUE;VALUE", help="only these alternatives of a choice"
    )
    parser.add_argument("--journal", type=Path, help="a run goes on where it ended; build/fuzz/seed-SEED.jsonl")
    parser.add_argument("--again", action="store_true", help="run what found something once more, and nothing else")
    parser.add_argument("--trial", type=int, help="run this one, print it as a script, and shrink it if it fails")
    parser.add_argument("--no-shrink", action="store_true", help="print what fails as it is")
    parser.add_argument("--summary", action="store_true", help="count what was run before, and run nothing")
    parser.add_argument("--result", type=Path, help="write the summary there, beside those of other seeds")
    arguments = parser.parse_args()
    pairs = [each.partition("=") for each in arguments.among]
    arguments.among = {name: values.split(";") for name, _, values in pairs}
    named = [(name, value) for name, values in arguments.among.items() for value in values]
    unknown = [f"{name}={value}" for name, value in named if value not in MODEL.get(name, {})]
    if unknown:
        parser.error(f"--among names {', '.join(unknown)}; tests/fuzz/grammar.py has the alternatives of MODEL")
    return arguments


def _journal(arguments: argparse.Namespace) -> Journal:
    return Journal(arguments.journal or Path("build/fuzz") / f"seed-{arguments.seed}.jsonl", arguments.seed)


def _one(arguments: argparse.Namespace) -> int:
    found = {trial.index: trial for trial in _journal(arguments).finds()}
    trial = found.get(arguments.trial) or draw(arguments.seed, arguments.trial, arguments.cases, arguments.among)
    ((_, outcome),) = outcomes([trial])
    print(json.dumps(trial.to_json()["choices"]))
    if outcome.is_find and not arguments.no_shrink:
        trial, outcome = shrink(trial, outcome, print)
    print(script(trial))
    print(json.dumps(outcome.to_json(), indent=1))
    return int(outcome.is_find)


def _many(arguments: argparse.Namespace, journal: Journal) -> None:
    until = time.monotonic() + 60 * arguments.minutes
    for trial, outcome in outcomes_until(until, arguments, journal):
        journal.add(trial, outcome)
        if outcome.is_find:
            print(f"trial {trial.index}: {outcome.kind} {outcome.told[-3:]} {outcome.fallbacks}", flush=True)
        if trial.index % 50 == 0:
            print(f"trial {trial.index}: {sum(line['cases'] for line in journal.lines.values())} cases", flush=True)


def outcomes_until(until: float, arguments: argparse.Namespace, journal: Journal) -> Iterator[tuple[Trial, Outcome]]:
    """Run trials from where the journal ends until the time is over."""
    if arguments.again:
        yield from outcomes(journal.finds())
        return
    while time.monotonic() < until:
        first = journal.next_index()
        indices = range(first, first + 12)
        drawn = [draw(arguments.seed, index, arguments.cases, arguments.among) for index in indices]
        for each in outcomes(drawn):
            yield each
            if time.monotonic() > until:
                return


if __name__ == "__main__":
    raise SystemExit(main())
