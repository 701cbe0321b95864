"""transformers' Trainer with a compute_loss of the script's own that reads all logits, and an evaluation."""

import tempfile

import torch
from tiny import batch, llama, norms
from transformers import Trainer, TrainingArguments


class Sharper(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        loss = outputs.loss + 0.1 * outputs.logits.pow(2).mean()
        return (loss, outputs) if return_outputs else loss


torch.manual_seed(0)
model = llama()
rows = []
for step in range(4):
    rows += [
        dict(zip(("input_ids", "attention_mask", "labels"), row, strict=True)) for row in zip(*batch(step), strict=True)
    ]
arguments = TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    per_device_train_batch_size=4,
    max_steps=4,
    learning_rate=1e-2,
    logging_steps=1,
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
    save_strategy="no",
)
trainer = Sharper(
    model=model,
    args=arguments,
    train_dataset=rows,
    eval_dataset=rows[:4],
    compute_metrics=lambda found: {"mean": float(found.predictions[0].mean())},
)
trainer.train()
history = [[entry["loss"], entry["grad_norm"]] for entry in trainer.state.log_history if "loss" in entry]
judged = trainer.evaluate()
history.append([judged["eval_loss"], judged["eval_mean"]])
history.append(norms(model))
