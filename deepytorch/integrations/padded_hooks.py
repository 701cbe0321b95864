"""The user's hooks inside of a model. A model with such hooks runs padded, so that they see the same as in eager.

Hooks of frameworks (ZeRO-3's and FSDP2's gather weights, transformers' collect hidden states) run as they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module

from deepytorch.compiler.step.events import is_users


class UserHooks:
    """The hooks in one model that no framework has put there.

    refused: their description, for a report; None if there are none.
    """

    def __init__(self, model: nn.Module) -> None:
        self._forward: list[tuple[dict[int, Callable[..., Any]], int, Callable[..., Any]]] = []
        self.refused: str | None = None
        for module in model.modules():
            for hooks in (module._forward_hooks, module._forward_pre_hooks):
                for key, hook in hooks.items():
                    if is_users(hook):
                        self._forward.append((hooks, key, hook))
                        self._refuse("hook on a module's forward", hook)
            for hook in (*module._backward_hooks.values(), *module._backward_pre_hooks.values()):
                if is_users(hook):
                    self._refuse("backward hook", hook)
        for name in ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks"):
            for hook in getattr(torch_module, name, {}).values():
                if is_users(hook):
                    self._refuse("hook on all modules", hook)

    def _refuse(self, kind: str, hook: Callable[..., Any]) -> None:
        self.refused = f"a {kind}: {getattr(hook, '__qualname__', type(hook).__name__)}"

    @contextlib.contextmanager
    def silenced(self) -> Iterator[None]:
        """Run no forward hook of the user's inside of the block."""
        for hooks, key, _ in self._forward:
            hooks[key] = _nothing
        try:
            yield
        finally:
            for hooks, key, hook in self._forward:
                if key in hooks:
                    hooks[key] = hook


def _nothing(*_: Any, **__: Any) -> None:
    return None
