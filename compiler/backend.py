"""The backend that `torch.compile(model, backend="deepytorch")` calls with each graph of Dynamo's."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from deepytorch.compiler.code.compilers import compile_seconds
from deepytorch.compiler.code.lower_region import RegionLowering
from deepytorch.compiler.config import CompilerConfig
from deepytorch.compiler.dynamo.capture import Untraceable, capture, is_batch_input, saving_for_nobody
from deepytorch.compiler.dynamo.graph_forms import eager_graph, graph_for_later
from deepytorch.compiler.dynamo.graph_traits import (
    attention_forms,
    draws_as_eager,
    gives_no_gradients,
    is_cut_at,
    may_have_attention,
    may_have_large_loss,
    sets_generators,
    unread_statistics,
    writes_twice,
)
from deepytorch.compiler.dynamo.graph_values import give_values
from deepytorch.compiler.dynamo.settings import prepare_dynamo
from deepytorch.compiler.dynamo.sizes import Trace, restart_as_stock, trace_as_it_comes, varying_dims, which_trace
from deepytorch.compiler.dynamo.trace_gate import Trace as FrameTrace
from deepytorch.compiler.dynamo.trace_gate import current_trace, end_if_too_long
from deepytorch.compiler.forms import comparison_for, may_run_apart, tuning_for
from deepytorch.compiler.manager import Rewritten, passes_for, run_passes
from deepytorch.compiler.outcome import Outcome, tell
from deepytorch.compiler.plan import Plan
from deepytorch.compiler.report import LEDGER, RegionRecord
from deepytorch.compiler.step.regions import (
    Effects,
    compiled_region,
    packed_region,
    rewritten_region,
    whole_region,
)
from deepytorch.compiler.step.unused_outputs import parts_in_outputs
from deepytorch.config import Environment
from deepytorch.kept_memory import MEMORY
from deepytorch.log import logger, once
from deepytorch.passes.base import Context
from deepytorch.passes.graphs import copied, is_packed, is_random, keeps_all
from deepytorch.passes.slicing import Slicer
from deepytorch.passes.unpad.program import Program
from deepytorch.torch_internals import CompileContext, TensorifyScalarRestartAnalysis

_OF_ANY_SIZES = ("FuseLinearLoss",)  # passes that need no symbolic sizes: stock's own trace is enough

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

    Raises `ConfigError` for an unknown option. After any other failure the region is compiled as by stock, or runs in
    eager if that fails too; the failure is logged once.
    """
    prepare_dynamo()
    config = CompilerConfig.parse(mode, options, kwargs)
    if not Environment.read().enabled:
        config = replace(config, unpad=False, fuse_loss=False, reduce_gradients=False)
    elif any(isinstance(each, torch.nn.Parameter) and each.device.type == "cpu" for each in example_inputs):
        MEMORY.keep()
    end_if_too_long()
    trace_of_frame = current_trace()
    if trace_of_frame is not None and sets_generators(module):
        trace_of_frame.leave("the model sets random generators itself, so that its draws have to be those of eager")
    if trace_of_frame is not None and is_cut_at(module, "use_numpy_random_stream"):
        trace_of_frame.leave("the model draws random numbers from NumPy")  # two names of one array share no storage
    if trace_of_frame is not None and gives_no_gradients(module, example_inputs):
        trace_of_frame.leave("a reentrant checkpoint, none of whose inputs needs a gradient, gives its weights none")
    if trace_of_frame is not None and writes_twice(module):
        trace_of_frame.leave("a checkpoint writes into buffers, in eager once more in the backward")
    reason = _nothing_to_pack(module, config)
    if reason is not None:
        trace_as_it_comes(example_inputs)
        return _without_packing(module, example_inputs, config, reason)
    trace, reasons = which_trace(module, example_inputs)
    if trace is Trace.DECLINED:
        return _without_packing(module, example_inputs, config, *reasons)
    return _analysed(module, example_inputs, config, trace, Plan.initial("region", config))


def _nothing_to_pack(module: fx.GraphModule, config: CompilerConfig) -> str | None:
    """Return why a Dynamo graph has nothing to pack, by a quick look; None if it has to be analysed."""
    if not config.unpad:
        return "stripping padding is switched off"
    if not may_have_attention(module):
        return "nothing to pack: no attention in this graph"
    if is_packed(module):
        return "nothing to pack: the model's batches are packed before they come here"
    return None


def _without_packing(
    module: fx.GraphModule, example_inputs: Sequence[Any], config: CompilerConfig, *reasons: str
) -> Callable[..., Any]:
    """Compile a region that is not packed, for `reasons`, with the other passes if they apply; else as stock."""
    plan = Plan.initial("region", config).without("StripPadding")
    if not config.fuse_loss or not plan.passes or not may_have_large_loss(module):
        return _lower_whole(module, example_inputs, config, _record(config, *reasons))
    return _analysed(module, example_inputs, config, Trace.DECLINED, plan, reasons)


