"""TRL's supervised fine-tuning with its defaults (bf16, gradient checkpointing), on rows of different lengths."""

import random
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import SFTConfig, SFTTrainer

torch.manual_seed(0)
random.seed(0)
WORDS = [f"w{number}" for number in range(995)]
vocabulary = {word: number for number, word in enumerate(["<pad>", "<bos>", "<eos>", "<unk>", *WORDS])}
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(WordLevel(vocabulary, unk_token="<unk>")),
    pad_token="<pad>", bos_token="<bos>", eos_token="<eos>",
)  # fmt: skip
rows = [[random.randrange(4, 999) for _ in range(random.randrange(8, 65))] for _ in range(4000)]
model = Qwen2ForCausalLM(
    Qwen2Config(
        vocab_size=1000, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )
)  # fmt: skip
with tempfile.TemporaryDirectory() as folder:
    SFTTrainer(
        model=model,
        args=SFTConfig(
            folder, max_steps=1_000_000, save_strategy="no", logging_strategy="no", report_to="none", use_cpu=True
        ),
        train_dataset=Dataset.from_dict({"input_ids": rows}),
        processing_class=tokenizer,
    ).train()
