"""The recipes of fine-tuning in `deepytorch bench hosts`, as users write them; nothing in them refers to deepytorch."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepytorch.bench.host_loops import Batch, OwnLoop, Step, Trainer, tokenizer_of_ids, with_adapters

_BETA = 0.1  # of DPO and ORPO
_CLIPPED = 0.2  # of GRPO's ratio
_EVALUATIONS = 3  # calls of an evaluation, behind each training step


class CheckpointedLowRank(Trainer):
    """LoRA with gradient checkpointing in Hugging Face's Trainer."""

    def __init__(self, model: Any, batches: Sequence[Batch], folder: Path) -> None:
        adapted = with_adapters(model, "all-linear", task_type="CAUSAL_LM")
        adapted.enable_input_require_grads()
        super().__init__(adapted, batches, folder)

    def arguments(self, save: Path, save_steps: int) -> dict[str, Any]:
        given = super().arguments(save, save_steps)
        del given["ddp_backend"]  # this recipe is one process
        return given | {"gradient_checkpointing": True}


class Preferences(OwnLoop):
    """DPO: rows by turns chosen and rejected, against a frozen copy of the model."""

    def __init__(self, model: Any, batches: Sequence[Batch], folder: Path) -> None:
        super().__init__(model, batches, folder)
        self._reference = copy.deepcopy(model).eval().requires_grad_(False)

    def step(self, batch: Batch) -> Tensor:
        with torch.no_grad():
            expected = _log_probs(self._reference, batch).sum(1)
        ratios = _log_probs(self.model, batch).sum(1) - expected
        return self.stepped(-F.logsigmoid(_BETA * (ratios[::2] - ratios[1::2])).mean())


class OddsRatios(OwnLoop):
    """ORPO, with TRL's metrics: the mean of all logits, pads among them, which takes one more forward."""

    def step(self, batch: Batch) -> Tensor:
        logits = self.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        found, labels = _of_labels(logits, batch["labels"])
        means = found.sum(1) / (labels != -100).sum(1)
        odds = means - torch.log1p(-means.exp().clamp(max=1 - 1e-6))
        loss = -means[::2].mean() - _BETA * F.logsigmoid(odds[::2] - odds[1::2]).mean()
        self.mean_logits = float(logits.detach().mean())
        return self.stepped(loss)


class PolicyRatios(OwnLoop):
    """GRPO without its generation: log-probabilities of before, then two steps by the clipped ratio to these."""

    def step(self, batch: Batch) -> Tensor:
        mask = (batch["labels"][:, 1:] != -100).float()
        advantages = torch.linspace(-0.5, 1.0, mask.shape[0])[:, None]
        with torch.no_grad():
            before = _log_probs(self.model, batch)
        for _ in range(2):
            ratio = torch.exp(_log_probs(self.model, batch) - before)
            gain = torch.minimum(ratio * advantages, ratio.clamp(1 - _CLIPPED, 1 + _CLIPPED) * advantages)
            loss = self.stepped(-((gain * mask).sum(1) / mask.sum(1).clamp(min=1)).mean())
        return loss


class Evaluation(OwnLoop):
    """Evaluations behind each training step; they alone are timed, and theirs is the loss."""

    def timed(self, number: int) -> Step:
        began = self.begin()
        self.step(self.batches[number])
        self.model.eval()
        started = time.perf_counter()
        with torch.no_grad():
            asked = [self.batches[(number + more) % len(self.batches)] for more in range(_EVALUATIONS)]
            losses = [float(self.model(**batch).loss) for batch in asked]
        seconds = time.perf_counter() - started
        self.model.train()
        self.end(began)
        return Step(sum(losses) / len(losses), seconds)


class SentenceEmbeddings(OwnLoop):
    """sentence-transformers: rows of the batch's first half against the second half, all of them negatives."""

    def __init__(self, model: Any, batches: Sequence[Batch], folder: Path) -> None:
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.losses import MultipleNegativesRankingLoss
        from sentence_transformers.models import Pooling, Transformer

        path = folder / "encoder"
        model.base_model.save_pretrained(path)
        tokenizer_of_ids().save_pretrained(path)
        pooling = Pooling(model.config.hidden_size)
        embedder: nn.Module = SentenceTransformer(modules=[Transformer(str(path)), pooling], device="cpu").train()
        super().__init__(embedder, batches, folder)
        self._loss: Any = MultipleNegativesRankingLoss(embedder)

    def step(self, batch: Batch) -> Tensor:
        rows = {name: batch[name] for name in ("input_ids", "attention_mask")}
        half = len(batch["input_ids"]) // 2
        sides = [{name: each[part] for name, each in rows.items()} for part in (slice(half), slice(half, 2 * half))]
        return self.stepped(self._loss(sides, None))


def _of_labels(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities of labels, (rows, positions - 1), zero where one is ignored, and these labels."""
    logits, labels = logits[:, :-1], labels[:, 1:]
    asked = labels.clamp(min=0)
    found = logits.gather(-1, asked[..., None]).squeeze(-1) - logits.logsumexp(-1)
    return found * (labels != -100), labels


def _log_probs(model: Any, batch: Batch) -> Tensor:
    """Return the log-probabilities of a batch's labels, (rows, positions - 1)."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return _of_labels(logits, batch["labels"])[0]
