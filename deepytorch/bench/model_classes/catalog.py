"""The model classes of the installed transformers, by task, and small models of them with random weights."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deepytorch.bench.model_classes.small_config import small_config
from deepytorch.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

# task -> the mapping of transformers that lists its classes
TASKS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "sequence": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "token": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "question": "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
}

MOST_WEIGHTS = 20_000_000  # a model with more is not small
NUM_LABELS = 3


class NotBuilt(Exception):
    """The reason why there is no small model of a class."""


@dataclass(frozen=True, slots=True)
class ModelClass:
    """One class of models, which learns one task. family: the model type that lists it in transformers."""

    task: str
    family: str
    name: str


def model_classes(tasks: tuple[str, ...] = tuple(TASKS), only: tuple[str, ...] = ()) -> list[ModelClass]:
    """Return the classes of these tasks, each once; `only`: those of these class names or families.

    Raises `ConfigError` for a name that no class of these tasks has.
    """
    found = [each for task in tasks for each in _of_task(task)]
    for name in only:
        if not any(name in (each.name, each.family) for each in found):
            raise ConfigError(f"{name} is no class or family of {', '.join(tasks)} in the installed transformers.")
    return [each for each in found if not only or each.name in only or each.family in only]


def _of_task(task: str) -> Iterator[ModelClass]:
    from transformers.models.auto import modeling_auto

    families: dict[str, list[str]] = {}
    for family, listed in getattr(modeling_auto, TASKS[task]).items():
        for name in (listed,) if isinstance(listed, str) else listed:
            families.setdefault(name, []).append(family)
    for name, found in families.items():  # some serve several: that which the class is named after
        yield ModelClass(task, next((each for each in found if _plain(each) in name.lower()), found[0]), name)


def _plain(family: str) -> str:
    return family.replace("-", "").replace("_", "").lower()


def build_small(which: ModelClass, weights: Mapping[str, torch.Tensor] | None = None) -> PreTrainedModel:
    """Return a small model in training mode, in fp32, without dropout. weights: of an earlier one, in place of random.

    Raises `NotBuilt` if the class has no small model.
    """
    import torch  # lists of classes, which the benchmark needs, load none

    try:
        import transformers

        model_class = getattr(transformers, which.name)
        config = small_config(model_class.config_class, which.family)
        for each in (config, config.get_text_config()):
            each.num_labels = 2 if which.task == "question" else NUM_LABELS  # a start and an end
        if which.task == "causal" and hasattr(config, "is_decoder") and not config.is_encoder_decoder:
            config.is_decoder = True
        with torch.device("meta"):
            count = sum(each.numel() for each in model_class(config).parameters())
    except Exception as error:
        raise NotBuilt(told(error)) from error
    if count > MOST_WEIGHTS:
        raise NotBuilt(f"{count / 1e6:.0f} million weights with every size that is known set small")
    torch.manual_seed(0)
    try:
        model = model_class(config).float()
    except Exception as error:
        raise NotBuilt(told(error)) from error
    if weights is not None:
        model.load_state_dict(weights)
    for module in model.modules():
        if type(module).__module__ == "torch.nn.modules.dropout":
            module.p = 0.0
    return model.train()


def told(error: BaseException) -> str:
    """Return an error in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines)}"[:300]


def forward_arguments(model: Any) -> set[str]:
    """Return the names of the arguments of a model's forward."""
    return set(inspect.signature(model.forward).parameters)
