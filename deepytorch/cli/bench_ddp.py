"""`deepytorch bench ddp`: data-parallel steps, stock and ours."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deepytorch.cli.options import BatchSizeOfRank, FlowRate, Hosts, JsonFile, RanksOfHost, Rate, StallTimeout
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
    from deepytorch.bench.comm import ranks_of_host, torchrun_shape
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
