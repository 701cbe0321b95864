"""A graph of Dynamo's that runs operator by operator and does what its module does.

One operator means something else in a graph than in the module: a checkpoint leaves the state of random generators to
Inductor, so that a graph that is run as it is would draw other dropout when it recomputes. Here it is
`torch.utils.checkpoint.checkpoint` again, as the model called it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import checkpoint

CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint


def eager_graph(module: fx.GraphModule) -> fx.GraphModule:
    """Return `module` with its checkpoints as eager has them; itself where it has none."""
    if not holds_checkpoints(module):
        return module
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    found = fx.GraphModule(module, graph)
    for node in found.graph.nodes:
        if node.target is CHECKPOINT:
            name = str(node.args[0].target)
            setattr(found, name, eager_graph(getattr(found, name)))
            node.target = _checkpoint
    found.recompile()
    return found


def holds_checkpoints(module: fx.GraphModule) -> bool:
    """Return whether parts of a graph of Dynamo's are computed again in the backward."""
    return any(node.target is CHECKPOINT for node in module.graph.nodes)


def _checkpoint(part: fx.GraphModule, *arguments: Any, **settings: Any) -> Any:
    """Run a part of a graph under a checkpoint with the model's own settings, and not in the reentrant way: backwards
    inside of a backward would have nothing to gain in a graph.
    """
    context = part.meta.get("_checkpoint_context_fn")
    if context is not None:
        settings["context_fn"] = context
    # a call of its own: the checkpoint keeps what it calls, and that must not hold on to the part's values
    return checkpoint(lambda *given: part.forward(*given), *arguments, **{**settings, "use_reentrant": False})
