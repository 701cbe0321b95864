"""A failing trial, made as plain as it can be while it still fails in the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace

from tests.fuzz.children import outcomes
from tests.fuzz.grammar import MODEL, Batch, Trial, plainest, valid
from tests.fuzz.training import Outcome

LIMIT = 150  # trials that are run for it
SMALL = (Batch(rows=2, positions=4), Batch(rows=2, positions=7), Batch())


def in_a_child(trial: Trial) -> Outcome:
    """Run the trial in a process of its own."""
    ((_, outcome),) = outcomes([trial])
    return outcome


def shrink(
    trial: Trial,
    outcome: Outcome,
    tell: Callable[[str], None] = lambda text: None,
    run: Callable[[Trial], Outcome] = in_a_child,
    limit: int = LIMIT,
) -> tuple[Trial, Outcome]:
    """Return the plainest trial found that ends as this one did, and its outcome."""
    tried = 0
    progress = True
    while progress:
        progress = False
        for candidate in _plainer(trial, outcome):
            if tried >= limit:
                return trial, outcome
            tried += 1
            found = run(candidate)
            if found.kind == outcome.kind and bool(found.fallbacks) == bool(outcome.fallbacks):
                trial, outcome, progress = candidate, found, True
                tell(f"{tried}: {trial.to_json()['choices']} {len(trial.cases)} cases")
                break
    return trial, outcome


def _plainer(trial: Trial, outcome: Outcome) -> Iterator[Trial]:
    """Trials that are a step plainer, those that leave out most first."""
    if len(trial.cases) > 1:
        for case in outcome.wrong or range(len(trial.cases)):
            yield replace(trial, cases=(trial.cases[case],))
        for case in outcome.wrong:
            if case + 1 < len(trial.cases):
                yield replace(trial, cases=trial.cases[: case + 1])
        for number in range(len(trial.cases)):
            yield replace(trial, cases=trial.cases[:number] + trial.cases[number + 1 :])
    unusual = [name for name in MODEL if getattr(trial, name) != plainest(name)]
    size = len(unusual)
    while size:
        for first in range(0, len(unusual), size):
            plainer = trial
            for name in unusual[first : first + size]:
                plainer = plainer.with_choice(name, plainest(name))
            if valid(plainer) != trial:
                yield valid(plainer)
        size //= 2
    for number, case in enumerate(trial.cases):
        for small in SMALL:
            for each in fields(Batch):
                wanted = getattr(small, each.name)
                if each.name in ("rows", "positions") and getattr(case, each.name) <= wanted:
                    continue
                if each.name != "seed" and getattr(case, each.name) != wanted:
                    changed = replace(case, **{each.name: wanted})
                    yield replace(trial, cases=(*trial.cases[:number], changed, *trial.cases[number + 1 :]))
