"""`deepytorch bench hosts`: every host of a training loop, with and without the import, on the same batches.

Two scripts train from the same weights in turns, without the import and with it, and each leaves a checkpoint before
its last two steps. Then each goes on from the other's, and the losses that follow are compared. With the import that is
a second training in the same process where the host can do it. Without it, it is a new process, which lets its turns
pass until the checkpoints are there. They lie in a folder that the processes share.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from deepytorch.bench.benchmark import Benchmark, Cell, Place, Setup
from deepytorch.bench.figures import loss_rel_diff
from deepytorch.bench.options import TextFile, TextSize, check_choice, check_declared
from deepytorch.bench.results import Results, Row
from deepytorch.bench.table import Table
from deepytorch.errors import ConfigError, DataError, ParityError

MODELS = ("llama", "bert", "t5")
WITHOUT, WITH = "without", "with the import"
WITHOUT_AGAIN, WITH_AGAIN = f"{WITHOUT}, continued", f"{WITH}, continued"
TOLERANCE = 1e-3  # of losses, relative, after some steps of AdamW, which amplifies rounding
CONTINUED = 2  # last steps, which are trained once more from the other's checkpoint


@dataclass(frozen=True, slots=True)
class Host:
    """A host of a training loop.

    loop: its class, behind its module in this package, made of a model, a rank's batches, a folder and `given`.
    packages: needed for it. resumes_in_process: whether, without deepytorch, a second training in one process continues
    from a checkpoint exactly as one in a new process. models: the models that it is for.
    """

    loop: str
    ranks: int = 2
    packages: tuple[str, ...] = ()
    resumes_in_process: bool = True
    models: tuple[str, ...] = MODELS
    given: Mapping[str, Any] = field(default_factory=dict)


def _zero(stage: int, *offload: str) -> Host:
    return Host("host_loops.Zero", packages=("deepspeed",), given={"stage": stage, "offload": offload})


_CAUSAL = ("llama",)
HOSTS = {
    "plain": Host("host_loops.OwnLoop", ranks=1),
    "ddp": Host("host_loops.DataParallel"),
    "fsdp2": Host("host_loops.FullyShard"),
    "trainer": Host("host_loops.Trainer", packages=("transformers", "accelerate")),
    "accelerate": Host("host_loops.Accelerated", packages=("accelerate",)),
    "zero1": _zero(1),
    "zero2": _zero(2),
    "zero2-offload": _zero(2, "offload_optimizer"),
    "zero3": _zero(3),
    "zero3-offload": _zero(3, "offload_optimizer", "offload_param"),
    # Without the import, too, the second step of a training that is resumed in the same process is 1e-4 off.
    "lightning": Host("host_loops.Lightning", packages=("lightning",), resumes_in_process=False),
    "peft": Host("host_loops.LowRank", ranks=1, packages=("peft",)),
    "trl": Host("host_loops.SupervisedTrainer", packages=("trl", "datasets"), models=_CAUSAL),
    "megatron": Host("megatron_loop.Megatron", packages=("megatron",), models=_CAUSAL),
}
_recipe = partial(Host, ranks=1, models=_CAUSAL)
RECIPES = {
    "lora-checkpoint": _recipe("host_recipes.CheckpointedLowRank", packages=("peft", "accelerate")),
    "dpo": _recipe("host_recipes.Preferences"),
    "grpo": _recipe("host_recipes.PolicyRatios"),
    "orpo": _recipe("host_recipes.OddsRatios"),
    "evaluate": _recipe("host_recipes.Evaluation", models=("llama", "bert")),
    "sentence-transformers": _recipe(
        "host_recipes.SentenceEmbeddings", packages=("sentence_transformers",), models=("bert",)
    ),
}
ALL = HOSTS | RECIPES
_GROUPS = {"all": tuple(HOSTS), "recipes": tuple(RECIPES)}


@dataclass(frozen=True, kw_only=True, slots=True)
class HostsOptions:
    """Run one training script in each framework (Trainer, Lightning, DeepSpeed, ...) with the import and without it.

    Compares the losses of every step, lets each run go on from the other's checkpoint, and times the median step. On
    CPU, with two ranks where the framework has ranks. Ends with status 2 if anything differs for no known reason.
    """

    hosts: Annotated[
        tuple[str, ...],
        Option(
            help="Frameworks, with commas: plain (a loop of its own), ddp, fsdp2, trainer, accelerate, zero1, zero2, "
            "zero2-offload, zero3, zero3-offload (DeepSpeed's ZeRO stages), lightning, peft, trl, megatron; or all. "
            "Recipes: lora-checkpoint, dpo, grpo (a step without generation), orpo, evaluate, sentence-transformers; "
            "or recipes.",
        ),
    ] = ("all",)
    models: Annotated[
        tuple[str, ...], Option(help="Model architectures, with commas: llama, bert, t5; weights are random.")
    ] = MODELS
    size: TextSize = "demo"
    data: TextFile = None
    batch_size: Annotated[int, Option(min=1, help="Rows in a batch.")] = 8
    max_length: Annotated[int, Option(min=8, help="Tokens that longer rows are cut to.")] = 384
    steps: Annotated[
        int, Option(min=4, help="Training steps of each run; the last two are repeated from checkpoints.")
    ] = 20

    def __post_init__(self) -> None:
        """Raise `ConfigError` for a value that is not accepted, `DataError` for a file that is not there."""
        if self.steps < 4:
            raise ConfigError(f"steps is {self.steps}; expected 4 or more: the last two are repeated from checkpoints.")
        check_declared(self)
        check_choice(self, "hosts", (*ALL, *_GROUPS))
        check_choice(self, "models", MODELS)
        if self.data is not None and not self.data.is_file():
            raise DataError(f"The data file {self.data} is not there; expected a JSON file in Alpaca layout.")


@dataclass(frozen=True, kw_only=True, slots=True)
class HostJob:
    """The work of one process: train, and leave a checkpoint on the way.

    Attributes:
        host, model: Which of those that `options` names.
        saves: Below `scratch`, the folder of this process's checkpoint.
        begins: The folder of the checkpoint that the training begins with, at the last two steps; empty: from new.
        then: The folder of the one with which these steps are trained once more behind it, without turns.
        scratch: Of all processes.
        lowering: Of deepytorch's graphs.
    """

    options: HostsOptions
    host: str
    model: str
    saves: str
    begins: str = ""
    then: str = ""
    scratch: Path | None = None
    lowering: str = "inductor"

    @property
    def save_at(self) -> int:
        """Return the step before which the checkpoint is written."""
        return self.options.steps - CONTINUED


class Hosts(Benchmark[HostsOptions]):
    """See this module."""

    name = "hosts"
    options = HostsOptions

    def cells(self, options: HostsOptions) -> Sequence[Cell]:
        """Return a cell for each host with each model."""
        names = dict.fromkeys(name for given in options.hosts for name in _GROUPS.get(given, (given,)))
        return [self._cell(options, name, model) for name in names for model in options.models]

    @staticmethod
    def _cell(options: HostsOptions, name: str, model: str) -> Cell:
        host = ALL[name]

        def setup(called: str, **given: Any) -> Setup:
            job = HostJob(options=options, host=name, model=model, saves=called, **given)
            environment = {
                "DEEPYTORCH_COMPILE": "wait",  # compiled from the first step on
                "DS_ACCELERATOR": "cpu",  # heeded by DeepSpeed alone, which else looks for a GPU's compiler
            }
            return Setup(name=called, job=job, imports=called in (WITH, WITH_AGAIN), environment=environment)

        setups = [setup(WITHOUT), setup(WITH, then=WITHOUT if host.resumes_in_process else "")]
        setups.append(setup(WITHOUT_AGAIN, begins=WITH))
        if not host.resumes_in_process:
            setups.append(setup(WITH_AGAIN, begins=WITHOUT))
        missing = [package for package in host.packages if find_spec(package) is None]
        impossible = f"not installed: {', '.join(missing)}" if missing else None
        return Cell(
            key={"host": name, "model": model, "ranks": host.ranks},
            setups=setups,
            place=Place(ranks=host.ranks),
            kind="hosts",
            impossible=impossible if model in host.models else f"it is for {', '.join(host.models)}",
        )

    def rows(self, options: HostsOptions, cell: Cell, found: Mapping[str, list[dict[str, Any]]]) -> list[Row]:
        """Return a row for each setup.

        Figures: `step_s`, the median of the second half of the steps, of rank 0; with the import `speedup`, without /
        with it, `loss_rel_diff` over ranks and steps, and how many steps were packed and padded. Without, continued:
        `checkpoint_rel_diff`, of the losses after each has gone on from the other's checkpoint.
        """
        rows = {name: Row(key={**cell.key, "setup": name}) for name in found}
        for name in (each for each in (WITHOUT, WITH) if each in found):
            rows[name].figures["step_s"] = statistics.median(found[name][0]["seconds"][options.steps // 2 :])
        if WITH in found:
            rows[WITH].figures.update(found[WITH][0]["figures"])
            rows[WITH].texts.update(found[WITH][0]["texts"])
        if WITHOUT in found and WITH in found:
            rows[WITH].figures["speedup"] = rows[WITHOUT].figures["step_s"] / rows[WITH].figures["step_s"]
            rows[WITH].figures["loss_rel_diff"] = loss_rel_diff(found[WITHOUT], found[WITH])
        again = found.get(WITH_AGAIN) or [{"losses": rank["again"]} for rank in found.get(WITH, []) if rank["again"]]
        if WITHOUT_AGAIN in found and again:
            rows[WITHOUT_AGAIN].figures["checkpoint_rel_diff"] = loss_rel_diff(found[WITHOUT_AGAIN], again)
        return list(rows.values())

    def lines(self, rows: Sequence[Row]) -> list[str]:
        """Return one line of a cell's rows."""
        found = _Found(rows)
        return [", ".join(filter(None, (*found.shown(), found.named)))]

    def tables(self, results: Results) -> list[Table]:
        """Return the matrix: a line for each host with each model, and what the columns say."""
        options = results.options
        found = _by_cell(results)
        named = tuple(f"{each.host}, {each.model}: {each.named}." for each in found if each.named)
        data = options["data"] or "docstrings"
        return [
            Table(
                title=f"Size {options['size']}, batch {options['batch_size']}, up to {options['max_length']} tokens, "
                f"fp32, {data}; one thread a rank",
                columns=("host", "model", "ranks", "losses", "speedup", "checkpoints", "padding"),
                rows=tuple(each.shown() for each in found),
                left=("host", "model", "losses", "checkpoints", "padding"),
                notes=(
                    *named,
                    f"losses: equal in each of {options['steps']} steps, on every rank (largest relative difference; "
                    f"{TOLERANCE:.0e} is allowed).",
                    "speedup: median step of the second half, without the import / with it, on rank 0.",
                    "checkpoints: each script goes on from the other's, and the losses that follow agree.",
                    "padding: where it was stripped, and in how many steps.",
                ),
            )
        ]

    def verdict(self, results: Results) -> None:
        """Raise `ParityError` if losses differ, or those behind a checkpoint, and nothing names why."""
        differ = [f"{each.host}, {each.model}" for each in _by_cell(results) if not each.agrees and not each.named]
        if differ:
            raise ParityError(f"Losses differ by more than {TOLERANCE:.0e}, for no known reason: {'; '.join(differ)}.")


