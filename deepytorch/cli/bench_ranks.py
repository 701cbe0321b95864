"""`deepytorch bench ddp` and `sharded`: several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deepytorch.cli.options import (
    BatchSizeOfRank,
    Data,
    FlowRate,
    Hosts,
    JsonFile,
    ModelSize,
    RanksOfHost,
    Rate,
    SizeOf,
    StallTimeout,
)
from deepytorch.cli.output import Output


def ddp(
    model: Annotated[
        str, typer.Option(metavar="NAME", help="resnet50, vgg16, alexnet, hf_Bert or llama; weights are random.")
    ] = "vgg16",
    size: Annotated[
        str, typer.Option(metavar="cpu|full", help="full: as published; cpu: a quarter of that width.")
    ] = "cpu",
    batch_size: BatchSizeOfRank = 8,
    precision: Annotated[
        str, typer.Option(metavar="fp32|amp|bf16", help="amp: autocast to bf16, weights in fp32; bf16: weights too.")
    ] = "fp32",
    arms: Annotated[
        str,
        typer.Option(
            metavar="LIST",
            help="What to compare, with commas. ddp: eager DDP. ddp_compile: DDP under torch.compile. "
            "ddp_python_reducer: the same, with the gradient reduction traced too. deepytorch: DDP with deepytorch.",
        ),
    ] = "ddp,ddp_compile,ddp_python_reducer,deepytorch",
    backend: Annotated[
        str,
        typer.Option(
            metavar="deepytorch|gloo",
            help="Process group that deepytorch runs on; stock DDP has gloo, or nccl on GPUs.",
        ),
    ] = "deepytorch",
    compress: Annotated[
        str | None,
        typer.Option(
            metavar="bf16|fp16", help="Cast gradients to this type between hosts, with deepytorch only. Default: none."
        ),
    ] = None,
    device: Annotated[str, typer.Option(metavar="cpu|cuda", help="Where to run; cuda needs torchrun.")] = "cpu",
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="With --model llama: JSON file of texts, laid out as Stanford Alpaca's. Default: the docstrings of "
            "Python's standard library and of torch. Other models have random batches.",
        ),
    ] = None,
    ranks: RanksOfHost = None,
    hosts: Hosts = 1,
    rate: Rate = None,
    flow_rate: FlowRate = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often each of them is timed, in turn with the others.")] = 5,
    steps: Annotated[int, typer.Option(min=1, help="Training steps in each turn.")] = 2,
    timeout: StallTimeout = 300.0,
    timeline: Annotated[
        Path | None,
        typer.Option(metavar="PNG", help="Draw one step of each as a picture; a Chrome trace (.json) goes beside it."),
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Time data-parallel training steps in stock DDP and with deepytorch, and the communication that stays visible.

    Seconds are of forward and backward, over all ranks, printed as PyTorch's own DDP benchmark prints them. Starts its
    ranks on this machine and ends them; under torchrun it runs on the ranks that are there.
    """
    from deepytorch.bench.rank_process import ranks_of_host, torchrun_shape
    from deepytorch.bench.ddp import line_of, run_ddp, run_ddp_in_place
    from deepytorch.bench.ddp_worker import DdpOptions
    from deepytorch.bench.options import names

    shape = torchrun_shape()
    output = Output(json_file)
    options = DdpOptions(
        model=model,
        size=size,
        batch_size=batch_size,
        precision=precision,
        arms=names(arms),
        backend=backend,
        compress=compress,
        device=device,
        data=data,
        ranks=ranks_of_host(ranks, hosts, shape),
        hosts=hosts if shape is None else shape[1],
        rate=rate,
        flow_rate=flow_rate,
        rounds=rounds,
        steps=steps,
        timeout_s=timeout,
        timeline=timeline,
    )
    result = output.watch(run_ddp if shape is None else run_ddp_in_place, options)
    if result is None:  # under torchrun rank 0 shows the result
        return
    for arm in result.arms:
        output.line(line_of(arm, result.ranks, options.ranks))
    columns = ("arm", "forward", "backward", "communication", "exposed", "efficiency", "gradients off by")
    rows = []
    for arm in result.arms:
        seconds = (arm.forward_seconds, arm.backward_seconds, arm.comm_seconds, arm.exposed_comm_seconds)
        shown = [f"{1e3 * value:.1f} ms" for value in seconds]
        rows.append([arm.name, *shown, f"{arm.overlap_efficiency:.2f}", f"{arm.max_grad_rel_diff:.1e}"])
    output.table("What overlap reaches", columns, rows, left=("arm",))
    output.json(result.to_json())


def sharded(
    size: SizeOf = ModelSize.demo,
    batch_size: BatchSizeOfRank = 2,
    arms: Annotated[
        str,
        typer.Option(
            metavar="LIST",
            help="What to compare, with commas. gloo: the stock process group. exact: deepytorch's, values as they "
            "are. int8, fp8: deepytorch's, values rounded to 8 bits between hosts. The first is what the others are "
            "compared with.",
        ),
    ] = "exact,int8",
    data: Data = None,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks (processes) on each host.")] = 2,
    hosts: Annotated[
        int, typer.Option(min=2, help="Hosts (machines), simulated on this one, which needs root: see deepytorch lab.")
    ] = 2,
    rate: Annotated[
        str, typer.Option(metavar="RATE", help="Bits per second that each host may send, and receive: 200mbit, 1gbit.")
    ] = "200mbit",
    steps: Annotated[int, typer.Option(min=3, help="Training steps of each.")] = 100,
    timeout: StallTimeout = 300.0,
    json_file: JsonFile = None,
) -> None:
    """Train a sharded Llama (FSDP2) with weights and gradients rounded between hosts; compare step time and losses.

    The runs take turns step by step, on the same batches. Starts its ranks on simulated hosts and ends them.
    """
    from deepytorch.bench.options import names
    from deepytorch.bench.sharded import LAST_LOSSES, run_sharded
    from deepytorch.bench.sharded_worker import ShardedOptions

    output = Output(json_file)
    options = ShardedOptions(
        size=size.value,
        batch_size=batch_size,
        arms=names(arms),
        data=data,
        ranks=ranks,
        hosts=hosts,
        rate=rate,
        steps=steps,
        timeout_s=timeout,
    )
    result = output.watch(run_sharded, options)
    title = f"FSDP2, Llama ({size.value}), {hosts} hosts of {ranks} ranks at {rate}, {steps} steps"
    columns = ("arm", "step", f"against {result.arms[0].name}", "loss at the end", "of it")
    rows = [
        (
            arm.name,
            f"{1e3 * arm.step_seconds:,.0f} ms",
            f"{arm.speedup:.2f}x",
            f"{arm.last_loss:.4f}",
            f"{arm.loss_ratio:.4f}",
        )
        for arm in result.arms
    ]
    output.table(title, columns, rows, left=("arm",))
    output.line(f"The loss at the end is the mean over the last {LAST_LOSSES} steps and all ranks.")
    output.json(result.to_json())
