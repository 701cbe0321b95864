"""The report: one record a region, kept while the process lives, as text and as JSON."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepytorch.comm.gradients.reducer import GradientReducer


@dataclass
class Starts:
    """The times at which training got going, in seconds since the process began; None: not yet, or unknown.

    first_step: the end of the first training call. break_even: more time was saved than lost.
    """

    first_step: float | None = None
    break_even: float | None = None


STARTS = Starts()


@dataclass
class RegionRecord:
    """The record of one compiled region (one graph of Dynamo's): its rewrites and the counts of its steps."""

    name: str
    outcome: str  # "packed", "rewritten" (alike for every batch), "declined" or "eager"
    lowering: str
    changes: list[str] = field(default_factory=list)
    declined: list[str] = field(default_factory=list)
    attention: dict[str, int] = field(default_factory=dict)  # `explain` only: packed ones by form
    pass_ms: dict[str, float] = field(default_factory=dict)
    plan_digest: str = ""
    steps_packed: int = 0
    steps_padded: int = 0
    route: str = ""  # of the last call: "eager", "profiled", "padded", "packed", or the name of the form that it ran
    steps_profiled: int = 0  # the first, in eager
    steps_meanwhile: int = 0  # in eager, packed or padded, until they were compiled
    steps_replayed: int = 0  # packed ones with a padded replay, because somebody looked at pads
    replay_seconds: float = 0.0
    steps_read_back: int = 0  # those whose batch was read from a device, for which the host waited
    trials: list[str] = field(default_factory=list)  # of forms of a region that is not packed, with their outcomes
    forms_untried: int = 0  # of such a region: they are being compiled, or on trial
    on_trial: str = ""  # the form that is
    forms_compared: int = 0  # with eager, before their first step
    compare_seconds: float = 0.0
    trial_seconds: float = 0.0  # that steps of slower forms took longer in trials
    verified_steps: int = 0  # packed ones that were compared with eager, by DEEPYTORCH=verify
    verify_seconds: float = 0.0
    largest_difference: float = 0.0
    outputs: dict[str, list[str]] = field(default_factory=dict)  # the uses of each output
    padded_because: dict[str, int] = field(default_factory=dict)
    steps_rounded: int = 0  # packed ones with dummy tokens, up to one of a few sizes
    sizes_recorded: int = 0  # combinations of sizes so far, each a CUDA graph if CUDA graphs are asked for
    own_sizes_because: dict[str, int] = field(default_factory=dict)  # packed ones without, if sizes are rounded
    tokens_real: int = 0
    tokens_padded: int = 0  # positions of the batches, pads among them
    labels: int = 0
    compiles: int = 0
    recompiles: int = 0
    host_seconds: float = 0.0
    compile_seconds: float = 0.0
    compiled_by: str = ""  # "a process", "this process", "an earlier run"; empty: not yet, or at the first call
    compiled_here: list[str] = field(default_factory=list)  # why this process has compiled what another one was to
    compile_seconds_in_background: float = 0.0
    compile_peak_mb_in_background: float = 0.0
    change_over_seconds: float = 0.0  # since the process began; 0: not yet, or at the first call
    fallbacks: list[str] = field(default_factory=list)
    relative_cost: float | None = None  # matrix work left by packing, of the batch that was explained
    forward_seconds: float = 0.0  # in eager, of that batch

    @property
    def steps(self) -> int:
        """Return the number of packed, padded and profiled steps."""
        return self.steps_packed + self.steps_padded + self.steps_profiled


class Report:
    """The records of all regions, and their sums."""

    def __init__(self, regions: list[RegionRecord], gradients: Sequence[dict[str, Any]] = ()) -> None:
        """Make a report. gradients: one entry for each data-parallel module whose gradients our reducer has."""
        self.regions, self.gradients = regions, list(gradients)

    def total(self, name: str) -> Any:
        """Return the sum of one figure over all regions."""
        return sum(getattr(region, name) for region in self.regions)

    @property
    def real_token_fraction(self) -> float | None:
        """Return real tokens over positions, of the batches that were read; None before the first."""
        positions = self.total("tokens_padded")
        return self.total("tokens_real") / positions if positions else None

    def to_json(self) -> dict[str, Any]:
        """Return plain data: sums first, then the regions."""
        steps = self.total("steps")
        return {
            "steps_packed": self.total("steps_packed"),
            "steps_padded": self.total("steps_padded"),
            "steps_profiled": self.total("steps_profiled"),
            "steps_replayed": self.total("steps_replayed"),
            "steps_read_back": self.total("steps_read_back"),
            "tokens_real": self.total("tokens_real"),
            "tokens_padded": self.total("tokens_padded"),
            "tokens_saved": sum(r.tokens_padded - r.tokens_real for r in self.regions if r.steps_packed),
            "real_token_fraction": self.real_token_fraction,
            "compiles": self.total("compiles"),
            "recompiles": self.total("recompiles"),
            "compile_seconds": self.total("compile_seconds"),
            "compile_seconds_in_background": self.total("compile_seconds_in_background"),
            "compile_peak_mb_in_background": max((r.compile_peak_mb_in_background for r in self.regions), default=0.0),
            "steps_meanwhile": self.total("steps_meanwhile"),
            "first_step_seconds": STARTS.first_step,
            "change_over_seconds": max((r.change_over_seconds for r in self.regions), default=0.0) or None,
            "break_even_seconds": STARTS.break_even,
            "host_ms_per_step": 1e3 * self.total("host_seconds") / steps if steps else 0.0,
            "gradients": self.gradients,
            "groups_on_stock": _groups_on_stock(),
            "regions": [asdict(region) for region in self.regions],
        }


# The communication layer is looked up and not imported: a process that trains alone does not load it.
def _reducers() -> list[GradientReducer]:
    """Return the gradient reducers of this process."""
    module = sys.modules.get("deepytorch.comm.gradients.registry")
    return module.reducers() if module else []


def _groups_on_stock() -> list[dict[str, str]]:
    """Return the process groups of this process that run on stock gloo and nccl, and why."""
    module = sys.modules.get("deepytorch.comm.group.groups")
    return module.on_stock() if module else []


class Ledger:
    """The list of all regions' records."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._records: list[RegionRecord] = []

    def open(self, record: RegionRecord) -> RegionRecord:
        """Keep a new region's record."""
        with self._lock:
            self._records.append(record)
        return record

    def report(self, reset: bool = False) -> Report:
        """Return a report of everything so far; with `reset` counts start anew (compiled regions stay compiled)."""
        with self._lock:
            gradients = [reducer.to_json() for reducer in _reducers()]
            found = Report(list(self._records), gradients)
            if reset:
                found = Report([RegionRecord(**asdict(record)) for record in self._records], gradients)
                for reducer in _reducers():
                    reducer.reset_counts()
                for record in self._records:
                    fresh = RegionRecord(record.name, record.outcome, record.lowering)
                    for name in _COUNTED:
                        setattr(record, name, getattr(fresh, name))
        return found

    def forget(self) -> None:
        """Drop every record (for tests)."""
        with self._lock:
            self._records.clear()


_COUNTED = (
    "steps_packed", "steps_padded", "steps_profiled", "steps_meanwhile", "steps_replayed", "replay_seconds",
    "steps_read_back", "steps_rounded", "own_sizes_because",
    "verified_steps", "verify_seconds", "padded_because", "tokens_real", "tokens_padded", "labels", "compiles",
    "recompiles", "host_seconds", "compile_seconds", "fallbacks",
)  # fmt: skip

LEDGER = Ledger()
