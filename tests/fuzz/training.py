"""One trial, run in this process: eager, deepytorch, and what came of it."""

from __future__ import annotations

import itertools
import linecache
import sys
import time
import traceback
import warnings
from dataclasses import asdict, dataclass, field
from types import ModuleType
from typing import Any

import torch

from deepytorch.autowrap import configure
from deepytorch.compiler.report import LEDGER
from deepytorch.switch import SWITCH
from tests.fuzz.compare import Note, differences, precision
from tests.fuzz.grammar import Trial
from tests.fuzz.source import script

_NUMBERS = itertools.count()
MOVES = 3  # how often eager runs from moved weights, where something differs


@dataclass
class Outcome:
    """What came of a trial.

    Attributes:
        kind: "equal"; "differs"; "raises" (eager does not); "raises in both"; "raises in eager"; "crashes"; "hangs".
        told: What differed, or the traceback.
        cases: The number of cases; of those that differ, `wrong`.
        packed, padded, profiled: Steps of regions.
        reasons: Why regions were declined and steps padded.
        fallbacks: Regions that went on in eager because something failed.
    """

    kind: str
    told: list[str] = field(default_factory=list)
    cases: int = 0
    wrong: list[int] = field(default_factory=list)
    packed: int = 0
    padded: int = 0
    profiled: int = 0
    regions: int = 0
    reasons: list[str] = field(default_factory=list)
    fallbacks: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def is_find(self) -> bool:
        """Return whether the trial shows a fault."""
        return self.kind not in ("equal", "raises in both") or bool(self.fallbacks)

    def to_json(self) -> dict[str, Any]:
        """Return its fields, without those that are empty."""
        return {name: value for name, value in asdict(self).items() if value or name in ("kind", "cases")}


def run(trial: Trial) -> Outcome:
    """Train the trial's model on both sides and compare all that a script may look at."""
    started = time.perf_counter()
    warnings.simplefilter("ignore")
    torch._dynamo.reset()
    LEDGER.forget()
    SWITCH.enabled = trial.host == "import"
    module = _loaded(trial)
    wanted, eager_raised = _notes(module, "eager")
    found, raised = _notes(module, "deepytorch")
    outcome = _judged(trial, module, (wanted, eager_raised), (found, raised))
    SWITCH.enabled = False
    configure()
    report = LEDGER.report()
    outcome.cases = len(trial.cases)
    outcome.packed, outcome.padded = report.total("steps_packed"), report.total("steps_padded")
    outcome.profiled, outcome.regions = report.total("steps_profiled"), len(report.regions)
    said = {reason for each in report.regions for reason in [*each.declined, *each.padded_because]}
    outcome.reasons = sorted(reason[:160] for reason in said)
    outcome.fallbacks = sorted({reason[:400] for each in report.regions for reason in each.fallbacks})
    outcome.seconds = round(time.perf_counter() - started, 2)
    return outcome


def _judged(
    trial: Trial, module: ModuleType, eager: tuple[list[Note], str | None], ours: tuple[list[Note], str | None]
) -> Outcome:
    (wanted, eager_raised), (found, raised) = eager, ours
    if eager_raised and raised:
        return Outcome("raises in both", [eager_raised.splitlines()[-1]])
    if eager_raised:
        return Outcome("raises in eager", eager_raised.splitlines()[-6:])
    if raised:
        return Outcome("raises", raised.splitlines()[-30:])
    if not any(differences(trial, wanted, found)) and precision(trial) != "bfloat16":
        return Outcome("equal")
    moved = [_notes(module, "eager", seed)[0] for seed in range(MOVES)]
    exact = _exact(trial, module) if precision(trial) == "bfloat16" else []
    told = list(differences(trial, wanted, found, moved, exact))
    if not told:
        return Outcome("equal")
    kind = "finite where eager is not" if all(each.finite for each in told) else "differs"
    return Outcome(kind, [f"case {each.case}, {each.text}" for each in told[:12]], wrong=sorted({t.case for t in told}))


def _loaded(trial: Trial) -> ModuleType:
    """The script as a module, whose lines can be shown."""
    text, name = script(trial), f"<trial {trial.seed}/{trial.index}>"
    module = ModuleType(f"trial_{next(_NUMBERS)}")  # Dynamo finds it by name
    module.__file__ = name
    sys.modules[module.__name__] = module
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    exec(compile(text, name, "exec", dont_inherit=True), vars(module))
    return module


def _notes(module: ModuleType, side: str, moved: int | None = None) -> tuple[list[Note], str | None]:
    """All that a side's script notes, or the traceback with which it ended."""

    def move(model: torch.nn.Module) -> None:
        generator = torch.Generator().manual_seed(moved or 0)
        with torch.no_grad():
            for weight in model.parameters():
                away = torch.rand(weight.shape, generator=generator).sub(0.5).sign().to(weight.dtype) * torch.inf
                weight.copy_(torch.nextafter(weight, away))

    try:
        return (module.run(side) if moved is None else module.run(side, move)), None
    except Exception:
        return [], traceback.format_exc()


def _exact(trial: Trial, module: ModuleType) -> list[Note]:
    """Eager's notes in float64, from the same weights."""
    torch.manual_seed(trial.index)
    state = module.make().state_dict()
    exact = _loaded(trial.with_choice("dtype", "float64"))

    def prepare(model: torch.nn.Module) -> None:
        model.load_state_dict(state)

    try:
        notes = exact.run("eager", prepare)
    except Exception:
        return []
    return notes
