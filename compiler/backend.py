"""What `torch.compile(model, backend="deepytorch")` calls with every graph of Dynamo's."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx
from torch._dynamo.exc import TensorifyScalarRestartAnalysis
from torch._guards import CompileContext

from deepytorch.compiler.capture import Untraceable, capture
from deepytorch.compiler.config import CompilerConfig
from deepytorch.compiler.data_parallel import Adopted, active, adopt
from deepytorch.compiler.dynamic_sizes import Trace, restart_as_stock, which_trace
from deepytorch.compiler.graph_per_parameters import GraphPerParameters
from deepytorch.compiler.lower import GraphPasses, lower
from deepytorch.compiler.manager import PassRun, copied, run_passes
from deepytorch.compiler.pipeline import passes_for
from deepytorch.compiler.plan import Plan
from deepytorch.compiler.report import LEDGER, RegionRecord
from deepytorch.compiler.runtime import Effects, RewrittenStep, Step
from deepytorch.compiler.second_backward import TwiceDifferentiable, unread_statistics
from deepytorch.compiler.unused_outputs import parts_in_outputs
from deepytorch.config import Environment
from deepytorch.log import logger, once
from deepytorch.passes.base import Context
from deepytorch.passes.reduce_gradients import ReduceGradients
from deepytorch.passes.slicing import Slicer
from deepytorch.passes.unpad.program import Program
from deepytorch.passes.unpad.rules import is_random
from deepytorch.patches import patch

# Options of Inductor's that move what is in a graph, off where gradients are reduced in it. The first puts them off to
# the end, for the memory that they take, and then they leave late; the second (torch 2.14) moves torch's collectives
# past ours, and ranks that send in other orders wait for each other without end.
_MOVERS = ("reorder_for_peak_memory", "aten_distributed_optimizations.enable_simple_overlap")

# Set while `deepytorch.explain` looks at a model: regions are analysed and run in eager, nothing is lowered.
EXPLAINING: ContextVar[list[RegionRecord] | None] = ContextVar("deepytorch_explaining", default=None)


def deepytorch_backend(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Callable[..., Any]:
    """Compile one graph of Dynamo's. `mode` and `options` are those of `torch.compile`, see `CompilerConfig`.

    Raises `ConfigError` for an option that is not known. Whatever else goes wrong while compiling leaves the region
    as stock would have compiled it, or in eager if that fails too, and is logged once.
    """
    _keep_warnings_from_breaking_graphs()
    _keep_data_parallel_models_whole()  # `disable()` has undone it, if it was called
    config = CompilerConfig.parse(mode, options, kwargs)
    if not Environment.read().enabled:
        config = replace(config, unpad=False, reduce_gradients=False)
    if not config.unpad or not _may_have_attention(module):
        reason = "nothing to pack: no attention in this graph" if config.unpad else "stripping padding is switched off"
        return _lower_whole(module, example_inputs, config, _record(config, reason))
    if _is_packed(module):
        reason = "nothing to pack: the model's batches are packed before they come here"
        return _lower_whole(module, example_inputs, config, _record(config, reason))
    trace, reasons = which_trace(module, example_inputs)
    if trace is Trace.DECLINED:
        return _lower_whole(module, example_inputs, config, _record(config, *reasons))
    try:
        with _saving_for_nobody():
            return _compile(module, example_inputs, config, trace)
    except TensorifyScalarRestartAnalysis:
        raise
    except Untraceable as untraceable:
        reason = str(untraceable).partition("\n")[0]  # the interpreter adds where it was
        if trace is Trace.MARKED and EXPLAINING.get() is None:
            restart_as_stock(module, example_inputs, [reason])
        return _lower_whole(module, example_inputs, config, _record(config, reason))
    except Exception as error:
        once(logging.WARNING, "a region could not be analysed (%s: %s); stock compiles it", type(error).__name__, error)
        logger.debug("traceback of the failure", exc_info=True)
        return _lower_whole(module, example_inputs, config, _record(config, f"{type(error).__name__}: {error}"))


def _saving_for_nobody() -> Any:
    """Inside, what a trace saves for a backward is not counted by whoever counts it, such as a checkpoint around us."""
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


def _compile(
    module: fx.GraphModule, example_inputs: Sequence[Any], config: CompilerConfig, trace: Trace
) -> Callable[..., Any]:
    record = RegionRecord(_region_name(), "declined", config.lowering)
    captured = capture(module, example_inputs)
    fakes = [node.meta["val"] for node in captured.module.graph.nodes if node.op == "placeholder"]
    effects = _effects(captured.module.graph)
    reason = getattr(module, "compile_subgraph_reason", None)
    context = Context(captured.shape_env, bool(getattr(reason, "graph_break", False)))
    plan = Plan.initial("region", config)
    found = run_passes(captured.module, passes_for(plan), context, dump_dir=config.dump_graphs)
    _describe(record, found.runs, plan)
    explaining = EXPLAINING.get()
    if explaining is not None:
        return _explain(module, found.program, record, explaining)
    if not found.fired:
        if trace is Trace.MARKED:
            restart_as_stock(module, example_inputs, record.declined)
        return _lower_whole(module, example_inputs, config, record)
    record.outcome = "rewritten" if found.program is None else "packed"
    record.recompiles += _is_recompilation()
    LEDGER.open(record)
    adopted, environment = _adopt(config, record), Environment.read()
    lowering = partial(_lower, config=config, plan=plan, adopted=adopted)
    if found.program is None or found.before is None:
        return RewrittenStep(
            captured.module, fakes, module.forward, lowering, record, effects, leaves_unused=adopted is None
        )
    return Step(
        padded=found.before,
        packed=captured.module,
        program=found.program,
        inputs=captured.inputs,
        fakes=fakes,
        eager=module.forward,
        lower=lowering,
        record=record,
        effects=effects,
        min_padding=config.min_padding,
        zero_outputs=config.outputs == "zeros",
        leaves_unused=adopted is None,
        verify_every=environment.verify_every if environment.verify else None,
    )


def _effects(graph: fx.Graph) -> Effects:
    number = {node: index for index, node in enumerate(node for node in graph.nodes if node.op == "placeholder")}
    written = tuple(number[node] for node in Slicer(graph).written_inputs())
    return Effects(written, draws=any(is_random(node) and not _keeps_all(node) for node in graph.nodes))


def _keeps_all(node: fx.Node) -> bool:
    """Whether this is an attention without dropout, whose operator could draw."""
    if node.target is not torch.ops.aten.scaled_dot_product_attention.default:
        return False
    return (node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)) == 0.0


def _lower_whole(
    module: fx.GraphModule, example_inputs: Sequence[Any], config: CompilerConfig, record: RegionRecord
) -> Callable[..., Any]:
    """Compile a region as it is, as stock would; in eager if that fails."""
    explaining = EXPLAINING.get()
    if explaining is not None:
        explaining.append(record)
        return module.forward
    record.recompiles += _is_recompilation()
    LEDGER.open(record)
    record.compiles += 1
    started = time.perf_counter()
    copy = copied(module)  # lowering may change the module
    eager, unread = copy.forward, unread_statistics(module.graph)
    try:
        adopted = _adopt(config, record)
        plan = Plan.initial("region", config)
        compiled = _lower(module, example_inputs, config=config, plan=plan, adopted=adopted)
        parts = parts_in_outputs(copy.graph) if adopted is None else None
        return TwiceDifferentiable(compiled, eager, unread, partial(_asked_twice, record), parts)
    except (TensorifyScalarRestartAnalysis, torch.OutOfMemoryError):
        raise
    except Exception as error:
        message = f"{record.name}: compiling failed with {type(error).__name__}: {str(error)[:500]}"
        record.outcome = "eager"
        record.fallbacks.append(message)
        once(logging.WARNING, "%s; the region runs in eager", message)
        return module.forward
    finally:
        record.compile_seconds += time.perf_counter() - started


def _asked_twice(record: RegionRecord, what: str) -> None:
    """A region's backward was asked for what only eager gives."""
    record.fallbacks.append(f"{record.name}: a backward with {what}; the region runs in eager")
    once(
        logging.INFO,
        "a backward with %s, which compiled code cannot do: what it went through runs in eager from now on",
        what,
    )


