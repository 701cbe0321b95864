"""`deepytorch doctor`, `gpu-check`, `build` and `config`: this machine, and the settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from deepytorch.bench.table import print_table
from deepytorch.cli.options import JsonFile
from deepytorch.cli.output import Output
from deepytorch.errors import ConfigError


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, not tables.")] = False,
    topology: Annotated[
        bool,
        typer.Option(
            "--topology", help="Show instead what this machine is made of: GPUs, links between them, network."
        ),
    ] = False,
    file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="With --topology: show this file, written by --topology --json, not this machine."
        ),
    ] = None,
    group: Annotated[
        int | None,
        typer.Option(
            metavar="PID",
            help="Show instead what the deepytorch process groups of a running process are doing, by its process id.",
        ),
    ] = None,
) -> None:
    """Show versions, devices and compilers of this machine, what is missing, and how to get it.

    Also warns of versions that deepytorch was not tested with, and lists what the import has changed in torch.
    """
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


def gpu_check(
    device: Annotated[str, typer.Option(help="The GPU: cuda, cuda:1. cpu tries the checks themselves.")] = "cuda",
    quick: Annotated[bool, typer.Option("--quick", help="Only what is right and wrong, no figures.")] = False,
    budget: Annotated[
        float, typer.Option(min=1, metavar="SECONDS", help="Checks that are not over by then are left out.")
    ] = 480.0,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="GROUP", help="Make this group, subject (what stands before its colon) or GROUP/CHECK; repeatable."
        ),
    ] = None,
    results: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Take each outcome in, and leave out what passed there with the same sources, versions and GPU; what "
            "failed comes first. Default: docs/results/gpu-NAME.json in a source tree, else none.",
        ),
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Make also what passed before.")] = False,
    packages: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Wheels or packages of rivals, such as liger-kernel's. Default: none."),
    ] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Print the expected seconds, and make nothing.")] = False,
    page: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Make nothing but the tables of this page, from results beside it. Default: none."
        ),
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Check kernels, models, synchronisations and speed on this machine's GPU; what failed comes first.

    Needs no network. Each group of checks runs in a process of its own: a check that crashes or hangs is reported with
    the others. What is over when it is stopped is kept. Ends with status 1 if something failed.
    """
    from deepytorch.gpu_check import run as module
    from deepytorch.gpu_check.isolated import TOGETHER
    from deepytorch.gpu_check.outcome import Outcome
    from deepytorch.gpu_check.packages import packages_from
    from deepytorch.gpu_check.page import plan_table, report_table, rewrite

    output = Output(json_file)
    options = module.Options(device=device, quick=quick, seconds=budget, only=only or (), results=results, again=again)
    if page is not None:
        from deepytorch.gpu_check.checks import checks_on

        rewrite(page, checks_on("cuda"))
        return
    with packages_from(packages):
        if plan:
            expected, seconds = module.plan_of(options)
            print_table(output.console, plan_table(f"Checks on {device}", expected))
            output.line(f"{seconds:.0f} s are expected of {budget:.0f} s, {TOGETHER} groups at a time.")
            return
        work = module.work_of(options)
        found: list[Outcome] = []
        stopped = False
        try:
            output.watch(module.gpu_check, work, options, found.append)
        except KeyboardInterrupt:
            stopped = True
            output.line("Stopped: the same command goes on from here." if work.path else "Stopped.")
        print_table(output.console, report_table(f"Checks on {work.known.device}", module.failed_first(found)))
    failed = [each for each in found if each.passed is False]
    for each in failed:
        if "\n" in each.said:
            output.line(f"{each.group}, {each.name}:\n{each.said}")
    if work.num_known:
        output.line(f"{work.num_known} checks passed before, with the same sources and versions: not made again.")
    output.json(module.gathered(work, found).to_json())
    if stopped or failed:
        raise typer.Exit(130 if stopped else 1)


def build() -> None:
    """Compile the C++ code of the deepytorch process group and of attention on a CPU now, ahead of a first script.

    This takes most of a minute on two cores, once for each version of torch. The cache folder keeps the compiled code.
    """
    from deepytorch.comm.group.native import native as collectives
    from deepytorch.passes.ops.native import can_run
    from deepytorch.passes.ops.native import native as operators

    for extension in (collectives, operators) if can_run() else (collectives,):
        Console().print(f"compiled: {extension.build()}", soft_wrap=True)


def config() -> None:
    """Print every setting with its default and meaning, as Markdown."""
    from deepytorch.reference import markdown

    typer.echo(markdown())
