"""Forms of a graph of Dynamo's: for eager, and for a compilation by another process.

[Note: Checkpoints in eager]
The eager form runs operator by operator and does the same as its module. One operator behaves otherwise in a graph than
in the module: a checkpoint leaves the state of random generators to Inductor. So the unchanged graph would draw other
dropout when it recomputes. In the eager form the operator is `torch.utils.checkpoint.checkpoint` again, as the model
called it: weights and buffers, which Dynamo has made arguments, belong to the function again. Of arguments torch checks
that nobody writes to them before they are used once more, as a norm does to its statistics.

A script's `torch.autograd.Function` is an operator in a graph, too. That operator keeps what its forward saves as mere
values, and runs its backward without gradients, so that the gradient of a gradient would miss what comes through it.
The eager form saves them as the script does, inputs and outputs with their place in autograd's graph, and runs the
backward as autograd would.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import checkpoint

from deepytorch.compiler.dynamo.capture import Untraceable, capture, sizes_from_tensors
from deepytorch.passes.graphs import copied
from deepytorch.torch_internals import HigherOrderOperator, set_grad_enabled_in_graphs

_CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint
_FUNCTION = "autograd_function_apply"
_SAVED = "saved_for_backward_idx"  # which values the function has saved by `save_for_backward`


def eager_graph(module: fx.GraphModule) -> fx.GraphModule:
    """Return `module` with its checkpoints and custom functions as in eager; `module` itself if it has none."""
    if not _holds_checkpoints(module) and not any(map(_is_function, module.graph.nodes)):
        return module
    found = copied(module)
    for node in found.graph.nodes:
        if _is_function(node):
            node.target = _apply
            name = str(node.args[1].target)
            setattr(found, name, _as_autograd_runs_it(getattr(found, name)))
        if node.target is _CHECKPOINT:
            name = str(node.args[0].target)
            setattr(found, name, eager_graph(getattr(found, name)))
            node.target = _checkpoint
            own = tuple(place for place, each in enumerate(node.args[1:]) if _is_of_module(each))
            node.kwargs = {**node.kwargs, "own": own}
    found.recompile()
    return found


def _holds_checkpoints(module: fx.GraphModule) -> bool:
    """Return whether parts of a graph of Dynamo's are computed again in the backward."""
    return any(node.target is _CHECKPOINT for node in module.graph.nodes)


def _is_function(node: fx.Node) -> bool:
    """Return whether a node is a script's autograd function, of a torch that says what the function saves."""
    return isinstance(node.target, HigherOrderOperator) and node.target.name() == _FUNCTION and _SAVED in node.kwargs


def _as_autograd_runs_it(backward: fx.GraphModule) -> fx.GraphModule:
    """Return a function's backward without the switches at its ends by which Dynamo has turned gradients off."""
    found = copied(backward)
    calls = [node for node in found.graph.nodes if node.op == "call_function"]
    ends = [calls[0], calls[-1]] if len(calls) > 1 else []
    if [(node.target, node.args) for node in ends] == [(set_grad_enabled_in_graphs, (on,)) for on in (False, True)]:
        for node in ends:
            found.graph.erase_node(node)
        found.recompile()
    return found


class _Applied(torch.autograd.Function):
    """A script's autograd function of which Dynamo has made two graphs."""

    @staticmethod
    def forward(ctx: Any, forward: fx.GraphModule, backward: fx.GraphModule, settings: Any, *given: Any) -> Any:
        outputs, values = forward.forward(*given)
        in_order = outputs if isinstance(outputs, tuple | list) else (outputs,)
        for mark, name in ((ctx.mark_dirty, "dirty_idx"), (ctx.mark_non_differentiable, "non_differentiable_idx")):
            mark(*(in_order[place] for place in settings.get(name, ())))
        saved = [place for place in settings[_SAVED] if isinstance(values[place], torch.Tensor)]
        ctx.save_for_backward(*(values[place] for place in saved))
        ctx.places, ctx.backward_graph = saved, backward
        ctx.others = [None if place in saved else each for place, each in enumerate(values)]
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        values = list(ctx.others)
        for place, each in zip(ctx.places, ctx.saved_tensors, strict=True):
            values[place] = each
        found = ctx.backward_graph.forward(*gradients, *values)
        return (None, None, None, *(found if isinstance(found, tuple | list) else (found,)))


