"""TRL's trainers with their defaults, but for sizes, dtype and learning rate; their losses are recorded."""

import tempfile

import pytest
import torch
from tiny import TIMES, VOCAB, case, chosen, llama, norms

pytest.importorskip("trl")
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

WORDS = [f"w{number}" for number in range(3, VOCAB)]
STEPS = 6 * TIMES


def tokenizer():
    names = {"<pad>": 0, "<bos>": 1, "<eos>": 2, **{word: number for number, word in enumerate(WORDS, 3)}}
    words = Tokenizer(WordLevel(names, unk_token="<pad>"))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")


def texts(count, most, seed):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, most, (count,), generator=generator).tolist()
    return [" ".join(WORDS[at] for at in torch.randint(0, len(WORDS), (n,), generator=generator)) for n in lengths]


def rows(**columns):
    """A data set of texts of uneven lengths: the longest text of each column in words."""
    found = {name: texts(32, most, seed) for seed, (name, most) in enumerate(columns.items())}
    return Dataset.from_dict(
        {name: each if name == "prompt" else [f" {text}" for text in each] for name, each in found.items()}
    )


def trained(kind, config, dataset, numbers=("loss",), **more):
    model = llama()
    folder = tempfile.mkdtemp()
    model.save_pretrained(folder)
    model.config._name_or_path = folder  # whence TRL takes the reference model
    settings = {
        "max_steps": STEPS, "per_device_train_batch_size": 4, "learning_rate": 1e-3, "logging_steps": 1,
        "report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "bf16": False,
    }  # fmt: skip
    trainer = kind(
        model=model,
        args=config(output_dir=folder, **{**settings, **more}),
        train_dataset=dataset,
        processing_class=tokenizer(),
    )
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [*([entry[name] for name in numbers] for entry in logged), norms(model)]


@case(expect="packed")
def sft():
    """Supervised fine-tuning with its defaults: gradient checkpointing, its fused head, its metrics."""
    from trl import SFTConfig, SFTTrainer

    return trained(SFTTrainer, SFTConfig, rows(prompt=6, completion=14), ("loss", "mean_token_accuracy", "entropy"))


@case(expect="packed")
def dpo():
    """Preferences, with a reference model of its own."""
    from trl import DPOConfig, DPOTrainer

    dataset = rows(prompt=6, chosen=12, rejected=10)
    return trained(DPOTrainer, DPOConfig, dataset, ("loss", "rewards/margins"))


@case(expect="packed")
def kto():
    """Desirable and undesirable completions; a mismatched pairing estimates the divergence."""
    from trl import KTOConfig, KTOTrainer

    dataset = rows(prompt=6, completion=12).add_column("label", [at % 3 != 0 for at in range(32)])
    return trained(KTOTrainer, KTOConfig, dataset)


@case(expect="padded")
def orpo():
    """Odds ratios; the mean of all logits, pads among them, is logged in each step, and few positions are pads."""
    return odds_ratios(rows(prompt=6, chosen=12, rejected=10), max_length=24)


@case(expect="packed")
def orpo_of_uneven_rows():
    """Most positions are pads: the step is packed, and a padded forward gives the mean of all logits."""
    dataset = rows(prompt=3, chosen=60, rejected=4)
    return odds_ratios(dataset, max_length=64)


def odds_ratios(dataset, **settings):
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    return trained(ORPOTrainer, ORPOConfig, dataset, ("loss", "logits/chosen"), **settings)


torch.manual_seed(0)
history = chosen()()