def _adopt(config: CompilerConfig, record: RegionRecord) -> Adopted | None:
    """The gradients of the data-parallel module around this region, if they are ours to reduce."""
    ddp = active() if config.reduce_gradients else None
    if ddp is None or torch.distributed.get_world_size(ddp.process_group) == 1:
        return None
    adopted = adopt(ddp)
    if isinstance(adopted, str):
        record.declined.append(f"gradients: {adopted}")
        return None
    return adopted


def _lower(
    module: fx.GraphModule, example_inputs: Sequence[Any], config: CompilerConfig, plan: Plan, adopted: Adopted | None
) -> Callable[..., Any]:
    if adopted is None:
        return lower(module, example_inputs, config=config, plan=plan)
    reduce = ReduceGradients(adopted.name, adopted.members(example_inputs))
    passes = GraphPasses(post_grad_pre=(reduce,))
    known = torch._inductor.config.get_config_copy()
    config = replace(config, inductor={**{name: False for name in _MOVERS if name in known}, **config.inductor})
    spare = copied(module)
    compiled = lower(module, example_inputs, config=config, plan=plan, passes=passes)
    return GraphPerParameters(compiled, spare, example_inputs, partial(_lower_again, config=config, plan=plan))


def _lower_again(
    module: fx.GraphModule, example_inputs: Sequence[Any], config: CompilerConfig, plan: Plan
) -> Callable[..., Any]:
    """A graph for other parameters than it was compiled for, of this data-parallel module or of another one."""
    ddp = active()
    adopted = adopt(ddp) if ddp is not None else None
    return _lower(module, example_inputs, config, plan, adopted if isinstance(adopted, Adopted) else None)


