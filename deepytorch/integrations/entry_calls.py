"""Replacement of module calls inside of a packed model that would go wrong on a packed row, and their restoration."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any

from torch import nn

from deepytorch.integrations.packed_attention import call_with_bias, has_learned_bias
from deepytorch.integrations.packed_batch import PackedBatch

# The `ModelEntry` whose model runs packed, and the batch.
INSIDE: ContextVar[tuple[object, PackedBatch] | None] = ContextVar("deepytorch_packed_batch", default=None)


class Replaced:
    """The replaced call of a module, set where `Module.compile` puts its own: pickles and copies leave it out."""

    def __init__(self, call: Callable[..., Any], module: nn.Module) -> None:
        self._call, self._module = call, module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(self._module, *args, **kwargs)


def replace_calls(entry: object, model: Any, *, takes_positions: bool) -> bool:
    """Replace the calls of modules that need more than a packed row; return whether there are any.

    These are attention with a learned bias, tables of learned positions if the model has no `position_ids`, and
    poolers. entry: the `ModelEntry` whose batch they take. Each behaves as before while another model, or none, runs
    packed.
    """
    of_encoder = set(model.get_encoder().modules()) if model.config.is_encoder_decoder else set()
    found = False
    for module in model.modules():
        pooler = module._modules.get("pooler")
        if has_learned_bias(module):
            module._compiled_call_impl = Replaced(call_with_bias, module)
            found = True
        elif _is_position_table(module) and not takes_positions:
            side = 0 if module in of_encoder else -1
            module._compiled_call_impl = Replaced(partial(_call_with_positions, entry, side), module)
            found = True
        if pooler is not None:
            pooler._compiled_call_impl = Replaced(partial(_call_unpacked, entry), pooler)
            found = True
    return found


def restore_calls(model: nn.Module) -> None:
    """Restore the calls that were replaced."""
    for module in model.modules():
        if isinstance(getattr(module, "_compiled_call_impl", None), Replaced):
            module.__dict__.pop("_compiled_call_impl")


def _is_position_table(module: nn.Module) -> bool:
    """Return whether a module is a table of learned positions that makes its positions itself, as Bart's."""
    own = isinstance(module, nn.Embedding) and type(module).forward is not nn.Embedding.forward
    return own and "position_ids" in inspect.signature(module.forward).parameters


def _call_with_positions(entry: object, side: int, module: Any, *args: Any, **kwargs: Any) -> Any:
    inside = INSIDE.get()
    if inside is not None and inside[0] is entry:
        batch = inside[1]
        before = 0 if batch.prefix is None else batch.prefix.prefix.length
        kwargs["position_ids"] = batch.sides[side].rows.positions.long() + before
    return module._call_impl(*args, **kwargs)


def _call_unpacked(entry: object, module: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a pooler on unpacked rows, since it looks at one position of each row."""
    inside = INSIDE.get()
    if inside is not None and inside[0] is entry and hidden_states.shape[:2] == (1, inside[1].main.num_tokens):
        hidden_states = inside[1].main.unpack(hidden_states)
    return module._call_impl(hidden_states, *args, **kwargs)
