"""TRL's SFTTrainer, with one line more: `python examples/hosts/trl_sft.py`."""

import deepytorch  # the one line

import torch
from datasets import Dataset
from text import VOCABULARY, small_llama
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from deepytorch.data import EOS_ID, PAD_ID, library_rows, prompt_text, train_tokenizer

rows = library_rows()
words = train_tokenizer(rows, VOCABULARY)
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=words, pad_token=words.id_to_token(PAD_ID), eos_token=words.id_to_token(EOS_ID)
)
dataset = Dataset.from_list([{"prompt": prompt_text(row), "completion": row.output} for row in rows[:400]])
arguments = SFTConfig(
    "/tmp/deepytorch-sft",
    per_device_train_batch_size=8,
    max_length=384,
    max_steps=20,
    logging_steps=5,
    save_strategy="no",
    report_to=[],
    bf16=False,
    use_cpu=not torch.cuda.is_available(),
)
trainer = SFTTrainer(small_llama(), arguments, train_dataset=dataset, processing_class=tokenizer)
trainer.train()
print(deepytorch.report())
