"""Settings of Dynamo that keep models in one graph and make traces short; `deepytorch.disable()` undoes them."""

from __future__ import annotations

import functools
import logging
from typing import Any

from deepytorch.config import Environment
from deepytorch.patches import patch
from deepytorch.torch_internals import dynamo_config, dynamo_metrics, dynamo_tracer


def prepare_dynamo() -> None:
    """Set up Dynamo for our traces.

    To be called before the first trace if possible, since a graph that is cut stays cut; and again at each trace, since
    the settings may have been undone or changed.
    """
    _keep_warnings_from_breaking_graphs()
    _keep_functions_out_of_metrics()
    _keep_data_parallel_models_whole()
    _read_sources_for_logs_that_are_on()


def _keep_warnings_from_breaking_graphs() -> None:
    """Leave `Logger.warning_once` of Transformers out of compiled code, by Dynamo's setting for such functions.

    Dynamo cannot trace this method, so that it would cut a model in two at its loss (GPT-2). The method comes with the
    import of transformers, which may follow ours; a trace that was cut already is started over.
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
    leave_out()  # the user may have changed the setting since


def _keep_functions_out_of_metrics() -> None:
    """Leave settings that name functions out of Dynamo's metrics.

    Dynamo writes its settings into the metrics of a compile as JSON, which has no functions; torch 2.11 tries anyway,
    and logs an error for each compile.
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
    """Keep Dynamo from cutting a DistributedDataParallel model at the buckets of DDP's reducer, as it does by default.

    The cuts are for overlap, which our own reduction has within one graph. Dynamo looks at the setting before it calls
    a backend. Another choice of the user ("python_reducer", "no_optimization") stays.
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
    """Read no source files for logs that are off.

    From Python 3.11 on Dynamo looks up the function of each line that it traces, and takes every source file apart for
    that, token by token: a sixth of the pause for a Llama of four layers. Two logs show the functions, and both are off
    unless somebody asks for them.
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
