"""What is seen of a change of a model's classes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from deepytorch.class_state import ClassState


def model_of_own(**in_class: Any) -> nn.Module:
    inner = type("Inner", (nn.Linear,), in_class)(2, 2)
    return nn.Sequential(inner, nn.ReLU())


def test_numbers_and_methods_of_any_class_of_a_part_are_seen() -> None:
    for name, value in (("scale", 2.0), ("forward", lambda self, x: x), ("added", 1)):
        model = model_of_own(scale=1.0)
        state = ClassState(model)
        assert not state.has_changed()
        setattr(type(model[0]), name, value)
        assert state.has_changed()
        assert state.has_changed()  # it stays so


def test_what_no_forward_depends_on_is_not_a_change() -> None:
    model = model_of_own()
    state = ClassState(model)
    type(model[0]).__slotnames__ = []  # type: ignore[attr-defined]  # as `copy` does
    assert not state.has_changed()
    type(model[0]).scale = 1.0  # type: ignore[assignment]
    assert state.has_changed()


def test_values_that_cannot_be_compared_are_compared_by_identity() -> None:
    model = model_of_own(table=torch.ones(3))
    state = ClassState(model)
    assert not state.has_changed()
    type(model[0]).table = torch.ones(3)  # type: ignore[assignment]
    assert state.has_changed()


def test_a_model_that_is_added_is_seen_from_then_on() -> None:
    state, other = ClassState(model_of_own()), model_of_own(scale=1.0)
    type(other[0]).scale = 2.0  # type: ignore[assignment]
    state.add(other)
    assert not state.has_changed()
    type(other[0]).scale = 3.0  # type: ignore[assignment]
    assert state.has_changed()
