"""Inputs that require gradients, in a form that Dynamo can trace.

Gradient checkpointing with adapters needs the output of the embedding to require gradients, though the embedding is
frozen. Transformers' hook calls `output.requires_grad_()`, which ends Dynamo's graph behind the embedding: the mask
and the positions of the body are in one graph, the head and the loss in another, and neither knows what is padding.
In a trace our hook adds a trained zero instead, so that the model stays one graph. Every later value requires
gradients as in eager, and has eager's bits but for the sign of zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from deepytorch.patches import replace

_NAME = "make_inputs_require_grads"


def attach(modeling_utils: Any) -> None:
    """Have transformers' `enable_input_require_grads`, which PEFT and TRL call too, register our hook."""

    def with_our_hook(original: Any) -> Any:
        def enable_input_require_grads(self: nn.Module) -> None:
            original(self)
            for module in self.modules():
                _replace_hooks(module)

        return enable_input_require_grads

    why = "let Dynamo trace through embeddings whose outputs are made to require gradients"
    replace(modeling_utils.PreTrainedModel, "enable_input_require_grads", with_our_hook, why)


def _replace_hooks(module: nn.Module) -> None:
    """Put our hook in the place of transformers' first one, whose handle removes it, and drop the others.

    Transformers registers one more each time that checkpointing is switched on, as TRL does behind each generation. The
    later ones do nothing more, and Dynamo would trace the model anew for each.
    """
    weight, hooks = getattr(module, "weight", None), module._forward_hooks
    if not isinstance(weight, torch.Tensor):
        return
    found = [place for place, hook in hooks.items() if _is_ours(hook) or _is_transformers(hook)]
    for place in found[1:]:
        del hooks[place]
    if found and not _is_ours(hooks[found[0]]):
        hooks[found[0]] = _requiring_gradients(hooks[found[0]], weight)


def _is_transformers(hook: Any) -> bool:
    return getattr(hook, "__name__", "") == _NAME and hook.__module__.startswith("transformers.")


def _is_ours(hook: Any) -> bool:
    return getattr(hook, "__name__", "") == _NAME and hook.__module__ == __name__


def _requiring_gradients(original: Callable[..., Any], weight: torch.Tensor) -> Callable[..., Any]:
    """Return a forward hook that does what `original` does. weight: a tensor of the output's dtype and device."""
    zero = nn.Parameter(torch.zeros((), dtype=weight.dtype, device=weight.device))

    def make_inputs_require_grads(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor | None:
        if not torch.compiler.is_dynamo_compiling() or (output.dtype, output.device) != (zero.dtype, zero.device):
            original(module, inputs, output)
            return None
        return None if output.requires_grad else output + zero

    return make_inputs_require_grads
