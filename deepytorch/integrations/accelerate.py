"""Accelerate takes "deepytorch" as a backend of torch.compile: `Accelerator(dynamo_backend="deepytorch")`, and so does
the Trainer: `TrainingArguments(torch_compile_backend="deepytorch")`.

Accelerate keeps its backends in an enumeration: ours becomes a member when it is first looked up.
"""

from __future__ import annotations

from typing import Any

NAME = "DEEPYTORCH"


def attach(dataclasses: Any) -> None:
    """Teach the name to `accelerate.utils.dataclasses`."""
    backends = dataclasses.DynamoBackend
    earlier = backends._missing_

    def missing(cls: Any, value: object) -> Any:
        if value != NAME:
            return earlier(value)
        member = str.__new__(cls, NAME)
        member._name_ = member._value_ = NAME
        cls._value2member_map_[NAME] = member
        return member

    backends._missing_ = classmethod(missing)


def detach(dataclasses: Any) -> None:
    """Take the name back."""
    backends = dataclasses.DynamoBackend
    backends._value2member_map_.pop(NAME, None)
    if "_missing_" in vars(backends):
        del backends._missing_
