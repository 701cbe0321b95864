"""transformers' Trainer, whose log is recorded."""

import tempfile

import torch
from tiny import batch, case, chosen, llama, norms
from transformers import Trainer, TrainingArguments

NAMES = ("input_ids", "attention_mask", "labels")


def trained(kind=Trainer, evaluated=(), **changes):
    settings = {"max_steps": 4, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "logging_steps": 1,
                "report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}  # fmt: skip
    rows = [dict(zip(NAMES, row, strict=True)) for step in range(4) for row in zip(*batch(step), strict=True)]
    trainer = kind(
        model=llama(),
        args=TrainingArguments(output_dir=tempfile.mkdtemp(), **{**settings, **changes}),
        train_dataset=rows,
        eval_dataset=rows[:4],
        compute_metrics=lambda found: {"mean": float(found.predictions[0].mean())},
    )
    trainer.train()
    recorded = [[entry["loss"], entry["grad_norm"]] for entry in trainer.state.log_history if "loss" in entry]
    judged = trainer.evaluate() if evaluated else {}
    return [*recorded, [judged[name] for name in evaluated], norms(trainer.model)]


@case(expect="packed")
def trainer_plain():
    """The model's own loss."""
    return trained()


@case
def trainer_label_smoothing():
    """The Trainer smooths labels by its own means, from the model's logits."""
    batches = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    return trained(max_steps=3, label_smoothing_factor=0.1, **batches)


@case
def trainer_compute_loss():
    """A compute_loss of the script's own that reads all logits, and an evaluation."""

    class Sharper(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            outputs = model(**inputs)
            loss = outputs.loss + 0.1 * outputs.logits.pow(2).mean()
            return (loss, outputs) if return_outputs else loss

    return trained(Sharper, evaluated=("eval_loss", "eval_mean"))


torch.manual_seed(0)
history = chosen()()
