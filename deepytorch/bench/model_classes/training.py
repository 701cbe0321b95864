"""A few optimizer steps of a model, with everything that they gave."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from deepytorch.bench.model_classes.batches import IGNORED, Batch
from deepytorch.bench.model_classes.catalog import forward_arguments

LEARNING_RATE = 0.05  # of plain SGD, which does not amplify rounding as Adam's division does

Numbers = dict[str, torch.Tensor]  # by name: "loss", "output NAME", "gradient NAME", "weight NAME"


def train(model: Any, batches: Sequence[Batch], after_step: Callable[[], None] = lambda: None) -> list[Numbers]:
    """Return the numbers of each step: loss, outputs at real tokens, all gradients; at the end the weights too."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    found = []
    for number, batch in enumerate(batches):
        torch.manual_seed(number)
        arguments = dict(batch.arguments)
        labels = arguments.get("labels")
        if labels is not None and "labels" not in forward_arguments(model):
            del arguments["labels"]
        outputs = model(**arguments)
        loss = outputs.get("loss")
        if loss is None:
            loss = _next_token_loss(outputs["logits"], labels)
        numbers: Numbers = {"loss": loss.detach().clone()}
        for name in ("logits", "start_logits", "end_logits"):
            output = outputs.get(name)
            if isinstance(output, torch.Tensor):
                numbers[f"output {name}"] = _at_tokens(output.detach(), batch.mask).clone()
        loss.backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                numbers[f"gradient {name}"] = parameter.grad.detach().clone()
        optimizer.step()
        optimizer.zero_grad()
        found.append(numbers)
        after_step()
    for name, parameter in model.named_parameters():
        found[-1][f"weight {name}"] = parameter.detach().clone()
    return found


def move_by_last_bit(model: torch.nn.Module) -> None:
    """Move every weight to the next number."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.copy_(torch.nextafter(parameter, torch.full_like(parameter, torch.inf)))


def _at_tokens(output: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return output[mask] if output.shape[:2] == mask.shape else output


def _next_token_loss(logits: torch.Tensor, labels: torch.Tensor | None) -> torch.Tensor:
    if labels is None:
        raise ValueError("there is neither a loss nor labels")
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1), ignore_index=IGNORED
    )
