"""Tiny models with random weights, batches of rows of uneven lengths, and the loop of scripts that differ little."""

import os
import sys

import torch
import torch.nn.functional as F
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
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
WIDTHS = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
          "num_attention_heads": 4, "max_position_embeddings": 64, "initializer_range": 0.15}  # fmt: skip


def llama(kind=LlamaForCausalLM, **changes):
    return kind(LlamaConfig(**{**WIDTHS, **SPECIAL, "num_key_value_heads": 2, **changes})).train()


def bert(kind=BertModel, **changes):
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return kind(BertConfig(**{**WIDTHS, **still, **changes})).train()


def gpt2(kind=GPT2LMHeadModel, **changes):
    widths = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return kind(GPT2Config(**{**widths, **still, **SPECIAL, "initializer_range": 0.15, **changes})).train()


def t5(kind=T5ForConditionalGeneration, **changes):
    widths = {"vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    ids = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 2}
    return kind(T5Config(**{**widths, **ids, "dropout_rate": 0.0, **changes})).train()


def bart(kind=BartForConditionalGeneration, **changes):
    sides = {"layers": 2, "attention_heads": 4, "ffn_dim": 64}
    widths = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in sides.items()}
    widths |= {"vocab_size": VOCAB, "d_model": 32, "max_position_embeddings": 64, "init_std": 0.15, "dropout": 0.0}
    ids = {**SPECIAL, "decoder_start_token_id": 2, "forced_eos_token_id": None}
    return kind(BartConfig(**{**widths, **ids, **changes})).train()


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


def next_tokens(logits, targets):
    """The loss of each position's logits against the next position's target: ids count pads, labels ignore them."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten())


def with_size(outputs):
    """The model's own loss and, at all positions, the size of its logits."""
    return outputs.loss + 0.1 * outputs.logits.pow(2).mean()


def case(function=None, **constants):
    """Mark one of several scenarios in a file, which is run by the function's name; constants: as those of a module."""
    return function if function is not None else lambda function: function


def chosen():
    """The case that this process is to run."""
    return vars(sys.modules["__main__"])[sys.argv[1]]


def train(model, step, optimizer=None, steps=4, batches=batch):
    """What a script records that trains `model`: a list of numbers a step, and the norms of weights in the end.

    `step(model, *batches(number))` yields the loss, is resumed after the optimizer's step, and yields what is recorded
    beside the loss. As in a script, what it holds lives until the model has been called again.
    """
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    history, running = [], None
    for number in range(steps * TIMES):
        optimizer.zero_grad()
        current = step(model, *batches(number))
        loss = next(current)
        running = current  # what the step before held goes only now
        loss.backward()
        optimizer.step()
        history.append([loss.item(), *running])
    return [*history, norms(model)]


def counting_pads(model, ids, mask, labels):
    """A step whose loss stands outside of the model and counts pads."""
    logits = model(input_ids=ids, attention_mask=mask).logits
    yield next_tokens(logits, ids)


def loss_and_size(model, ids, mask, labels):
    """A step of the model's own loss, which reads all logits beside it."""
    outputs = model(input_ids=ids, attention_mask=mask, labels=labels)
    yield with_size(outputs)
