"""A model in parts: its blocks, the layers of a pipeline stage, matrices divided between ranks, weights drawn late."""

from __future__ import annotations

import zlib
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.style import ParallelStyle

from deepytorch.bench.zoo.workload import seeded
from deepytorch.errors import ConfigError

# The matrices of a block whose outputs are divided, as Megatron-LM has them, and those whose inputs are.
_COLUMNS = (
    "q_proj",
    "k_proj",
    "v_proj",
    "gate_proj",
    "up_proj",
    "self.query",
    "self.key",
    "self.value",
    "intermediate.dense",
)
_ROWS = ("o_proj", "down_proj", "output.dense")
_ENDS = ("embed_tokens", "lm_head")


def inner(model: Any) -> Any:
    """Return the model of transformers that a module is or wraps; the module, if there is none."""
    return next((each for each in model.modules() if hasattr(each, "gradient_checkpointing_enable")), model)


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return the outermost modules that stand in lists of their like, in order."""
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in model.modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)) or module in inside:
            continue
        if len({type(each) for each in module}) == 1 and next(module[0].children(), None) is not None:
            found += module
            inside.update(each for block in module for each in block.modules())
    return found


def cut(model: Any, stage: int, stages: int) -> None:
    """Leave a Llama-like decoder the layers of one pipeline stage, the embedding if it is the first, head if the last.

    Such a stage takes `inputs_embeds` unless it is the first, and its `logits` are hidden states unless it is the last.
    Raises `ConfigError` if there are more stages than layers.
    """
    body = model.model
    if len(body.layers) < stages:
        raise ConfigError(f"pipeline is {stages} for {len(body.layers)} layers; expected as many at most.")
    first, end = (len(body.layers) * each // stages for each in (stage, stage + 1))
    body.layers = body.layers[first:end]
    if stage > 0:
        body.embed_tokens = None
    if stage < stages - 1:
        body.norm, model.lm_head = nn.Identity(), nn.Identity()


def divide(model: Any, mesh: DeviceMesh) -> None:
    """Divide the matrices of a Llama-like model or a BERT between the ranks of a mesh of one axis.

    Embedding and head are divided as well, where they are two weights. Raises `ConfigError` if heads cannot be divided.
    """
    config, ranks = model.config, mesh.size()
    heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    if heads % ranks:
        raise ConfigError(f"tensor is {ranks} for {heads} heads of keys and values; expected a divisor of it.")
    plan: dict[str, ParallelStyle] = {}
    ends = _ENDS if not config.tie_word_embeddings else ()
    for name, module in model.named_modules():
        if not isinstance(module, (nn.Linear, nn.Embedding)):  # those of other stages are neither
            continue
        if name.endswith(_COLUMNS):
            plan[name] = ColwiseParallel()
        elif name.endswith(_ROWS):
            plan[name] = RowwiseParallel()
        elif name.endswith(ends):
            plan[name] = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(model, mesh, plan)


def fill(model: nn.Module, part: nn.Module, device: torch.device) -> None:
    """Draw the weights of a part of the model that has none yet, each module's from a seed of its own."""
    drawn = False
    initialize = attrgetter("_init_weights")(inner(model))  # as transformers names it
    names = {module: name for name, module in model.named_modules()}
    for module in part.modules():
        if any(each.is_meta for each in (*module.parameters(recurse=False), *module.buffers(recurse=False))):
            module.to_empty(device=device, recurse=False)
            with seeded(zlib.crc32(names[module].encode())), torch.no_grad():
                initialize(module)
            drawn = True
    if drawn and part is model:
        inner(model).tie_weights()
