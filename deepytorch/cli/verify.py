"""`deepytorch verify`: a script with the import and without, compared."""

from __future__ import annotations

from typing import Annotated

import typer

from deepytorch.cli.options import JsonFile, Lowering
from deepytorch.cli.output import Output


def verify(
    command: Annotated[
        list[str], typer.Argument(metavar="SCRIPT [ARGS]", help="Your training script, unchanged, and its arguments.")
    ],
    module: Annotated[bool, typer.Option("-m", help="SCRIPT is a module's name, as for python -m.")] = False,
    steps: Annotated[
        int, typer.Option(min=1, help="End the script after so many optimizer steps, all of its optimizers together.")
    ] = 10,
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of random, numpy and torch, set before the script starts.")
    ] = 0,
    tolerance: Annotated[
        float,
        typer.Option(
            help="Relative difference that is always allowed. Ten times what rounding alone causes is allowed too."
        ),
    ] = 1e-4,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Time limit of each of the three runs.")] = 1800.0,
    lowering: Annotated[
        Lowering | None,
        typer.Option(
            help="What runs the compiled graphs: inductor; aot_eager, without Inductor; eager, "
            "without AOTAutograd either: the last two for debugging. Default: inductor."
        ),
    ] = None,
    no_dropout: Annotated[
        bool, typer.Option("--no-dropout", help="Set every dropout probability to zero, in all three runs.")
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """Run your training script with `import deepytorch` and without it; compare losses, gradients and weights.

    Each run is a process of its own with the same seeds. A third run, without the import and with every weight moved by
    its last bit, shows how much rounding alone changes. Exits with 1 if something differs or the script fails only with
    the import, with 2 if it fails without it.
    """
    from deepytorch.verify.records import VerifyOptions
    from deepytorch.verify.run import verify as run_verify
    from deepytorch.verify.show import show

    output = Output(json_file)
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
    verdict = output.watch(run_verify, options)
    show(verdict, output.console)
    output.json(verdict.to_json())
    raise typer.Exit(0 if verdict.agrees else 1)
