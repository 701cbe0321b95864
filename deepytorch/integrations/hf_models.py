"""Hugging Face models can be packed at model entry, by `hf_door`, which is loaded when a model is first armed."""

from __future__ import annotations

from typing import Any


def attach(_: Any) -> None:
    """Tell `autowrap` of packing at model entry, once transformers is imported."""
    from deepytorch import autowrap

    if _door_for not in autowrap.DOORS:
        autowrap.DOORS.append(_door_for)


def _door_for(module: Any, min_padding: float) -> Any:
    from deepytorch.integrations.hf_door import door_for

    return door_for(module, min_padding)