def _explain(
    module: fx.GraphModule, program: Program | None, record: RegionRecord, found: list[RegionRecord]
) -> Callable[..., Any]:
    """Run the region in eager and read, from its first batch, what packing would save."""
    from deepytorch.compiler.batch_facts import Refusal, read_facts

    record.outcome = "packed" if program is not None else "declined"
    found.append(record)

    def run(*inputs: Any) -> Any:
        if program is not None:
            with torch.no_grad():
                facts = read_facts(program, inputs)
            if isinstance(facts, Refusal):
                record.padded_because[facts.reason] = record.padded_because.get(facts.reason, 0) + 1
            else:
                record.tokens_real += sum(facts.tokens)
                record.tokens_padded += facts.num_positions
                record.labels += sum(facts.labels)
                record.relative_cost = program.relative_cost(facts.tokens, facts.labels, facts.sizes)
        return module.forward(*inputs)

    return run


def _describe(record: RegionRecord, runs: Sequence[PassRun], plan: Plan) -> None:
    record.plan_digest = plan.digest()
    for run in runs:
        record.pass_ms[run.name] = run.time_ms
        record.changes += run.rewrite.changes
        record.declined += [f"{decline.where}: {decline.reason}" for decline in run.rewrite.declined]


def _record(config: CompilerConfig, *reasons: str) -> RegionRecord:
    return RegionRecord(_region_name(), "declined", config.lowering, declined=list(reasons))


def _is_recompilation() -> bool:
    """Whether Dynamo compiled this frame before, for other sizes or another state."""
    current = CompileContext.current_compile_id()
    return current is not None and bool(current.frame_compile_id)


def _region_name() -> str:
    current = CompileContext.current_compile_id()
    return f"region {current}" if current is not None else "region"


def _may_have_attention(module: fx.GraphModule) -> bool:
    """A cheap look at a Dynamo graph, before sizes are made symbolic for its sake."""
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            for node in part.graph.nodes:
                name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
                if node.op in ("call_function", "call_method", "call_module") and (
                    "attention" in name or "softmax" in name
                ):
                    return True
    return False


def _is_packed(module: fx.GraphModule) -> bool:
    """Whether a Dynamo graph has our attention already: padding was stripped at its model's door."""
    packed = torch.ops.deepytorch.varlen_attention.default
    return any(
        node.target is packed
        for part in module.modules()
        if isinstance(part, fx.GraphModule)
        for node in part.graph.nodes
    )


def _keep_warnings_from_breaking_graphs() -> None:
    """Transformers warns once through a logger method that Dynamo cannot trace, and that would cut a model in two at
    its loss (GPT-2). Dynamo has a setting for such functions: the call is left out of compiled code. The method comes
    with the import of transformers, which may follow ours; a trace that it has cut already is started over.
    """
    warning_once = getattr(logging.Logger, "warning_once", None)
    if warning_once is None:
        return

    def ignored() -> set[Any]:
        return torch._dynamo.config.ignore_logging_functions

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
    own reduction has in one graph. It looks at this before it calls a backend, so it is set once, here. What the user
    chose otherwise ("python_reducer", "no_optimization") stays.
    """
    chosen = torch._dynamo.config.optimize_ddp
    if not Environment.read().enabled or chosen not in (True, "ddp_optimizer"):
        return

    def undo() -> None:
        if torch._dynamo.config.optimize_ddp is False:  # else the user has chosen anew
            torch._dynamo.config.optimize_ddp = chosen

    patch(
        "torch._dynamo.config.optimize_ddp",
        "keep data-parallel models in one graph, in which their gradients are reduced",
        lambda: setattr(torch._dynamo.config, "optimize_ddp", False),
        undo,
        always=True,
    )


_keep_warnings_from_breaking_graphs()
_keep_data_parallel_models_whole()
