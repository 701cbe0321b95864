"""What Dynamo is set to so that models stay in one graph; `deepytorch.disable()` undoes it."""

from __future__ import annotations

import logging
from typing import Any

from deepytorch.config import Environment
from deepytorch.patches import patch
from deepytorch.torch_internals import dynamo_config


def prepare_dynamo() -> None:
    """Before a trace where that can be, for what it has cut stays cut; and again at each, since all of it may have been
    undone or set anew.
    """
    _keep_warnings_from_breaking_graphs()
    _keep_data_parallel_models_whole()


def _keep_warnings_from_breaking_graphs() -> None:
    """Transformers warns once through a logger method that Dynamo cannot trace, and that would cut a model in two at
    its loss (GPT-2). Dynamo has a setting for such functions: the call is left out of compiled code. The method comes
    with the import of transformers, which may follow ours; a trace that it has cut already is started over.
    """
    warning_once = getattr(logging.Logger, "warning_once", None)
    if warning_once is None:
        return

    def ignored() -> set[Any]:
        return dynamo_config.ignore_logging_functions

    def leave_out() -> None:
        ignored().add(warning_once)

    patch(
        "torch._dynamo.config.ignore_logging_functions",
        "leave Logger.warning_once, which would cut graphs, out of compiled code",
        leave_out,
        lambda: ignored().discard(warning_once),
        always=True,
    )
    leave_out()  # the user may have set it anew since


def _keep_data_parallel_models_whole() -> None:
    """By default Dynamo cuts a DistributedDataParallel model at the buckets of DDP's reducer, for the overlap that our
    own reduction has in one graph. It looks at this before it calls a backend. What the user
    chose otherwise ("python_reducer", "no_optimization") stays.
    """
    chosen = dynamo_config.optimize_ddp
    if not Environment.read().enabled or chosen not in (True, "ddp_optimizer"):
        return

    def undo() -> None:
        if dynamo_config.optimize_ddp is False:  # else the user has chosen anew
            dynamo_config.optimize_ddp = chosen

    patch(
        "torch._dynamo.config.optimize_ddp",
        "keep data-parallel models in one graph, in which their gradients are reduced",
        lambda: setattr(dynamo_config, "optimize_ddp", False),
        undo,
        always=True,
    )


prepare_dynamo()