def _analysed(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    config: CompilerConfig,
    trace: Trace,
    plan: Plan,
    reasons: Sequence[str] = (),
) -> Callable[..., Any]:
    """Compile a region by `plan`, or as stock if it cannot be analysed."""
    try:
        with saving_for_nobody():
            return _compile(module, example_inputs, config, trace, plan, reasons)
    except TensorifyScalarRestartAnalysis:  # see [Note: Restarts]
        raise
    except Untraceable as untraceable:
        reason = str(untraceable).partition("\n")[0]  # the interpreter adds its position in further lines
        if trace is not Trace.DECLINED:
            tell(Outcome.UNTRACEABLE)
        if trace is Trace.MARKED and EXPLAINING.get() is None:
            restart_as_stock(module, example_inputs, [reason])  # see [Note: Restarts]
        return _lower_whole(module, example_inputs, config, _record(config, *reasons, reason))
    except Exception as error:
        end_if_too_long()
        once(logging.WARNING, "a region could not be analysed (%s: %s); stock compiles it", type(error).__name__, error)
        logger.debug("traceback of the failure", exc_info=True)
        return _lower_whole(
            module, example_inputs, config, _record(config, *reasons, f"{type(error).__name__}: {error}")
        )


def _compile(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    config: CompilerConfig,
    trace: Trace,
    plan: Plan,
    reasons: Sequence[str],
) -> Callable[..., Any]:
    record = _record(config, *reasons)
    captured = capture(module, example_inputs)
    end_if_too_long()
    fakes = [node.meta["val"] for node in captured.module.graph.nodes if node.op == "placeholder"]
    effects = _effects(captured.module.graph)
    reason = getattr(module, "compile_subgraph_reason", None)
    context = Context(captured.shape_env, bool(getattr(reason, "graph_break", False)))
    found = run_passes(captured.module, passes_for(plan), context, dump_dir=config.dump_graphs)
    _describe(record, found, plan)
    explaining = EXPLAINING.get()
    if explaining is not None:
        if found.program is not None:
            give_values(captured.module)
            record.attention = attention_forms(captured.module.graph)
        return _explain(module, found.program, record, explaining)
    needs_symbols = any(run.fired for run in found.runs if run.name not in _OF_ANY_SIZES)
    if trace is Trace.MARKED and not needs_symbols:
        restart_as_stock(module, example_inputs, found.reasons)  # see [Note: Restarts]
    if not found.fired:
        return _lower_whole(module, example_inputs, config, record)
    outcome = Outcome.REWRITTEN if found.program is None else Outcome.PACKED
    record.outcome = outcome.value
    record.recompiles += _is_recompilation()
    LEDGER.open(record)
    lowering, environment = _lowering(config, plan, record), Environment.read()
    assert found.before is not None
    compares = (not config.waits or environment.verify) and may_run_apart(module, example_inputs)
    every = environment.verify_every if environment.verify else None
    if found.program is None:
        tell(outcome)
        plain = (found.before, found.of_any_batch) if compares else None
        return rewritten_region(
            captured.module, fakes, eager_graph(module).forward, lowering, record, effects, plain, every
        )
    round_sizes = config.rounds_sizes(any(isinstance(each, torch.Tensor) and each.is_cuda for each in fakes))
    if round_sizes:
        give_values(captured.module)
    region = packed_region(
        padded=found.before,
        packed=captured.module,
        program=found.program,
        inputs=captured.inputs,
        fakes=fakes,
        eager=eager_graph(module).forward,
        lowering=lowering,
        record=record,
        effects=effects,
        min_padding=config.min_padding,
        verify_every=every,
        compares_first=compares,
        round_sizes=round_sizes,
        alone=found.alone,
        behind=found.of_any_batch,
    )
    tell(outcome)
    return region


def _effects(graph: fx.Graph) -> Effects:
    number = {node: index for index, node in enumerate(node for node in graph.nodes if node.op == "placeholder")}
    written = tuple(number[node] for node in Slicer(graph).written_inputs())
    return Effects(written, draws=any(is_random(node) and not keeps_all(node) for node in graph.nodes))


