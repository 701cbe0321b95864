"""transformers' Trainer with the model's own loss; its log is recorded."""

import tempfile

import torch
from tiny import batch, llama, norms
from transformers import Trainer, TrainingArguments

EXPECT = "packed"

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
trainer = Trainer(model=model, args=arguments, train_dataset=rows)
trainer.train()
history = [[entry["loss"], entry["grad_norm"]] for entry in trainer.state.log_history if "loss" in entry]
history.append(norms(model))
