"""Hugging Face models have a door at which padding can be stripped: `hf_door`, loaded when a model is first armed."""

from __future__ import annotations

from typing import Any


def attach(_: Any) -> None:
    """Tell `autowrap`, now that transformers is there."""
    from deepytorch import autowrap

    if _door_for not in autowrap.DOORS:
        autowrap.DOORS.append(_door_for)


def _door_for(module: Any, min_padding: float) -> Any:
    from deepytorch.integrations.hf_door import door_for

    return door_for(module, min_padding)
