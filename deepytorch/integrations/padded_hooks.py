"""Forward hooks of the user's inside of a model that runs packed: they see padded tensors, as ever.

What a hook is shown is part of the graph, and the model goes on with it: so a hook may return another value, change its
tensors in place, or hook their gradients. Hooks of frameworks (ZeRO-3's and FSDP2's gather weights, transformers'
collect hidden states) run as they are.
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
        self._forward: list[tuple[dict[int, Callable[..., Any]], int, Callable[..., Any], bool]] = []
        self.refused: str | None = None
        for module in model.modules():
            for hooks, with_kwargs, before in (
                (module._forward_hooks, module._forward_hooks_with_kwargs, False),
                (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs, True),
            ):
                for key, hook in hooks.items():
                    if _is_users(hook):
                        self._forward.append((hooks, key, hook, before))
                        if key in with_kwargs:  # masks are among them
                            self._refuse("hook that is given keyword arguments", hook)
            for hook in (*module._backward_hooks.values(), *module._backward_pre_hooks.values()):
                if _is_users(hook):
                    self._refuse("backward hook", hook)
        for name in ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks"):
            for hook in getattr(torch_module, name, {}).values():
                if _is_users(hook):
                    self._refuse("hook on all modules", hook)
        if self._forward and any(_recomputes(module) for module in model.modules()):
            self._refuse("hook under activation checkpointing", self._forward[0][2])

    @property
    def found(self) -> bool:
        """Whether there are any."""
        return bool(self._forward)

    def _refuse(self, kind: str, hook: Callable[..., Any]) -> None:
        self.refused = f"a {kind}: {getattr(hook, '__qualname__', type(hook).__name__)}"

    @contextlib.contextmanager
    def shown(self, show: Translate, take: Translate, *, call: bool = True) -> Iterator[None]:
        """Inside, every hook is given what `show` makes of its arguments, and the model goes on with what `take` makes
        of these, or of what the hook returns. call: whether hooks are called, or only shown that they could be.
        """

        def translated(hook: Callable[..., Any], before: bool) -> Callable[..., Any]:
            @torch.compiler.disable(reason="a hook of the user's is shown padded tensors")
            def run(module: nn.Module, *given: Any) -> Any:
                seen = [show(each) for each in given]
                returned = None
                if call:
                    try:
                        returned = hook(module, *seen)
                    except BaseException as error:
                        error.__dict__["deepytorch_of_a_hook"] = True
                        raise
                if returned is None:
                    returned = seen[-1]
                elif before and not isinstance(returned, tuple):
                    returned = (returned,)
                return take(returned)

            return run

        for hooks, key, hook, before in self._forward:
            hooks[key] = translated(hook, before)
        try:
            yield
        finally:
            for hooks, key, hook, _ in self._forward:
                if key in hooks:  # one may remove itself
                    hooks[key] = hook

    @contextlib.contextmanager
    def silenced(self) -> Iterator[None]:
        """Inside, no hook of the user's runs."""
        with self.shown(lambda value: value, lambda value: value, call=False):
            yield


def _recomputes(module: nn.Module) -> bool:
    return bool(getattr(module, "gradient_checkpointing", False)) or type(module).__name__ == "CheckpointWrapper"


def _is_users(hook: Callable[..., Any]) -> bool:
    while isinstance(hook, functools.partial):
        hook = hook.func
    home = getattr(hook, "__module__", None) or type(hook).__module__
    return home.partition(".")[0] not in FRAMEWORKS
