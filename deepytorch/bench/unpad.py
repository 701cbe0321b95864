"""`deepytorch bench unpad`: the gain of stripping padding on real lengths, and that nothing else changes.

All setups run in one process (`unpad_steps`), on the same batches, so that gradients are compared tensor by tensor.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from typer import Option

from deepytorch.bench.benchmark import Benchmark, Cell, Place, Setup
from deepytorch.bench.figures import by_setup, shown
from deepytorch.bench.measurement import Measurement
from deepytorch.bench.models import MAX_POSITIONS, MODELS, batch_kind
from deepytorch.bench.options import AnyDevice, TextFile, TextSize, check_choice, check_declared
from deepytorch.bench.results import Results, Row
from deepytorch.bench.table import Table
from deepytorch.errors import ConfigError

EAGER, STOCK, HAND_PACKED, OURS = "eager", "inductor", "handpacked", "deepytorch"
GROUPED, FLATTENED = "grouped", "flattened"
# The model's own loss; or that of a plain loop, over next tokens: with the batch's labels, or with labels at pads too.
LOSSES = ("model", "outside", "everywhere")
# The dtypes of a step and of the weights. Steps below the weights' dtype run under autocast, as in Trainer.
PRECISIONS = {"fp32": ("fp32", "fp32"), "mixed": ("bf16", "fp32"), "fp16": ("fp16", "fp32"), "bf16": ("bf16", "bf16")}
_KEY = ("size", "batch_size", "labels", "loss", "precision")


@dataclass(frozen=True, kw_only=True, slots=True)
class UnpadOptions:
    """Time training steps without padding against eager mode, stock torch.compile and hand-packed batches.

    Hand-packed: the rows of a batch laid end to end, without padding, by the script itself, for causal models. The
    setups take turns on the same batches, and their losses and gradients are compared with those of eager mode. Back to
    back, stock torch.compile on batches of rows of like lengths runs beside, and where flash-attn and liger-kernel are
    installed, transformers' flattening collator with both.
    """

    models: Annotated[tuple[str, ...], Option(help="Model architectures, with commas; weights are random.")] = (
        "llama",
    )
    size: TextSize = "small"
    labels: Annotated[
        str,
        Option(
            metavar="response|all", help="Which tokens have labels: those of the response, or of the instruction too."
        ),
    ] = "response"
    loss: Annotated[
        str,
        Option(
            metavar="|".join(LOSSES),
            help="model: the loss that the model returns. outside: cross entropy of its logits, with labels ignored at "
            "padding. everywhere: the same, with labels at padding too.",
        ),
    ] = "model"
    data: TextFile = None
    batch_size: Annotated[int, Option(min=1, help="Rows in a batch.")] = 8
    steps: Annotated[int, Option(min=1, help="Number of batches; each is timed in every setup.")] = 8
    rounds: Annotated[int, Option(min=1, help="How often each batch is timed in each setup.")] = 3
    precision: Annotated[
        str,
        Option(
            metavar="|".join(PRECISIONS),
            help="mixed: autocast to bf16; fp16: autocast to it. bf16: weights are kept in it, too, without autocast.",
        ),
    ] = "fp32"
    vocab_size: Annotated[
        int, Option(min=400, help="Rows of the embedding and of the head; 128256 is that of Llama 3.")
    ] = 8192
    back_to_back: Annotated[
        bool | None,
        Option(
            "--back-to-back/--one-by-one",
            help="Time whole passes of training steps, the optimizer in them, without a wait in between; or each step "
            "without an optimizer, for itself. Default: back to back on a CUDA device.",
        ),
    ] = None
    device: AnyDevice = "cpu"

    def __post_init__(self) -> None:
        """Raise `ConfigError` for options that cannot be run with."""
        check_declared(self)
        check_choice(self, "models", MODELS)
        if self.trains and self.precision == "fp16":
            raise ConfigError("precision is fp16, which trains under a gradient scaler; expected another back to back.")
        others = [model for model in self.models if batch_kind(model) != "causal"]
        if self.loss != "model" and others:
            raise ConfigError(f"The loss {self.loss!r} is one over next tokens, expected decoders, not {others[0]}.")

    @property
    def trains(self) -> bool:
        """Return whether steps are timed back to back, with their optimizer."""
        return self.device.partition(":")[0] == "cuda" if self.back_to_back is None else self.back_to_back


@dataclass(frozen=True, kw_only=True)
class UnpadJob:
    """The measuring of one model in a process. backend, stock_backend: of the two compiled setups, in torch.compile."""

    model: str = "llama"
    options: UnpadOptions = field(default_factory=UnpadOptions)
    max_length: int = MAX_POSITIONS
    backend: str = "deepytorch"
    stock_backend: str = "inductor"


class Unpad(Benchmark[UnpadOptions]):
    """See this module."""

    name = "unpad"
    options = UnpadOptions

    def cells(self, options: UnpadOptions) -> Sequence[Cell]:
        """Return a cell for each model: one process, which has all setups."""
        return [
            Cell(
                key={"model": model, **{name: getattr(options, name) for name in _KEY}},
                setups=[in_one_process(UnpadJob(model=model, options=options))],
                place=Place(threads=None),
                kind="unpad",
            )
            for model in options.models
        ]

    def rows(self, options: UnpadOptions, cell: Cell, found: Mapping[str, list[dict[str, Any]]]) -> list[Row]:
        """Return a row for each setup that the process has run."""
        return [row for [run] in found.values() for row in rows_of(run, cell.key)]

    def tables(self, results: Results) -> list[Table]:
        """Return a table for each model."""
        return [_table(rows) for rows in results.together()]


def in_one_process(job: Any) -> Setup:
    """Return the process that runs all setups of a job, and says itself what is compiled, and when.

    It is named as deepytorch, whose row is there if the process has come to its end.
    """
    return Setup(name=OURS, job=job, imports=True, environment={"DEEPYTORCH_COMPILE": "wait"})


def rows_of(run: Mapping[str, Any], key: Mapping[str, Any] | None = None) -> list[Row]:
    """Return a row for each setup of what `unpad_steps.measure` has found.

    Its figures: `step_s`, the mean over the batches of the median over the rounds; `tokens_per_s`, without pads;
    `ratio`, its time over deepytorch's, of all batches; `loss_rel_diff` and `grad_rel_diff` from eager's, the largest
    of all batches and parameters; `peak_mb`, the most memory of tensors that a step held beyond the weights;
    `compile_s`, of the first pass from empty caches, beyond the steady time. Series: `ratio_quartiles` of batches.

    deepytorch's row has what all setups share: `real_token_fraction` and its inverse, `token_ceiling`, the gain that
    dropping pads alone could give, without attention; `labelled_fraction` of the tokens; `no_padding_ratio`, stock
    torch.compile's time over deepytorch's where every position is a label; and deepytorch's own counts.
    """
    measured = Measurement(run["seconds"])
    rows = []
    for name in measured.seconds:
        steady = measured.steady(name)
        figures = {"step_s": statistics.fmean(steady), "tokens_per_s": run["tokens"] / sum(steady)}
        figures |= {what: run[what][name] for what in _OF_EACH if name in run[what]}
        if name == OURS:
            rows.append(Row(key={**(key or {}), "setup": name}, figures=figures | run["shared"], texts=run["texts"]))
            continue
        figures["ratio"] = measured.ratio(name)
        # batches with other rows cannot be compared one by one
        series = {} if name == GROUPED else {"ratio_quartiles": measured.ratio_quartiles(name)}
        rows.append(Row(key={**(key or {}), "setup": name}, figures=figures, series=series))
    return rows


# Beyond this relative difference, which rounding in no precision explains, a table names a setup other than deepytorch.
_GRADIENTS_EQUAL = 0.1
_OF_EACH = ("loss_rel_diff", "grad_rel_diff", "compile_s", "peak_mb")


def _table(measured: Sequence[Row]) -> Table:
    rows, notes, texts, key = [], [], {}, measured[0].key
    for row in measured:
        quartiles = row.series.get("ratio_quartiles")
        if row.failed:
            notes.append(f"{key['model']}: {row.failed}.")
            continue
        if row.key["setup"] == OURS:
            texts = row.texts
            notes += _remarks(row, by_setup(measured)[EAGER].figures["peak_mb"])
        elif row.figures.get("grad_rel_diff", 0.0) > _GRADIENTS_EQUAL:
            notes.append(f"Gradients of {row.key['setup']} are {row.figures['grad_rel_diff']:.1e} from those of eager.")
        rows.append(
            (
                str(row.key["setup"]),
                shown(row, "step_s", "{:,.1f}", 1e3),
                shown(row, "tokens_per_s", "{:,.0f}"),
                shown(row, "ratio", "{:.2f}x"),
                f"{quartiles[0]:.2f} - {quartiles[2]:.2f}" if quartiles else "",
                shown(row, "compile_s", "{:.1f}"),
                shown(row, "peak_mb", "{:,.0f}"),
            )
        )
    where = [texts[name] for name in ("device", "timing") if name in texts]
    size = f"{key['model']}, {key['size']}, batch {key['batch_size']}, labels {key['labels']}, loss {key['loss']}"
    columns = ("setup", "step ms", "tokens/s", "deepytorch is", "quartiles", "compile s", "peak MB")
    return Table(", ".join([size, str(key["precision"]), *where]), columns, tuple(rows), ("setup",), tuple(notes))


def _remarks(ours: Row, peak_mb_of_eager: float) -> list[str]:
    figures = ours.figures
    return [
        f"Real tokens: {figures['real_token_fraction']:.3f} of the positions, so dropping pads alone gives up to "
        f"{figures['token_ceiling']:.2f}x in token-wise work; {figures['labelled_fraction']:.2f} of the tokens are "
        "labelled.",
        f"Against eager: loss within {figures['loss_rel_diff']:.1e}, gradients within {figures['grad_rel_diff']:.1e} "
        f"(relative), peak memory x {figures['peak_mb'] / peak_mb_of_eager:.2f}.",
        f"Steps: {figures['steps_packed']:.0f} packed, {figures['steps_padded']:.0f} padded, "
        f"{figures['recompiles']:.0f} recompiles, {figures['host_ms']:.2f} ms of host work each.",
        f"Batches without any padding: {figures['no_padding_ratio']:.2f}x stock torch.compile.",
        *([f"Not measured: {ours.texts['not measured']}."] if "not measured" in ours.texts else []),
    ]
