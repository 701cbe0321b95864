"""Hugging Face models can be packed at model entry, by `model_entry`, which is loaded when a model is first armed."""

from __future__ import annotations

from typing import Any


def attach(modeling_utils: Any) -> None:
    """Tell `autowrap` of packing at model entry, once transformers is imported."""
    from deepytorch import autowrap
    from deepytorch.integrations import input_gradients

    if _entry_for not in autowrap.ENTRIES:
        autowrap.ENTRIES.append(_entry_for)
        pretrained = modeling_utils.PreTrainedModel
        autowrap.MODELS.append(lambda module: isinstance(module, pretrained))
    input_gradients.attach(modeling_utils)


def _entry_for(module: Any, min_padding: float) -> Any:
    from deepytorch.integrations.model_entry import entry_for

    return entry_for(module, min_padding)
