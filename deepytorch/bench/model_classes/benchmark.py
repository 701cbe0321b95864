"""`deepytorch bench models`: every model class of the installed transformers, in eager and with the import."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from deepytorch.bench.benchmark import Benchmark, Cell, Place, Setup
from deepytorch.bench.model_classes.catalog import TASKS, ModelClass, model_classes
from deepytorch.bench.model_classes.tables import EAGER_FAILS, FAILS, WRONG, line_of, tables_of
from deepytorch.bench.options import check_at_least, check_choice
from deepytorch.bench.results import Results, Row
from deepytorch.bench.table import Table
from deepytorch.errors import ParityError
from deepytorch.version import __version__

LOWERINGS = ("aot_eager", "eager", "inductor")
_EAGER, _OURS = "eager", "deepytorch"


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelsOptions:
    """Train every model class of the installed transformers, made small, in eager and with the import, and compare.

    Weights are random and nothing is downloaded. Each model runs in processes of its own; numbers are compared over a
    few optimizer steps in fp32, beside eager's own sensitivity to a change of the last bit of its weights. The table
    says where padding was stripped, and why not. Ends with status 2 if numbers are wrong or the import makes a model
    fail.
    """

    only: Annotated[
        tuple[str, ...], Option(help="Classes or families, such as LlamaForCausalLM,llama. Default: all.")
    ] = ()
    task: Annotated[tuple[str, ...], Option(help=f"Tasks, with commas: {', '.join(TASKS)}.")] = tuple(TASKS)
    jobs: Annotated[int, Option(help="Models at a time, with one thread each.")] = 1
    limit: Annotated[
        float, Option(metavar="SECONDS", help="Time limit of a model, in eager and again with the import.")
    ] = 180.0
    lowering: Annotated[
        str, Option(metavar="|".join(LOWERINGS), help="What runs the compiled graphs; inductor takes longest.")
    ] = "aot_eager"

    def __post_init__(self) -> None:
        """Raise `ConfigError` for a value that is not accepted."""
        check_choice(self, "task", TASKS)
        check_choice(self, "lowering", LOWERINGS)
        check_at_least(self, 1, "jobs")
        check_at_least(self, 0.001, "limit")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelJob:
    """A part of the work on models, of which each rank has one.

    Attributes:
        models: (task, family, name) of each.
        lowering: Of deepytorch's graphs; None: the part in eager, which comes first.
        limit: Seconds.
        scratch: The folder that the parts share.
    """

    models: tuple[tuple[str, ...], ...]
    lowering: str | None
    limit: float
    scratch: Path | None = None


class Models(Benchmark[ModelsOptions]):
    """See this module."""

    name = "models"
    options = ModelsOptions
    selects = ("only", "task", "jobs", "limit")

    def cells(self, options: ModelsOptions) -> Sequence[Cell]:
        """Return a cell for each model, or for so many as run at a time."""
        found: list[Cell] = []
        for _, each in groupby(model_classes(options.task, options.only), attrgetter("task")):
            models = list(each)
            starts = range(0, len(models), options.jobs)
            found += [self._cell(options, models[at : at + options.jobs]) for at in starts]
        return found

    @staticmethod
    def _cell(options: ModelsOptions, models: Sequence[ModelClass]) -> Cell:
        def setup(name: str, lowering: str | None) -> Setup:
            job = ModelJob(
                models=tuple((each.task, each.family, each.name) for each in models),
                lowering=lowering,
                limit=options.limit,
            )
            environment = {"DEEPYTORCH_COMPILE": "wait", "HF_HUB_OFFLINE": "1"}
            return Setup(name=name, job=job, imports=lowering is not None, environment=environment)

        return Cell(
            key={"task": models[0].task},
            setups=[setup(_EAGER, None), setup(_OURS, options.lowering)],
            place=Place(ranks=len(models)),
            kind="models",
            keeps_processes=True,
            rows=[each.name for each in models],
            row_key="class",
        )

    def rows(self, options: ModelsOptions, cell: Cell, found: Mapping[str, list[dict[str, Any]]]) -> list[Row]:
        """Return a row for each model.

        Figures: relative differences: `rel_diff`, of the number that is furthest from eager's, measured by
        `allowed_rel_diff`; `own_rel_diff`, the most that one of eager's own numbers changes by if every weight is moved
        by its last bit. `eager_s`, `import_s`, `compile_s`, and `processes_s` of both processes; `listed`, the classes
        that transformers lists. Texts: `outcome` and `where`, as in `tables`; `steps`, how each ran: graph, entry
        (packed there), part (packed in some regions), padded, profiled (in eager) or eager; `sides`, of the pads in
        each; `reasons`, why something was not packed, by the report; `deepytorch`, its version.
        """
        if len(found) < len(cell.setups):
            return []
        rows = []
        for key, model, eager, ours in zip(cell.keys, cell.setups[0].job.models, *found.values(), strict=True):
            figures: dict[str, float] = {"listed": len(model_classes())}
            texts = {"family": model[1], "deepytorch": _version()}
            parts = [eager] if "outcome" in eager["texts"] else [eager, ours]
            for part in parts:
                figures |= {**part["figures"], "processes_s": figures.get("processes_s", 0.0) + part["process_s"]}
                texts |= part["texts"]
            if parts == [eager] and texts["outcome"] == FAILS:
                texts["outcome"] = EAGER_FAILS
            rows.append(Row(key=key, figures=figures, texts=texts))
        return rows

    def lines(self, rows: Sequence[Row]) -> list[str]:
        """Return a line for each model."""
        return [f"{row.key['task']}: " + "  ".join(filter(None, line_of(row))) for row in rows]

    def tables(self, results: Results) -> list[Table]:
        """Return how many models were packed and equal, why not, and the models of each task."""
        return tables_of(results)

    def verdict(self, results: Results) -> None:
        """Raise `ParityError` if numbers are wrong, or a model fails with the import alone."""
        wrong = [row.key["class"] for row in results.rows if row.texts.get("outcome") in (WRONG, FAILS)]
        if wrong:
            raise ParityError(f"Wrong, or failing with the import alone: {', '.join(map(str, wrong))}.")


@cache
def _version() -> str:
    """Return deepytorch's version, with the commit of the sources if they are a git tree's."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        return f"{__version__}, commit {commit}"
    except (OSError, subprocess.CalledProcessError):
        return __version__
