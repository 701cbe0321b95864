"""Forward hooks of the user's inside of a model that runs packed: they see padded tensors, as ever.

Hooks of frameworks (ZeRO-3's and FSDP2's gather weights, transformers' collect hidden states) run as they are.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

FRAMEWORKS = ("torch", "deepspeed", "accelerate", "transformers", "peft", "trl", "lightning", "deepytorch")

Translate = Callable[[Any], Any]


class UserHooks:
    """The hooks in one model that no framework has put there. `refused`: why they cannot run packed, or None."""

    def __init__(self, model: nn.Module) -> None:
        self._forward: list[tuple[dict[int, Callable[..., Any]], int, Callable[..., Any]]] = []
        self.refused: str | None = None
        for module in model.modules():
            for hooks in (module._forward_hooks, module._forward_pre_hooks):
                for key, hook in hooks.items():
                    if _is_users(hook):
                        self._forward.append((hooks, key, hook))
            for hook in (*module._backward_hooks.values(), *module._backward_pre_hooks.values()):
                if _is_users(hook):
                    self._refuse("backward hook", hook)
        for name in ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks"):
            for hook in getattr(torch_module, name, {}).values():
                if _is_users(hook):
                    self._refuse("hook on all modules", hook)
        if self._forward and any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
            self._refuse("hook under activation checkpointing", self._forward[0][2])

    def _refuse(self, kind: str, hook: Callable[..., Any]) -> None:
        self.refused = f"a {kind}: {getattr(hook, '__qualname__', type(hook).__name__)}"

    @contextlib.contextmanager
    def shown(self, show: Translate, take: Callable[[Any, Any], Any]) -> Iterator[None]:
        """Inside, every hook is given what `show` makes of its arguments; `take` gets what it returns, beside them."""

        def translated(hook: Callable[..., Any]) -> Callable[..., Any]:
            @torch.compiler.disable(reason="a hook of the user's is shown padded tensors")
            def run(module: nn.Module, *given: Any) -> Any:
                changed = hook(module, *(show(each) for each in given))
                return None if changed is None else take(changed, given)

            return run

        with self._replaced(translated):
            yield

    @contextlib.contextmanager
    def silenced(self) -> Iterator[None]:
        """Inside, no hook of the user's runs."""

        def silent(hook: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *_: None

        with self._replaced(silent):
            yield

    @contextlib.contextmanager
    def _replaced(self, replacement: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
        for hooks, key, hook in self._forward:
            hooks[key] = replacement(hook)
        try:
            yield
        finally:
            for hooks, key, hook in self._forward:
                if key in hooks:  # one may remove itself
                    hooks[key] = hook


def _is_users(hook: Callable[..., Any]) -> bool:
    while isinstance(hook, functools.partial):
        hook = hook.func
    home = getattr(hook, "__module__", None) or type(hook).__module__
    return home.partition(".")[0] not in FRAMEWORKS
