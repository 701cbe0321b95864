"""Accelerate: "deepytorch" becomes a backend of torch.compile, `Accelerator(dynamo_backend="deepytorch")`.

The Trainer then takes it too: `TrainingArguments(torch_compile_backend="deepytorch")`. Accelerate keeps its backends in
an enumeration: ours becomes a member when it is first looked up.
"""

from __future__ import annotations

from typing import Any

from deepytorch.patches import patch

NAME = "DEEPYTORCH"


def attach(dataclasses: Any) -> None:
    """Teach the name to `accelerate.utils.dataclasses`."""
    backends = dataclasses.DynamoBackend
    own, earlier = vars(backends).get("_missing_"), backends._missing_

    def missing(cls: Any, value: object) -> Any:
        if value != NAME:
            return earlier(value)
        member = str.__new__(cls, NAME)
        member._name_ = member._value_ = NAME
        cls._value2member_map_[NAME] = member
        cls._member_map_[NAME] = member  # copies of a member look it up here before Python 3.11.4
        return member

    def apply() -> None:
        backends._missing_ = classmethod(missing)

    def undo() -> None:
        backends._value2member_map_.pop(NAME, None)
        backends._member_map_.pop(NAME, None)
        if own is None:
            del backends._missing_
        else:
            backends._missing_ = own

    patch("accelerate.utils.dataclasses.DynamoBackend._missing_", "know deepytorch by name", apply, undo)
