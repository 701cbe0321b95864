"""A small head outside of a model is trained with it, on hidden states that each case pools in its way."""

import torch
from tiny import batch, bert, case, chosen, llama, train
from torch import nn
from transformers import LlamaModel


@case
def pool_cls(body, step, ids, mask):
    """The first position, and what the model pools by itself."""
    outputs = body(input_ids=ids, attention_mask=mask)
    yield outputs.last_hidden_state[:, 0] + outputs.pooler_output


@case
def pool_max(body, step, ids, mask):
    """The largest value over all positions."""
    yield body(input_ids=ids, attention_mask=mask)[0].max(dim=1).values


@case(default=True)
def pool_masked_mean(body, step, ids, mask):
    """The mean over the tokens, as sentence embeddings are made."""
    hidden = body(input_ids=ids, attention_mask=mask).last_hidden_state
    weights = mask.unsqueeze(-1).expand(hidden.size()).float()
    yield (hidden * weights).sum(1) / weights.sum(1).clamp(min=1e-9)


@case(default=True)
def pool_mean_all_positions(body, step, ids, mask):
    """The mean over all positions, pads among them."""
    yield body(input_ids=ids, attention_mask=mask).last_hidden_state.mean(dim=1)


@case(lowering="inductor")
def pooling_inductor(body, step, ids, mask):
    """The mean over all positions and over the tokens, by turns; compiled by Inductor."""
    hidden = body(input_ids=ids, attention_mask=mask).last_hidden_state
    yield hidden.mean(1) if step % 2 else (hidden * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)


@case
def pool_learned_attention(body, step, ids, mask):
    """Weights over positions are learned; without a mask at first, then with one."""
    hidden = body(input_ids=ids, attention_mask=mask).last_hidden_state
    scores = score(hidden).squeeze(-1)
    if step >= 2:
        scores = scores.masked_fill(mask == 0, float("-inf"))
    yield torch.einsum("bs,bsh->bh", scores.softmax(-1), hidden)


@case
def recurrent_head(body, step, ids, mask):
    """A recurrent network outside of the model reads all positions, backwards too."""
    read, _ = recurrent(body(input_ids=ids, attention_mask=mask).last_hidden_state)
    yield read[:, 0]


@case
def pool_last_position(body, step, ids, mask):
    """The last position of a decoder, which is a pad in most rows."""
    yield body(input_ids=ids, attention_mask=mask).last_hidden_state[:, -1]


@case
def pool_last_token(body, step, ids, mask):
    """Each row's last token, by index, of a decoder."""
    hidden = body(input_ids=ids, attention_mask=mask).last_hidden_state
    yield hidden[torch.arange(len(ids)), mask.sum(1) - 1]


def pooled_loss(parts, step):
    ids, mask, _ = batch(step)
    pooling = chosen()(body, step, ids, mask)
    yield nn.functional.cross_entropy(head(next(pooling)), ids[:, 1] % 2)


torch.manual_seed(0)
body = llama(LlamaModel) if chosen() in (pool_last_position, pool_last_token) else bert()
head, score = nn.Linear(32, 2), nn.Linear(32, 1)
recurrent = nn.LSTM(32, 16, batch_first=True, bidirectional=True)
parts = nn.ModuleList([body, head, score, recurrent])
history = train(parts, pooled_loss, torch.optim.SGD(parts.parameters(), lr=0.05), batches=lambda step: (step,))