def _apply(forward: fx.GraphModule, backward: fx.GraphModule, *given: Any, **settings: Any) -> Any:
    """Apply a script's autograd function."""
    return _Applied.apply(forward, backward, settings, *given)


def _is_of_module(argument: Any) -> bool:
    """Return whether an argument of a part is a weight or a buffer of the model, by the name that Dynamo gives it."""
    return (
        isinstance(argument, fx.Node)
        and argument.op == "placeholder"
        and ("_parameters_" in argument.name or "_buffers_" in argument.name)
    )


def _checkpoint(part: fx.GraphModule, *arguments: Any, own: Sequence[int] = (), **settings: Any) -> Any:
    """Run a part of a graph under a checkpoint with the model's own settings.

    The checkpoint is never reentrant: backwards inside of a backward gain nothing in a graph. own: the places of
    arguments that belong to the function, see [Note: Checkpoints in eager].
    """
    context = part.meta.get("_checkpoint_context_fn")
    if context is not None:
        settings["context_fn"] = context
    # The lambda is a new function: the checkpoint keeps the function it calls, which must not hold the part's values.
    kept = {place: arguments[place] for place in own}
    handed = [each for place, each in enumerate(arguments) if place not in kept]

    def run(*given: Any) -> Any:
        others = iter(given)
        return part.forward(*(kept[place] if place in kept else next(others) for place in range(len(arguments))))

    return checkpoint(run, *handed, **{**settings, "use_reentrant": False})


def graph_for_later(module: fx.GraphModule, example_inputs: Sequence[Any]) -> fx.GraphModule | str:
    """Return Dynamo's graph in a form that Dynamo can trace once more in another process; or the reason against it.

    Checkpoints hold graphs of their own. A graph with checkpoints is returned in the form that passes read, with the
    checkpointed parts marked.
    """
    if _holds_checkpoints(module):
        try:
            return capture(module, example_inputs).module
        except Untraceable as untraceable:
            return str(untraceable).partition("\n")[0]
        except Exception as error:
            return f"a trace of it failed with {type(error).__name__}: {str(error)[:200]}"
    reason = _why_not_later(module)
    if reason is not None:
        return reason
    later = copied(module)
    sizes_from_tensors(later, "example_value")
    return later


def _why_not_later(module: fx.GraphModule) -> str | None:
    """Return why Dynamo cannot trace its graph once more: it holds graphs, or numbers that are no sizes. Else None."""
    sizes = set()
    for node in module.graph.nodes:
        if node.op == "call_module":
            return f"the graph calls a module, {node.target}"
        if isinstance(node.target, HigherOrderOperator):
            return f"the graph holds another one, of {node.target.name()}"
        if node.op == "get_attr" and not isinstance(getattr(module, str(node.target), None), torch.Tensor):
            return f"the graph holds {node.target}, which is no tensor"
        value = node.meta.get("example_value")
        if node.op == "placeholder" and isinstance(value, torch.Tensor):
            shape: Sequence[Any] = value.shape
            sizes |= {size.node.expr for size in shape if isinstance(size, torch.SymInt)}
    for node in module.graph.nodes:
        value = node.meta.get("example_value")
        if node.op != "placeholder" or not node.users or isinstance(value, torch.Tensor):
            continue
        if not (isinstance(value, torch.SymInt) and value.node.expr in sizes):
            return f"the graph takes {node.name}, a number that is no size of the batch"
    return None