class _Found:
    """The rows of one host with one model.

    losses, checkpoints: the largest relative differences; None where nothing was measured. named: why that is so, or
    what deepytorch said of steps that it left as they were.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        by_setup = {row.key["setup"]: row for row in rows}
        self.host, self.model, self._ranks = (str(rows[0].key[name]) for name in ("host", "model", "ranks"))
        self._ours = by_setup.get(WITH, rows[0])
        continued = by_setup.get(WITHOUT_AGAIN, rows[0])
        self.losses = self._ours.figures.get("loss_rel_diff")
        self.checkpoints = continued.figures.get("checkpoint_rel_diff")
        failed = [f"{name}: {row.failed}" for name, row in by_setup.items() if row.failed]
        if len({row.failed for row in rows}) == 1:
            failed = [rows[0].failed]  # the same of all: none was started, or none failed
        self.named = failed[0] or self._ours.texts.get("fallbacks", "")

    @property
    def agrees(self) -> bool:
        return all(each is not None and each <= TOLERANCE for each in (self.losses, self.checkpoints))

    def shown(self) -> tuple[str, ...]:
        """Return the texts of the matrix's columns."""
        losses, checkpoints = (
            "" if each is None else f"{'equal' if each <= TOLERANCE else 'DIFFER'} ({each:.0e})"
            for each in (self.losses, self.checkpoints)
        )
        figures, padding = self._ours.figures, self._ours.texts.get("padding", "")
        if padding:
            packed = figures["steps_packed"]
            padding = f"{padding}, {packed:.0f} of {packed + figures['steps_padded']:.0f} steps"
        speedup = f"{figures['speedup']:.2f}x" if "speedup" in figures else ""
        return self.host, self.model, self._ranks, losses, speedup, checkpoints, padding


def _by_cell(results: Results) -> list[_Found]:
    keys = dict.fromkeys((row.key["host"], row.key["model"]) for row in results.rows)
    return [_Found(results.having(host=host, model=model)) for host, model in keys]