def _lower_whole(
    module: fx.GraphModule, example_inputs: Sequence[Any], config: CompilerConfig, record: RegionRecord
) -> Callable[..., Any]:
    """Compile a region unchanged, as stock would; run it in eager if that fails."""
    explaining = EXPLAINING.get()
    if explaining is not None:
        explaining.append(record)
        tell(Outcome.DECLINED)
        return eager_graph(module).forward
    if not any(node.op.startswith("call") for node in module.graph.nodes):  # Dynamo compiles no such graph once more
        tell(Outcome.DECLINED)
        return eager_graph(module).forward
    trace = current_trace()
    if trace is not None:
        trace.is_traced()
        _note_sizes(trace, module, example_inputs)
    if draws_as_eager(module):
        config = replace(config, inductor={"fallback_random": True, **config.inductor})
    later = _later(module, example_inputs, config)
    if isinstance(later, str) and trace is not None and not trace.in_place:
        tell(Outcome.DECLINED)
        trace.leave(
            f"{later}, so that no other process can compile it; it is compiled here once the run is long enough",
            compile_seconds(module),
        )
    record.recompiles += _is_recompilation()
    LEDGER.open(record)
    started = time.perf_counter()
    copy = copied(module)  # lowering may change the module
    eager, unread = eager_graph(copy).forward, unread_statistics(module.graph)
    try:
        lowering = _lowering(config, Plan.initial("region", config), record)
        tuning = tuning_for(copy, example_inputs, lowering, record)
        compared = comparison_for(copy, example_inputs, lowering, tuning)
        if isinstance(later, fx.GraphModule):
            tell(Outcome.DECLINED)
            parts = parts_in_outputs(copy.graph)
            return whole_region(later, eager, lowering, record, unread, parts, tuning, compared)
        record.compiles += 1
        if not config.waits:  # a takeover of its gradients comes later, if at all: until then DDP reduces them
            logger.info("%s is compiled now, and training waits for it", record.name)
            lowering = lowering.with_gradients(None)
        compiled = lowering.compile(module, example_inputs)
        tell(Outcome.DECLINED)
        parts = parts_in_outputs(copy.graph)
        return compiled_region(compiled, len(example_inputs), eager, lowering, record, unread, parts, tuning, compared)
    except (TensorifyScalarRestartAnalysis, torch.OutOfMemoryError):  # see [Note: Restarts]
        raise
    except Exception as error:
        message = f"{record.name}: compiling failed with {type(error).__name__}: {str(error)[:500]}"
        record.outcome = Outcome.EAGER.value
        tell(Outcome.EAGER)
        record.fallbacks.append(message)
        once(logging.WARNING, "%s; the region runs in eager", message)
        if trace is not None:
            trace.leave(message)
        return eager
    finally:
        record.compile_seconds += time.perf_counter() - started


def _later(
    module: fx.GraphModule, example_inputs: Sequence[Any], config: CompilerConfig
) -> fx.GraphModule | str | None:
    """Return a graph's form for the background, or the reason for which it has none; None if training waits anyway."""
    if config.waits:
        return None
    with saving_for_nobody():
        return graph_for_later(module, example_inputs)


def _note_sizes(trace: FrameTrace, module: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
    """Tell the gate if a graph has come out for the sizes of this batch alone."""
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    fakes = [
        node.meta["example_value"]
        for node, value in zip(placeholders, example_inputs, strict=True)
        if is_batch_input(node, value)
    ]
    if fakes and not any(varying_dims(fake) for fake in fakes):
        trace.code.sizes.add(tuple(tuple(map(int, fake.shape)) for fake in fakes))


def _lowering(config: CompilerConfig, plan: Plan, record: RegionRecord) -> RegionLowering:
    lowering = RegionLowering.here(config, plan)
    if lowering.declined is not None:
        record.declined.append(f"gradients: {lowering.declined}")
    return lowering


def _explain(
    module: fx.GraphModule, program: Program | None, record: RegionRecord, found: list[RegionRecord]
) -> Callable[..., Any]:
    """Return a region that runs in eager and reads from its first batch what packing would save."""
    from deepytorch.compiler.step.batch_facts import Refusal, read_facts

    outcome = Outcome.PACKED if program is not None else Outcome.DECLINED
    record.outcome = outcome.value
    found.append(record)
    tell(outcome)
    eager = eager_graph(module).forward

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
        started = time.perf_counter()
        outputs = eager(*inputs)
        if all(not isinstance(each, torch.Tensor) or each.device.type == "cpu" for each in inputs):
            record.forward_seconds = time.perf_counter() - started
        return outputs

    return run


def _describe(record: RegionRecord, found: Rewritten, plan: Plan) -> None:
    record.plan_digest = plan.digest()
    record.declined += found.reasons
    for run in found.runs:
        record.pass_ms[run.name] = run.time_ms
        record.changes += run.rewrite.changes


def _record(config: CompilerConfig, *reasons: str) -> RegionRecord:
    return RegionRecord(_region_name(), Outcome.DECLINED.value, config.lowering, declined=list(reasons))


def _is_recompilation() -> bool:
    """Return whether Dynamo compiled this frame before, for other sizes or another state."""
    current = CompileContext.current_compile_id()
    return current is not None and bool(current.frame_compile_id)


def _region_name() -> str:
    current = CompileContext.current_compile_id()
    return f"region {current}" if current is not None else "region"
