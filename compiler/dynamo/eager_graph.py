"""The eager form of a graph of Dynamo's, which runs operator by operator and does the same as its module.

One operator behaves otherwise in a graph than in the module: a checkpoint leaves the state of random generators to
Inductor. So the unchanged graph would draw other dropout when it recomputes. In the eager form the operator is
`torch.utils.checkpoint.checkpoint` again, as the model called it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import checkpoint

from deepytorch.passes.graphs import copied

CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint


def eager_graph(module: fx.GraphModule) -> fx.GraphModule:
    """Return `module` with its checkpoints as in eager; `module` itself if it has none."""
    if not holds_checkpoints(module):
        return module
    found = copied(module)
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
    """Run a part of a graph under a checkpoint with the model's own settings.

    The checkpoint is never reentrant: backwards inside of a backward gain nothing in a graph.
    """
    context = part.meta.get("_checkpoint_context_fn")
    if context is not None:
        settings["context_fn"] = context
    # The lambda is a new function: the checkpoint keeps the function it calls, which must not hold the part's values.
    return checkpoint(lambda *given: part.forward(*given), *arguments, **{**settings, "use_reentrant": False})
