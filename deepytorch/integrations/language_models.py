"""The language model inside of a vision- or audio-language model is compiled in the whole model's place.

The whole model replaces the embeddings of placeholder tokens by features of images or sounds, whose number must agree
with the number of placeholders, so that Dynamo cuts it there. The language model gets embeddings, mask and positions;
its hidden states come back as tokens, and the head and the loss take these alone. Towers for images and sounds are left
in eager: their inputs have no padding of the text's.

A model that makes the masks of its language model itself (Gemma 3, where the parts of an image see each other) is
compiled whole: inside, nothing would tell what such a mask means. Its batches of text alone have no cut.
"""

from __future__ import annotations

import inspect
from importlib import import_module

from torch import nn

from deepytorch import autowrap
from deepytorch.parallel_modules import class_of


def attach() -> None:
    """Tell `autowrap` of the models inside, once transformers is imported."""
    if language_model_of not in autowrap.BACKBONES:
        autowrap.BACKBONES.append(language_model_of)


def language_model_of(module: nn.Module) -> nn.Module | None:
    """Return the language model inside of a model of transformers' with a tower beside it; None in any other module.

    The model may be inside of PEFT's wrappers.
    """
    pretrained = import_module("transformers.modeling_utils").PreTrainedModel
    whole = next((each for each in module.modules() if isinstance(each, pretrained)), None)
    if whole is None or not _is_of_libraries_around(module, whole):
        return None
    models = {name: each for name, each in whole.named_modules() if isinstance(each, pretrained)}
    found = [each for name, each in models.items() if name.rpartition(".")[2] == "language_model"]
    if len(found) != 1:
        return None
    [language_model] = found
    inside = {id(each) for each in language_model.modules()}
    around = [each for each in models.values() if id(each) not in inside and _holds(each, language_model)]
    has_tower = len(around) + sum(id(each) in inside for each in models.values()) < len(models)
    return language_model if has_tower and not any(map(_makes_masks, around)) else None


def _makes_masks(module: nn.Module) -> bool:
    """Return whether a module's forward makes the masks of a language model by transformers' functions for that."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and any(name.startswith("create_masks_for_") for name in code.co_names)


def _is_of_libraries_around(module: nn.Module, whole: nn.Module) -> bool:
    """Return whether a module is the model itself, or a wrapper of PEFT's around it."""
    return module is whole or class_of(module).__module__.partition(".")[0] == "peft"


def _holds(outer: nn.Module, inner: nn.Module) -> bool:
    return any(each is inner for each in outer.modules())
