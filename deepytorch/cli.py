"""The command line: `deepytorch demo`, `deepytorch bench unpad`, `deepytorch bench comm`, `deepytorch doctor`."""

from __future__ import annotations

import json
import sys
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from deepytorch.errors import ConfigError, DeepytorchError
from deepytorch.switch import SWITCH
from deepytorch.version import __version__

if TYPE_CHECKING:
    from deepytorch.bench.schema import UnpadResult

# torch takes seconds to import: commands import what they need, so that --help and --version answer at once.

app = typer.Typer(
    name="deepytorch",
    help="A training accelerator for PyTorch: torch.compile(model, backend='deepytorch').",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench = typer.Typer(help="Measure what deepytorch gains on this machine.", no_args_is_help=True)
app.add_typer(bench, name="bench")


class Model(str, Enum):
    """Families of Hugging Face models, made with random weights."""

    llama = "llama"
    qwen2 = "qwen2"
    gpt2 = "gpt2"
    bert = "bert"
    bart = "bart"
    t5 = "t5"


class ModelSize(str, Enum):
    """Widths and depths of those models, from one for tests to one of a billion weights."""

    tiny = "tiny"
    quarter = "quarter"
    demo = "demo"
    small = "small"
    base = "base"
    large = "large"


class Dtype(str, Enum):
    """fp32, or autocast to a lower one with fp32 weights."""

    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


class Compress(str, Enum):
    """What values may be cast to between hosts."""

    bf16 = "bf16"
    fp16 = "fp16"
    fp8 = "fp8"


class Lowering(str, Enum):
    """How the rewritten graph runs."""

    inductor = "inductor"
    aot_eager = "aot_eager"


class LabelsOf(str, Enum):
    """Which tokens are learned: the response's, as instruction tuning does, or the prompt's too."""

    response = "response"
    all = "all"


_Data = Annotated[
    Path | None, typer.Option("--data", help="JSON file in the Alpaca layout, in place of the embedded data set.")
]
_Model = Annotated[Model, typer.Option(help="Family of the model.")]
_SizeOf = Annotated[ModelSize, typer.Option("--size", help="Size of the model: base and large are for GPUs.")]
_BatchSize = Annotated[int, typer.Option(min=1, help="Rows in a batch.")]
_Device = Annotated[str, typer.Option(help="Where to run: cpu, cuda, cuda:1, ...")]
_DtypeOf = Annotated[Dtype, typer.Option(help="fp32, or autocast to a lower one with fp32 weights.")]


def main() -> None:
    """Run the command line; what deepytorch raises on purpose is one message and exit status 2, never a traceback."""
    SWITCH.enabled = False  # what is measured here says itself what is compiled
    try:
        app()
    except DeepytorchError as error:
        Console(stderr=True).print(f"[bold red]Error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(2)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"deepytorch {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Take the options that stand before a command."""


@app.command()
def demo(
    data: _Data = None,
    model: _Model = Model.llama,
    steps: Annotated[int, typer.Option(min=4, help="Training steps of each arm.")] = 50,
    batch_size: _BatchSize = 8,
    device: _Device = "cpu",
    dtype: _DtypeOf = Dtype.fp32,
    out: Annotated[Path, typer.Option(help="Folder for the plot.")] = Path("deepytorch-demo"),
) -> None:
    """Fine-tune a small random-weight model in eager, under stock torch.compile and under deepytorch, and compare.

    About 3 minutes on 2 cores. Exits with 2 when an arm fails or its losses leave eager's.
    """
    from deepytorch.demo import DemoOptions, run_demo

    console = Console()
    _quiet_transformers()
    options = DemoOptions(
        data=data,
        model=model.value,
        steps=steps,
        batch_size=batch_size,
        device=device,
        dtype=dtype.value,
        out=out,
    )
    run_demo(options, console)


@app.command(context_settings={"allow_interspersed_args": False})
def verify(
    command: Annotated[
        list[str], typer.Argument(metavar="SCRIPT [ARGS]", help="A training script as it is, and its arguments.")
    ],
    module: Annotated[bool, typer.Option("-m", help="SCRIPT is the name of a module, as for `python -m`.")] = False,
    steps: Annotated[int, typer.Option(min=1, help="Steps of its optimizers, after which it is ended.")] = 10,
    seed: Annotated[int, typer.Option(min=0, help="Of random, numpy and torch, set before the script starts.")] = 0,
    tolerance: Annotated[float, typer.Option(help="Relative difference that is allowed in any case.")] = 1e-4,
    timeout: Annotated[float, typer.Option(help="Seconds that each of the three processes may take.")] = 1800.0,
    lowering: Annotated[
        Lowering | None, typer.Option(help="Of what the import compiles; aot_eager leaves Inductor out.")
    ] = None,
    no_dropout: Annotated[bool, typer.Option("--no-dropout", help="Set every dropout to zero, in all runs.")] = False,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE|-", help="Write the result as one JSON object; -: to stdout.")
    ] = None,
) -> None:
    """Run a training script with the import and without, and compare losses, gradients and weights.

    In one process each, with the same seeds; a third run shows how sensitive eager itself is to rounding. Exits with 1
    where something differs or the script fails with the import only, with 2 where it fails without.
    """
    from deepytorch.verify.run import VerifyOptions
    from deepytorch.verify.show import verify_and_show

    options = VerifyOptions(
        command=tuple(command),
        is_module=module,
        steps=steps,
        seed=seed,
        tolerance=tolerance,
        timeout_s=timeout,
        lowering=None if lowering is None else lowering.value,
        dropout=not no_dropout,
    )
    raise typer.Exit(verify_and_show(options, Console(stderr=json_file == "-"), json_file))


@app.command()
def config() -> None:
    """Print every setting with its default and meaning, as Markdown: docs/configuration.md."""
    from deepytorch.reference import markdown

    typer.echo(markdown())


@bench.command()
def unpad(
    labels: Annotated[LabelsOf, typer.Option(help="Which tokens are learned.")] = LabelsOf.response,
    loss: Annotated[
        str,
        typer.Option(
            metavar="model|outside|everywhere",
            help="The model's own; a loop's, on the logits, with labels ignored at pads; one that counts pads.",
        ),
    ] = "model",
    data: _Data = None,
    model: _Model = Model.llama,
    size: _SizeOf = ModelSize.small,
    batch_size: _BatchSize = 8,
    steps: Annotated[int, typer.Option(min=1, help="Batches, each measured in every arm.")] = 8,
    rounds: Annotated[int, typer.Option(min=1, help="How often each batch is measured.")] = 3,
    dtype: _DtypeOf = Dtype.fp32,
    device: _Device = "cpu",
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE|-", help="Write the result as one JSON object; -: to stdout.")
    ] = None,
) -> None:
    """Compare steps with padding stripped to eager, to stock torch.compile and to packing by hand.

    The same batches go through every arm in alternation; losses and gradients are compared with eager's.
    """
    from deepytorch.bench.schema import write_result
    from deepytorch.bench.unpad import UnpadOptions, run_unpad

    console = Console(stderr=json_file == "-")  # stdout is then the JSON's alone
    _quiet_transformers()
    options = UnpadOptions(
        labels=labels.value,
        loss=loss,
        data=data,
        model=model.value,
        size=size.value,
        batch_size=batch_size,
        steps=steps,
        rounds=rounds,
        dtype=dtype.value,
        device=device,
    )
    with console.status("Starting") as status:
        result = run_unpad(options, notify=status.update)
    console.print(_unpad_table(result))
    if json_file == "-":
        typer.echo(json.dumps(result.to_json(), indent=2))
    elif json_file is not None:
        write_result(Path(json_file), result)


@bench.command()
def ddp(
    model: Annotated[str, typer.Option(help="resnet50, vgg16, alexnet, hf_Bert or llama.")] = "vgg16",
    size: Annotated[str, typer.Option(help="full: as published; cpu: a quarter of the width.")] = "cpu",
    batch_size: _BatchSize = 8,
    precision: Annotated[str, typer.Option(help="fp32, amp (autocast to bf16) or bf16 (weights too).")] = "fp32",
    arms: Annotated[
        str, typer.Option(metavar="LIST", help="ddp, ddp_compile, ddp_python_reducer, deepytorch.")
    ] = "ddp,ddp_compile,ddp_python_reducer,deepytorch",
    backend: Annotated[str, typer.Option(help="Group of the deepytorch arm: deepytorch or gloo.")] = "deepytorch",
    compress: Annotated[
        str | None, typer.Option(help="Cast gradients to bf16 or fp16 between hosts, in the deepytorch arm.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, or cuda under torchrun.")] = "cpu",
    data: Annotated[Path | None, typer.Option(help="Alpaca-layout file for llama. Default: library docs.")] = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Ranks of each host (default 2); under torchrun, those that it started.")
    ] = None,
    hosts: Annotated[int, typer.Option(min=1, help="Hosts; more than one are simulated by the lab, as root.")] = 1,
    rate: Annotated[str | None, typer.Option(help="Rate of each simulated host's link, such as 200mbit.")] = None,
    flow_rate: Annotated[str | None, typer.Option(help="Cap of each connection between simulated hosts.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often the arms take turns.")] = 5,
    steps: Annotated[int, typer.Option(min=1, help="Steps of an arm in a round.")] = 2,
    timeout: Annotated[float, typer.Option(help="Seconds without progress after which all ranks are ended.")] = 300.0,
    timeline: Annotated[
        Path | None, typer.Option(metavar="PNG", help="Draw one step of every arm; a Chrome trace goes beside it.")
    ] = None,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE|-", help="Write the result as one JSON object; -: to stdout.")
    ] = None,
) -> None:
    """Time a data-parallel step in stock DDP, compiled or not, and in deepytorch, and what of it is hidden.

    Seconds are of forward and backward, pooled over the ranks, in the line format of PyTorch's DDP benchmark. Starts
    the ranks itself, on this machine, and ends them however it ends; under torchrun it measures in place.
    """
    from deepytorch.bench import ddp as measuring
    from deepytorch.bench.comm import names, ranks_of_host, torchrun_shape

    shape = torchrun_shape()
    console = Console(stderr=json_file == "-")
    _quiet_transformers()
    options = measuring.DdpOptions(
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
    with console.status("Starting") as status:
        found = measuring.run_ddp if shape is None else measuring.run_ddp_in_place
        result = found(options, notify=status.update)
    if result is None:  # rank 0 shows what torchrun's ranks found
        return
    for arm in result.arms:
        console.print(measuring.line_of(arm, result.ranks, options.ranks), highlight=False, soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD, title="What overlap reaches", title_justify="left")
    for name in ("arm", "forward", "backward", "communication", "exposed", "efficiency", "gradients off by"):
        table.add_column(name, justify="left" if name == "arm" else "right")
    for arm in result.arms:
        seconds = (arm.forward_seconds, arm.backward_seconds, arm.comm_seconds, arm.exposed_comm_seconds)
        table.add_row(
            arm.name,
            *(f"{1e3 * value:.1f} ms" for value in seconds),
            f"{arm.overlap_efficiency:.2f}",
            f"{arm.max_grad_rel_diff:.1e}",
        )
    console.print(table)
    if json_file == "-":
        typer.echo(json.dumps(result.to_json(), indent=2))
    elif json_file is not None:
        measuring.write_ddp_result(Path(json_file), result)


@bench.command()
def sharded(
    size: Annotated[ModelSize, typer.Option(help="How large a Llama.")] = ModelSize.demo,
    batch_size: _BatchSize = 2,
    arms: Annotated[
        str, typer.Option(metavar="LIST", help="gloo, exact, int8, fp8; the first is what others are compared with.")
    ] = "exact,int8",
    data: Annotated[Path | None, typer.Option(help="Alpaca-layout file to learn from. Default: library docs.")] = None,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks of each host.")] = 2,
    hosts: Annotated[int, typer.Option(min=2, help="Hosts, simulated by the lab, as root.")] = 2,
    rate: Annotated[str, typer.Option(help="Rate of each simulated host's link.")] = "200mbit",
    steps: Annotated[int, typer.Option(min=3, help="Steps of each arm.")] = 100,
    timeout: Annotated[float, typer.Option(help="Seconds without progress after which all ranks are ended.")] = 300.0,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE|-", help="Write the result as one JSON object; -: to stdout.")
    ] = None,
) -> None:
    """Train a sharded Llama (FSDP2) with values rounded between hosts, beside exact ones: step time, and losses.

    The arms take turns step by step, on the same batches. Starts the ranks itself and ends them however it ends.
    """
    from deepytorch.bench import sharded as measuring
    from deepytorch.bench.comm import names

    console = Console(stderr=json_file == "-")
    _quiet_transformers()
    options = measuring.ShardedOptions(
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
    with console.status("Starting") as status:
        result = measuring.run_sharded(options, notify=status.update)
    title = f"FSDP2, Llama ({size.value}), {hosts} hosts of {ranks} ranks at {rate}, {steps} steps"
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    for name in ("arm", "step", f"against {result.arms[0].name}", "loss at the end", "of it"):
        table.add_column(name, justify="left" if name == "arm" else "right")
    for arm in result.arms:
        table.add_row(
            arm.name,
            f"{1e3 * arm.step_seconds:,.0f} ms",
            f"{arm.speedup:.2f}x",
            f"{arm.last_loss:.4f}",
            f"{arm.loss_ratio:.4f}",
        )
    console.print(table)
    console.print(f"The loss at the end is the mean over the last {measuring.LAST_LOSSES} steps and all ranks.")
    if json_file == "-":
        typer.echo(json.dumps(result.to_json(), indent=2))
    elif json_file is not None:
        measuring.write_sharded_result(Path(json_file), result)


@bench.command()
def hosts(
    hosts: Annotated[
        str, typer.Option(metavar="LIST", help="plain, ddp, fsdp2, trainer, accelerate, zero1, ..., or all.")
    ] = "all",
    models: Annotated[str, typer.Option(metavar="LIST", help="llama, bert, t5.")] = "llama,bert,t5",
    size: _SizeOf = ModelSize.demo,
    data: _Data = None,
    batch_size: _BatchSize = 8,
    max_length: Annotated[int, typer.Option(min=8, help="Tokens that longer rows are cut to.")] = 384,
    steps: Annotated[int, typer.Option(min=4, help="Training steps of each script.")] = 20,
    timeout: Annotated[float, typer.Option(help="Seconds that one script may take.")] = 900.0,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE|-", help="Write the result as one JSON object; -: to stdout.")
    ] = None,
    markdown: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the matrix as a page.")] = None,
) -> None:
    """Run the same script in every host of a training loop, with the import and without.

    Losses of every step are compared, each goes on from the other's checkpoint, and the median step is timed. CPU, two
    ranks where a host has ranks. Exits with 1 where a cell is neither green nor named.
    """
    from deepytorch.bench import hosts as measuring
    from deepytorch.bench.comm import names
    from deepytorch.bench.host_loops import HOSTS

    console = Console(stderr=json_file == "-")
    options = measuring.HostsOptions(
        hosts=tuple(HOSTS) if hosts == "all" else names(hosts),
        models=names(models),
        size=size.value,
        data=data,
        batch_size=batch_size,
        max_length=max_length,
        steps=steps,
        timeout_s=timeout,
    )
    with console.status("Starting") as status:
        for result in measuring.run_hosts(options, notify=status.update):  # an hour or more: files hold what there is
            console.print(measuring.line(result), highlight=False, markup=False, soft_wrap=True)
            if json_file is not None and json_file != "-":
                measuring.save(result, Path(json_file))
            if markdown is not None:
                measuring.write_markdown(result, markdown)
    console.print(measuring.table(result))
    for remark in measuring.remarks(result):
        console.print(remark, highlight=False, markup=False, soft_wrap=True)
    if json_file == "-":
        typer.echo(json.dumps(result.to_json(), indent=2))
    if any(not cell.green and not cell.named for cell in result.cells):
        raise typer.Exit(1)


@bench.command()
def comm(
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Ranks of each host (default 2); under torchrun, those that it started.")
    ] = None,
    hosts: Annotated[int, typer.Option(min=1, help="Hosts; more than one are simulated by the lab, as root.")] = 1,
    rate: Annotated[str | None, typer.Option(help="Rate of each simulated host's link, such as 200mbit.")] = None,
    flow_rate: Annotated[str | None, typer.Option(help="Cap of each connection between simulated hosts.")] = None,
    backends: Annotated[str, typer.Option(metavar="LIST", help="deepytorch, gloo.")] = "deepytorch,gloo",
    sizes: Annotated[
        str, typer.Option(metavar="FIRST:LAST[:FACTOR]|LIST", help="Sizes in bytes, with K, M or G.")
    ] = "1K:256M",
    dtype: Annotated[
        str, typer.Option(help="float32, bfloat16, float16, float64, int32, int64, int8 or uint8.")
    ] = "float32",
    op: Annotated[
        str,
        typer.Option(metavar="LIST", help="all_reduce, reduce_scatter, all_gather, broadcast, all_to_all, barrier."),
    ] = "all_reduce",
    redop: Annotated[str, typer.Option(help="sum, avg, min or max.")] = "sum",
    algorithms: Annotated[
        str, typer.Option(metavar="LIST", help="Algorithms of the deepytorch backend, one arm each; auto: it chooses.")
    ] = "auto",
    compress: Annotated[
        str, typer.Option(metavar="LIST", help="What it sends between hosts, one arm each: none, bf16, fp16.")
    ] = "none",
    allocated: Annotated[
        bool, typer.Option("--allocated", help="One more arm for each of those, with buffers from comm.allocate.")
    ] = False,
    rounds: Annotated[int, typer.Option(min=1, help="How often each cell is measured, in turn with the others.")] = 5,
    min_time_ms: Annotated[float, typer.Option(help="How long each cell is measured at least, in all rounds.")] = 100.0,
    timeout: Annotated[float, typer.Option(help="Seconds without progress after which all ranks are ended.")] = 300.0,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE|-", help="Write the result as one JSON object; -: to stdout.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw bandwidth over size.")] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show what the backend would choose and why, and measure nothing.")
    ] = False,
) -> None:
    """Time collectives over size, in the columns of nccl-tests, against gloo.

    Starts the ranks itself, on this machine, and ends them however it ends; under torchrun it measures in place. Exits
    with 2 when a rank fails or an element of a result is wrong.
    """
    from deepytorch.bench import comm as measuring
    from deepytorch.bench import comm_show as showing
    from deepytorch.bench.comm_schema import write_comm_result

    shape = measuring.torchrun_shape()
    options = measuring.CommOptions(
        ranks=measuring.ranks_of_host(ranks, hosts, shape),
        hosts=shape[1] if shape else hosts,
        rate=rate,
        flow_rate=flow_rate,
        backends=measuring.names(backends),
        sizes_bytes=measuring.parse_sizes(sizes),
        dtype=dtype,
        ops=measuring.names(op),
        redop=redop,
        algorithms=measuring.names(algorithms),
        compress=measuring.names(compress),
        allocated=allocated,
        rounds=rounds,
        min_time_ms=min_time_ms,
        timeout_s=timeout,
    )
    console = Console(stderr=json_file == "-")  # stdout is then the JSON's alone
    if explain:
        showing.explain_and_show(options, console, in_place=shape is not None)
        return
    result = showing.run_and_show(options, console, in_place=shape is not None)
    if result is None:  # rank 0 shows what torchrun's ranks found
        return
    if json_file == "-":
        typer.echo(json.dumps(result.to_json(), indent=2))
    elif json_file is not None:
        write_comm_result(Path(json_file), result)
    if plot is not None:
        showing.plot_result(plot, result)
    showing.refuse_wrong(result)


@app.command(context_settings={"allow_interspersed_args": False})
def lab(
    command: Annotated[
        list[str], typer.Argument(metavar="COMMAND", help="What each rank runs; a .py file runs in this Python.")
    ],
    hosts: Annotated[int, typer.Option(min=1, help="Simulated hosts.")] = 2,
    ranks: Annotated[int, typer.Option(min=1, help="Processes on each host.")] = 1,
    rate: Annotated[str, typer.Option(help="What a host may send, and receive: 200mbit, 1gbit.")] = "1gbit",
    flow_rate: Annotated[str | None, typer.Option(help="What one TCP connection may carry.")] = None,
    logs: Annotated[Path | None, typer.Option(help="Folder for each rank's output. Default: a new one.")] = None,
    timeout: Annotated[float | None, typer.Option(help="Seconds until all ranks are ended.")] = None,
) -> None:
    """Run a command on simulated hosts with slow links between them, as torchrun would. Needs Linux and root.

    The exit status is that of the first rank that fails, 124 after the timeout. Whatever was made is removed.
    """
    from deepytorch.bench.lab import LabOptions, run_lab

    options = LabOptions(hosts=hosts, ranks=ranks, rate=rate, flow_rate=flow_rate, logs=logs, timeout_s=timeout)
    raise typer.Exit(run_lab(options, command, Console()))


@app.command()
def simulate(
    topology: Annotated[Path, typer.Option(metavar="FILE", help="Hosts; see deepytorch doctor --topology --json.")],
    model_profile: Annotated[Path, typer.Option(metavar="FILE", help="Times and gradients of a step; see the docs.")],
    ranks: Annotated[
        str, typer.Option(metavar="LIST", help="Numbers of ranks; hosts are repeated to reach them.")
    ] = "8,64,1000",
    links: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Measured links of that topology. Default: assumed ones.")
    ] = None,
    compress: Annotated[
        Compress | None, typer.Option(help="What gradients may be cast to between hosts. Default: exact.")
    ] = None,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE|-", help="Write the result as one JSON object; -: to stdout.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw efficiency and timelines.")] = None,
) -> None:
    """Play a data-parallel step on a topology of any size: step time, exposed communication, scaling efficiency.

    Runs no ranks: compute comes from the profile, and collectives from the cost model of each algorithm.
    """
    from deepytorch.bench import simulate as playing
    from deepytorch.bench import simulate_show as showing
    from deepytorch.bench.model_profile import read_profile
    from deepytorch.comm.topology.cost import Links, read_links
    from deepytorch.comm.topology.topology import read_topology

    numbers = showing.parse_ranks(ranks)
    simulation = playing.simulate(
        read_profile(model_profile),
        read_topology(topology),
        Links() if links is None else read_links(links),
        numbers,
        None if compress is None else compress.value,
    )
    Console(stderr=json_file == "-").print(showing.step_table(simulation))
    if json_file == "-":
        typer.echo(json.dumps(simulation.to_json(), indent=2))
    elif json_file is not None:
        showing.write_simulation(Path(json_file), simulation)
    if plot is not None:
        showing.draw(plot, simulation)


@app.command()
def build() -> None:
    """Compile the native code of the process group now (about a minute), not when a first group is made."""
    from deepytorch.comm.group.native import build as build_native

    Console().print(f"compiled: {build_native()}", soft_wrap=True)


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    topology: Annotated[
        bool, typer.Option("--topology", help="Say in place of it what this host is made of: GPUs, links, network.")
    ] = False,
    file: Annotated[
        Path | None, typer.Option(help="With --topology: a topology file to show, as --json prints one.")
    ] = None,
    group: Annotated[
        int | None,
        typer.Option(metavar="PID", help="Say in place of it what the process groups of a running process do now."),
    ] = None,
) -> None:
    """Say which versions, devices and compilers are here, what is missing and how to get it."""
    if group is not None:
        from deepytorch.comm.group.recorder import read_groups

        for number, text in enumerate(read_groups(group)):
            typer.echo(f"{'' if number == 0 else chr(10)}group {number + 1} of process {group}, on this host")
            typer.echo(text)
        return
    if file is not None and not topology:
        raise ConfigError(f"--file {file} was given without --topology, which it belongs to. Add --topology.")
    if topology:
        from deepytorch.topology_view import collect_topology, render_topology

        shown = collect_topology(file)
        if as_json:
            typer.echo(json.dumps(shown.to_json(), indent=2))
        else:
            Console().print(render_topology(shown))
        return

    from deepytorch.doctor import collect, render

    found = collect()
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        Console().print(render(found))


def _quiet_transformers() -> None:
    """Keep transformers' advice about configurations out of the tables."""
    try:
        from transformers import logging
    except ImportError:
        return  # building a model says what to install
    logging.set_verbosity_error()


def _unpad_table(result: UnpadResult) -> Group:
    title = f"{result.model}, batch {result.batch_size}, {result.dtype}, {result.device}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE)
    table.add_column("arm", no_wrap=True)
    for heading in ("step ms", "deepytorch is", "quartiles", "compile s", "peak MB"):
        table.add_column(heading, justify="right")
    ratios = {
        "eager": result.ratio_vs_eager,
        "inductor": result.ratio_vs_inductor,
        "handpacked": result.ratio_vs_handpacked,
    }
    compile_seconds = {"inductor": result.compile_seconds_inductor, "deepytorch": result.compile_seconds}
    for arm, milliseconds in result.step_ms.items():
        ratio, quartiles = ratios.get(arm), result.ratio_quartiles.get(arm)
        table.add_row(
            arm,
            f"{milliseconds:,.1f}",
            f"{ratio:.2f}x" if ratio is not None else "",
            f"{quartiles[0]:.2f} - {quartiles[2]:.2f}" if quartiles is not None else "",
            f"{compile_seconds[arm]:.1f}" if arm in compile_seconds else "",
            f"{result.peak_bytes[arm] / 1e6:,.0f}" if arm in result.peak_bytes else "",
        )
    return Group(table, Text("\n".join(_unpad_lines(result))))


def _unpad_lines(result: UnpadResult) -> list[str]:
    return [
        f"Real tokens: {result.real_token_fraction:.3f} of the positions, so dropping pads alone gives up to "
        f"{result.token_ceiling:.2f}x in token-wise work; {result.labelled_fraction:.2f} of the tokens are labelled.",
        f"Against eager: loss within {result.max_loss_rel_diff:.1e}, gradients within {result.max_grad_rel_diff:.1e} "
        f"(relative), peak memory x {result.peak_memory_ratio_vs_eager:.2f}.",
        f"Steps: {result.steps_packed} packed, {result.steps_padded} padded, {result.recompiles} recompiles, "
        f"{result.host_ms_per_step:.2f} ms of host work each.",
        f"Batches without any padding: {result.ratio_no_padding:.2f}x stock torch.compile.",
    ]
