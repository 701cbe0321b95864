"""Hugging Face models can be packed at model entry, by `model_entry`, which is loaded when a model is first armed."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any


def attach(modeling_utils: Any) -> None:
    """Tell `handles` and `module_holders` of packing at model entry, once transformers is imported."""
    from deepytorch import handles, module_holders
    from deepytorch.integrations import input_gradients, language_models

    if _entry_for not in handles.ENTRIES:
        handles.ENTRIES.append(_entry_for)
        pretrained = modeling_utils.PreTrainedModel
        module_holders.MODELS.append(lambda module: isinstance(module, pretrained))
        handles.BEFORE_TRACES.append(install_capturing_hooks)
    input_gradients.attach(modeling_utils)
    language_models.attach()


def _entry_for(module: Any, min_padding: float) -> Any:
    from deepytorch.integrations.model_entry import entry_for

    return entry_for(module, min_padding)


def install_capturing_hooks(module: Any, kwargs: Mapping[str, Any]) -> None:
    """Install the hooks by which models record their layers' outputs, if this call is to return any.

    Transformers installs them in the first call that asks for such outputs (`output_router_logits`), and Dynamo ends
    its graphs there. A version that records outputs otherwise is left alone.
    """
    try:
        capturing = import_module("transformers.utils.output_capturing")
        install, recorded = capturing.maybe_install_capturing_hooks, capturing._CAN_RECORD_REGISTRY
    except (ImportError, AttributeError):
        return
    pretrained = import_module("transformers.modeling_utils").PreTrainedModel
    for each in module.modules():
        if isinstance(each, pretrained) and _installs_hooks(each, capturing.__name__):
            names = [f"output_{name}" for name in recorded.get(each)]
            if any(kwargs.get(name, getattr(each.config, name, False)) for name in names):
                install(each)


def _installs_hooks(model: Any, home: str) -> bool:
    """Return whether a model's forward is in a wrapper from `home`, which installs the hooks.

    A model around it has the same settings, and hooks that were installed for both would record everything twice.
    """
    function = type(model).forward
    while function is not None:
        if getattr(function, "__globals__", {}).get("__name__") == home:
            return True
        function = getattr(function, "__wrapped__", None)
    return False
