"""`deepytorch bench unpad`: the gain of stripping padding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from deepytorch.cli.options import (
    BatchSize,
    Data,
    Device,
    DtypeOf,
    JsonFile,
    LabelsOf,
    Model,
    ModelFamily,
    ModelSize,
    SizeOf,
    dtype_of,
)
from deepytorch.cli.output import Output

if TYPE_CHECKING:
    from deepytorch.bench.schema import UnpadResult


def unpad(
    labels: Annotated[
        LabelsOf, typer.Option(help="Which tokens have labels: those of the response, or of the instruction too.")
    ] = LabelsOf.response,
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
    rounds: Annotated[int, typer.Option(min=1, help="How often each batch is timed in each setup.")] = 3,
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


def _rows(result: UnpadResult) -> list[tuple[str, ...]]:
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
            (
                arm,
                f"{milliseconds:,.1f}",
                f"{result.tokens_per_s[arm]:,.0f}" if arm in result.tokens_per_s else "",
                f"{ratio:.2f}x" if ratio is not None else "",
                f"{quartiles[0]:.2f} - {quartiles[2]:.2f}" if quartiles is not None else "",
                f"{compile_seconds[arm]:.1f}" if arm in compile_seconds else "",
                f"{result.peak_bytes[arm] / 1e6:,.0f}" if arm in result.peak_bytes else "",
            )
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
