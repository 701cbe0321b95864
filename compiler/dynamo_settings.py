"""What Dynamo is set to so that models stay in one graph and are traced soon; `deepytorch.disable()` undoes it."""

from __future__ import annotations

import functools
import logging
from typing import Any

from deepytorch.config import Environment
from deepytorch.patches import patch
from deepytorch.torch_internals import dynamo_config, dynamo_metrics, dynamo_tracer


def prepare_dynamo() -> None:
    """Before a trace where that can be, for what it has cut stays cut; and again at each, since all of it may have been
    undone or set anew.
    """
    _keep_warnings_from_breaking_graphs()
    _keep_functions_out_of_metrics()
    _keep_data_parallel_models_whole()
    _read_sources_for_logs_that_are_on()


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


def _keep_functions_out_of_metrics() -> None:
    """Dynamo writes its settings into the metrics of a compile, as JSON, which has no functions; torch 2.11 tries, and
    logs an error for each compile. Such metrics go without settings.
    """
    try:
        original = dynamo_metrics._get_dynamo_config_for_logging
    except AttributeError:  # a torch that does it in another way is left as it is
        return

    @functools.wraps(original)
    def settings() -> str | None:
        try:
            return original()
        except TypeError:
            return None

    def undo() -> bool:
        if dynamo_metrics._get_dynamo_config_for_logging is not settings:
            return False
        dynamo_metrics._get_dynamo_config_for_logging = original
        return True

    patch(
        "torch._dynamo.utils._get_dynamo_config_for_logging",
        "log no error for functions that settings name",
        lambda: setattr(dynamo_metrics, "_get_dynamo_config_for_logging", settings),
        undo,
        always=True,
    )


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


def _read_sources_for_logs_that_are_on() -> None:
    """From Python 3.11 on Dynamo looks up in which function each line stands that it traces, and takes every source
    file apart for it, token by token: a sixth of the pause for a Llama of four layers. Two logs show what it finds,
    and both are off unless somebody asks for them.
    """
    try:
        original = dynamo_tracer.get_funcname
        logs = (dynamo_tracer.trace_call_log, dynamo_tracer.trace_source_log)
    except AttributeError:  # a torch that names functions in another way is left as it is
        return

    @functools.wraps(original)
    def get_funcname(*line: Any) -> Any:
        return original(*line) if any(log.isEnabledFor(logging.DEBUG) for log in logs) else None

    def undo() -> bool:
        if dynamo_tracer.get_funcname is not get_funcname:
            return False
        dynamo_tracer.get_funcname = original
        return True

    patch(
        "torch._dynamo.symbolic_convert.get_funcname",
        "read no source files for logs that are off",
        lambda: setattr(dynamo_tracer, "get_funcname", get_funcname),
        undo,
        always=True,
    )


prepare_dynamo()
