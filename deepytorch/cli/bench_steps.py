"""`deepytorch bench unpad`, `epoch` and `loss`: steps of one process, and parts of steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from deepytorch.cli.options import (
    BatchSize,
    Data,
    Device,
    DtypeOf,
    JsonFile,
    Labels,
    LabelsOf,
    Model,
    ModelFamily,
    ModelSize,
    RoundsOfBatch,
    SizeOf,
    dtype_of,
)
from deepytorch.cli.output import Output

if TYPE_CHECKING:
    from deepytorch.bench.schema import UnpadResult


def unpad(
    labels: Labels = LabelsOf.response,
    loss: Annotated[
        str,
        typer.Option(
            metavar="model|outside|everywhere",
            help="model: the loss that the model returns. outside: cross entropy of its logits, with labels ignored at "
            "padding. everywhere: the same, with labels at padding too.",
        ),
    ] = "model",
    data: Data = None,
    model: ModelFamily = Model.llama,
    size: SizeOf = ModelSize.small,
    batch_size: BatchSize = 8,
    steps: Annotated[int, typer.Option(min=1, help="Number of batches; each is timed in every setup.")] = 8,
    rounds: RoundsOfBatch = 3,
    dtype: DtypeOf = "fp32",
    weights: Annotated[
        str,
        typer.Option(
            parser=dtype_of,
            metavar="fp32|bf16|fp16",
            help="What weights are kept in: fp32, or the same as --dtype, then without autocast.",
        ),
    ] = "fp32",
    vocab_size: Annotated[
        int, typer.Option(min=400, help="Rows of the embedding and of the head; 128256 is that of Llama 3.")
    ] = 8192,
    back_to_back: Annotated[
        bool | None,
        typer.Option(
            "--back-to-back/--one-by-one",
            help="Time whole passes of training steps, the optimizer in them, without a wait in between; or each step "
            "without an optimizer, for itself. Default: back to back on a CUDA device.",
        ),
    ] = None,
    device: Device = "cpu",
    json_file: JsonFile = None,
) -> None:
    """Time training steps without padding against eager mode, stock torch.compile and hand-packed batches.

    Hand-packed: the rows of a batch laid end to end, without padding, by the script itself, for causal models. The
    setups take turns on the same batches, and their losses and gradients are compared with those of eager mode. Back to
    back, stock torch.compile on batches of rows of like lengths runs beside, and where flash-attn and liger-kernel are
    installed, transformers' flattening collator with both.
    """
    from deepytorch.bench.unpad import UnpadOptions, run_unpad

    output = Output(json_file)
    options = UnpadOptions(
        labels=labels.value,
        loss=loss,
        data=data,
        model=model.value,
        size=size.value,
        batch_size=batch_size,
        steps=steps,
        rounds=rounds,
        dtype=dtype,
        weights=weights,
        vocab_size=vocab_size,
        back_to_back=back_to_back,
        device=device,
    )
    result = output.watch(run_unpad, options)
    title = f"{result.model}, batch {result.batch_size}, {result.dtype}, {result.device}, steps {result.timing}"
    columns = ("arm", "step ms", "tokens/s", "deepytorch is", "quartiles", "compile s", "peak MB")
    output.table(title, columns, _rows(result), left=("arm",))
    output.console.print("\n".join(_remarks(result)), highlight=False, markup=False)
    output.json(result.to_json())


def _rows(result: UnpadResult) -> list[list[str]]:
    ratios = {
        "eager": result.ratio_vs_eager,
        "inductor": result.ratio_vs_inductor,
        "handpacked": result.ratio_vs_handpacked,
        "grouped": result.ratio_vs_grouped,
        "flattened": result.ratio_vs_flattened,
    }
    compile_seconds = {"inductor": result.compile_seconds_inductor, "deepytorch": result.compile_seconds}
    rows = []
    for arm, milliseconds in result.step_ms.items():
        ratio, quartiles = ratios.get(arm), result.ratio_quartiles.get(arm)
        rows.append(
            [
                arm,
                f"{milliseconds:,.1f}",
                f"{result.tokens_per_s[arm]:,.0f}" if arm in result.tokens_per_s else "",
                f"{ratio:.2f}x" if ratio is not None else "",
                f"{quartiles[0]:.2f} - {quartiles[2]:.2f}" if quartiles is not None else "",
                f"{compile_seconds[arm]:.1f}" if arm in compile_seconds else "",
                f"{result.peak_bytes[arm] / 1e6:,.0f}" if arm in result.peak_bytes else "",
            ]
        )
    return rows


def _remarks(result: UnpadResult) -> list[str]:
    return [
        f"Real tokens: {result.real_token_fraction:.3f} of the positions, so dropping pads alone gives up to "
        f"{result.token_ceiling:.2f}x in token-wise work; {result.labelled_fraction:.2f} of the tokens are labelled.",
        f"Against eager: loss within {result.max_loss_rel_diff:.1e}, gradients within {result.max_grad_rel_diff:.1e} "
        f"(relative), peak memory x {result.peak_memory_ratio_vs_eager:.2f}.",
        f"Steps: {result.steps_packed} packed, {result.steps_padded} padded, {result.recompiles} recompiles, "
        f"{result.host_ms_per_step:.2f} ms of host work each.",
        f"Batches without any padding: {result.ratio_no_padding:.2f}x stock torch.compile.",
        *(f"Not measured: {arm}, {reason}." for arm, reason in result.not_run.items()),
    ]


def epoch(
    labels: Labels = LabelsOf.response,
    data: Data = None,
    model: ModelFamily = Model.llama,
    size: SizeOf = ModelSize.small,
    batch_size: BatchSize = 8,
    rows: Annotated[int, typer.Option(min=1, help="Rows of the epoch that batches are taken from.")] = 3200,
    steps: Annotated[int, typer.Option(min=1, help="Batches that are timed, spread evenly over the epoch.")] = 32,
    rounds: RoundsOfBatch = 3,
    dtype: DtypeOf = "fp32",
    device: Device = "cpu",
    json_file: JsonFile = None,
) -> None:
    """Time training over an epoch, rows in random order and grouped by length as Trainer's group_by_length does.

    Each setup trains its own model with AdamW; what counts is real tokens a second, without padding.
    """
    from deepytorch.bench.epoch import EpochOptions, run_epoch

    output = Output(json_file)
    options = EpochOptions(
        model=model.value,
        size=size.value,
        labels=labels.value,
        data=data,
        rows=rows,
        batch_size=batch_size,
        steps=steps,
        rounds=rounds,
        dtype=dtype,
        device=device,
    )
    result = output.watch(run_epoch, options)
    title = (
        f"{result.model}, batch {result.batch_size}, {result.dtype}, {result.device}: an epoch of {result.rows} rows"
    )
    words = ("compiled by", "rows in order of")
    rows_of_arms = [
        (
            arm.backend,
            arm.order,
            f"{arm.tokens_per_s:,.0f}",
            f"{arm.ratio:.2f}x",
            f"{100 * arm.real_token_fraction:.0f} %",
        )
        for arm in result.arms
    ]
    output.table(title, (*words, "real tokens/s", "ratio", "real tokens"), rows_of_arms, left=words)
    output.json(result.to_json())


def loss(
    rows: Annotated[int, typer.Option(min=1, help="Tokens.")] = 4096,
    hidden_size: Annotated[int, typer.Option(min=1, help="Width of the hidden states.")] = 256,
    vocab_size: Annotated[int, typer.Option(min=2, help="Classes; 128256 are those of Llama 3.")] = 128_256,
    ignored: Annotated[float, typer.Option(min=0.0, max=0.99, help="Fraction of the tokens that have no label.")] = 0.0,
    dtype: Annotated[
        str, typer.Option(parser=dtype_of, metavar="fp32|bf16|fp16", help="Of hidden states and weight.")
    ] = "fp32",
    device: Device = "cpu",
    rounds: Annotated[int, typer.Option(min=1, help="How often each setup is timed.")] = 3,
    json_file: JsonFile = None,
) -> None:
    """Time a language model's head and its loss, forward and backward, and what memory they take.

    In eager, compiled by Inductor, and in deepytorch's operator, which holds the logits in pieces.
    """
    from deepytorch.bench.linear_loss import LossOptions, run_loss

    output = Output(json_file)
    options = LossOptions(
        rows=rows,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        ignored=ignored,
        dtype=dtype,
        device=device,
        rounds=rounds,
    )
    result = output.watch(run_loss, options)
    title = (
        f"Linear and cross-entropy, {rows} x {hidden_size} x {vocab_size}, {100 * ignored:.0f} % ignored, "
        f"{dtype}, {result.device}; gradients {result.gradients_mb:,.0f} MiB"
    )
    rows_of_arms = [
        (
            arm.name,
            f"{1e3 * arm.seconds:,.1f}",
            f"{arm.time_ratio:.2f}",
            f"{arm.peak_mb:,.0f}",
            "-" if arm.memory_ratio is None else f"{arm.memory_ratio:.2f}",
            f"{arm.loss:.5f}",
        )
        for arm in result.arms
    ]
    output.table(title, ("", "ms", "of eager's", "peak, MiB", "of eager's", "loss"), rows_of_arms, left=("",))
    output.json(result.to_json())
