"""Tiny models with random weights, and batches of rows of uneven lengths."""

import os

import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

VOCAB = 96
# How many times its usual steps a script takes: more where compiled code is to take over in the midst of them.
TIMES = int(os.environ.get("SCENARIO_TIMES", "1"))


def llama_config(**changes):
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.15,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return LlamaConfig(**{**settings, **changes})


def llama(kind=LlamaForCausalLM, **changes):
    return kind(llama_config(**changes)).train()


def bert_config(**changes):
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "initializer_range": 0.15,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
    return BertConfig(**{**settings, **changes})


def bert(kind=BertModel, **changes):
    return kind(bert_config(**changes)).train()


def gpt2(kind=GPT2LMHeadModel, **changes):
    settings = {
        "vocab_size": VOCAB,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
        "initializer_range": 0.15,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return kind(GPT2Config(**{**settings, **changes})).train()


def t5(kind=T5ForConditionalGeneration, **changes):
    settings = {
        "vocab_size": VOCAB,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 64,
        "num_layers": 2,
        "num_heads": 4,
        "dropout_rate": 0.0,
        "decoder_start_token_id": 0,
        "pad_token_id": 0,
        "eos_token_id": 2,
    }
    return kind(T5Config(**{**settings, **changes})).train()


def bart(kind=BartForConditionalGeneration, **changes):
    settings = {
        "vocab_size": VOCAB,
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "max_position_embeddings": 64,
        "init_std": 0.15,
        "dropout": 0.0,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 2,
        "forced_eos_token_id": None,
    }
    return kind(BartConfig(**{**settings, **changes})).train()


def batch(step=0, rows=4, length=16, side="right"):
    """Token ids, mask and labels (-100 at pads) of one batch; side: where the pads are, "right", "left" or "mixed"."""
    generator = torch.Generator().manual_seed(1000 + step)
    lengths = torch.randint(3, length, (rows,), generator=generator)
    lengths[step % rows] = length
    ids = torch.randint(3, VOCAB, (rows, length), generator=generator)
    mask = (torch.arange(length) < lengths[:, None]).long()
    if side == "left":
        mask = mask.flip(1)
    elif side == "mixed":
        mask[::2] = mask[::2].flip(1)
    ids = ids * mask
    return ids, mask, ids.masked_fill(mask == 0, -100)


def norms(model):
    """The norm of every parameter."""
    return [weight.detach().norm().item() for weight in model.parameters()]
