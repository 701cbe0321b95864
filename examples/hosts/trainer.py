"""Hugging Face Trainer, with one line more: `python examples/hosts/trainer.py`, or under torchrun.

`TrainingArguments(torch_compile=True, torch_compile_backend="deepytorch")` says the same in its own words.
"""

import deepytorch  # the one line

import torch
from text import padded_batches, small_llama
from transformers import Trainer, TrainingArguments

arguments = TrainingArguments(
    "/tmp/deepytorch-trainer",
    per_device_train_batch_size=1,  # the rows come collated
    max_steps=20,
    logging_steps=5,
    save_strategy="no",
    report_to=[],
    use_cpu=not torch.cuda.is_available(),
)
trainer = Trainer(small_llama(), arguments, lambda rows: rows[0], train_dataset=list(padded_batches(20)))
trainer.train()  # its logs show deepytorch/* beside the loss
print(deepytorch.report())
