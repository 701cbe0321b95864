"""The classes of a model's modules as they were when it was armed.

Dynamo treats the contents of a class as constant. Compiled code would not see a method that a script replaces midway,
or a number in the class that it changes. Proofs of the model do not hold after such a change either.
"""

from __future__ import annotations

from typing import Any

from torch import nn


class ClassState:
    """The contents of the classes of some models' modules, and of the classes that these derive from."""

    def __init__(self, *models: nn.Module) -> None:
        self._was: dict[type, dict[str, Any]] = {}
        for model in models:
            self.add(model)

    def add(self, model: nn.Module) -> None:
        """Note the present contents of the classes of one more model, unless they are known."""
        for module in model.modules():
            if type(module) not in self._was:
                self._was |= {
                    kind: dict(vars(kind)) for kind in type(module).__mro__ if kind not in (*self._was, object)
                }

    def has_changed(self) -> bool:
        """Return whether something in one of the classes is now another object with another value."""
        others = []
        try:  # runs at each call of the model: most often nothing has changed
            for kind, was in self._was.items():
                if vars(kind) != was:
                    others.append(kind)
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
# Attributes that Dynamo (the first three, of `nn.Module`), `copy` and `abc` set on classes; no forward depends on them.
_OF_OTHERS = frozenset({
    "__init__", "__setstate__", "___needs_generation_tag_patch", "__slotnames__", "__abstractmethods__", "_abc_impl",
})  # fmt: skip
