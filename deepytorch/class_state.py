"""The classes of a model's modules as they were when it was armed.

Dynamo takes what stands in a class for constant: a method that a script replaces midway, or a number in the class that
it changes, would not be seen by compiled code. Nor do proofs that were made of the model hold any longer.
"""

from __future__ import annotations

from typing import Any

from torch import nn


class ClassState:
    """What stands in the classes of the modules in some models, and in the classes that they derive from."""

    def __init__(self, *models: nn.Module) -> None:
        self._was: dict[type, dict[str, Any]] = {}
        for model in models:
            self.add(model)

    def add(self, model: nn.Module) -> None:
        """Note the classes of one more model, as they are now, where they are not known."""
        for module in model.modules():
            if type(module) not in self._was:
                self._was |= {
                    kind: dict(vars(kind)) for kind in type(module).__mro__ if kind not in (*self._was, object)
                }

    def has_changed(self) -> bool:
        """Return whether something in one of the classes is another object now, of another value."""
        try:  # at each call of the model: most often nothing has
            others = [kind for kind, was in self._was.items() if vars(kind) != was]
        except Exception:  # values that cannot be compared
            others = list(self._was)
        return any(map(self._differs, others))

    def _differs(self, kind: type) -> bool:
        before, now = self._was[kind], dict(vars(kind))
        names = {name for name in {*before, *now} if not _equal(before.get(name, _ABSENT), now.get(name, _ABSENT))}
        if names - _OF_OTHERS:
            return True
        self._was[kind] = now
        return False


def _equal(one: Any, other: Any) -> bool:
    try:
        return one is other or bool(one == other)
    except Exception:  # values that cannot be compared, and are not the same objects
        return False


_ABSENT = object()
# What Dynamo (the first three, of `nn.Module`), `copy` and `abc` set on classes, and no forward depends on.
_OF_OTHERS = frozenset({
    "__init__", "__setstate__", "___needs_generation_tag_patch", "__slotnames__", "__abstractmethods__", "_abc_impl",
})  # fmt: skip
