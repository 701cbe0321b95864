"""A Llama is trained on batches of another kind in each case, or calls of it vary from step to step."""

import torch
import torch.nn.functional as F
from tiny import batch, case, chosen, llama, next_tokens, train, with_size

BUFFERS = [torch.zeros(4, 16, dtype=torch.long) for _ in range(3)]


@case
def batches_of_many_shapes(model, step):
    """Every batch has another number of rows and another length; the last one has a single row."""
    rows, length = [(4, 16), (3, 12), (5, 19), (1, 9)][step]
    ids, mask, labels = batch(step, rows=rows, length=length)
    outputs = model(input_ids=ids, attention_mask=mask, labels=labels)
    yield outputs.loss + F.softplus(outputs.logits).mean()


@case
def no_mask(model, step):
    """No mask is given at all: every position is a token."""
    ids, _, labels = batch(step)
    logits = model(input_ids=ids).logits
    yield next_tokens(logits, labels) + logits[:, -1].mean()


@case
def mask_sometimes(model, step):
    """The mask comes with every second batch only."""
    ids, mask, labels = batch(step)
    outputs = model(input_ids=ids, attention_mask=mask if step % 2 else None, labels=labels)
    yield outputs.loss + outputs.logits.mean()


@case
def rows_without_pads(model, step):
    """Every row is full, but there is a mask."""
    ids, _, _ = batch(step)
    outputs = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids)
    yield outputs.loss + 0.1 * outputs.logits.logsumexp(-1).mean()


@case
def mixed_padding(model, step):
    """Some rows of a batch are padded on the left, the others on the right; the loss counts all positions."""
    ids, mask, labels = batch(step, side="mixed" if step % 2 else "right")
    outputs = model(input_ids=ids, attention_mask=mask, labels=labels)
    yield outputs.loss + F.cross_entropy(outputs.logits.flatten(0, 1), ids.flatten())


@case
def left_padded(model, step):
    """Rows are padded on the left, with positions to match; the loss is the model's own."""
    ids, mask, labels = batch(step, side="left")
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    yield model(input_ids=ids, attention_mask=mask, position_ids=positions, labels=labels).loss


@case
def left_padded_last_logits(model, step):
    """Rows are padded on the left, and the last position's logits are trained."""
    ids, mask, _ = batch(step, side="left")
    logits = model(input_ids=ids, attention_mask=mask).logits[:, -1]
    yield F.cross_entropy(logits, ids[:, 5])


@case
def custom_4d_mask(model, step):
    """A mask of four dimensions, in which the prompt sees itself both ways."""
    ids, mask, labels = batch(step)
    places = torch.arange(16)
    seen = (places[:, None] >= places) | (places < 3)
    seen = seen[None, None] & mask[:, None, None].bool()
    bias = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    logits = model(input_ids=ids, attention_mask=bias).logits
    yield next_tokens(logits, labels) + 0.1 * logits.pow(2).mean()


@case
def packed_rows_by_positions(model, step):
    """Rows are packed by the script: one row, positions that begin anew, no mask."""
    ids, mask, labels = batch(step)
    tokens = mask.bool()
    positions = torch.arange(16).expand(4, 16)[tokens][None]
    labels = labels.index_fill(1, torch.tensor([0]), -100)
    yield with_size(model(input_ids=ids[tokens][None], position_ids=positions, labels=labels[tokens][None]))


@case
def outputs_as_tuple(model, step):
    """Outputs are read by index, by key and as a tuple."""
    ids, mask, labels = batch(step)
    if step < 2:
        outputs = model(input_ids=ids, attention_mask=mask, labels=labels)
        loss, logits = outputs[0], outputs["logits"] if step else outputs.to_tuple()[1]
    else:
        loss, logits = model(ids, mask, labels=labels, return_dict=False, use_cache=False)
    yield loss + 0.1 * logits.square().mean()
    yield [logits.mean().item(), *logits.shape]


@case
def outputs_after_batch_is_overwritten(model, step):
    """The batch lives in buffers that are overwritten before the logits are read."""
    for buffer, new in zip(BUFFERS, batch(step), strict=True):
        buffer.copy_(new)
    ids, mask, labels = BUFFERS
    outputs = model(input_ids=ids, attention_mask=mask, labels=labels)
    yield outputs.loss
    for buffer in BUFFERS:
        buffer.zero_()
    yield from (outputs.logits.std().item(), outputs.logits[:, -1].mean().item())


@case
def two_calls_one_backward(model, step):
    """Two batches go forward before one backward."""
    total, kept = 0.0, []
    for part in range(2):
        ids, mask, labels = batch(2 * step + part)
        outputs = model(input_ids=ids, attention_mask=mask, labels=labels)
        total = total + outputs.loss
        kept.append(outputs.logits)
    yield total + 0.1 * (kept[0] - kept[1]).pow(2).mean()


@case
def recurrent_memory(model, step):
    """The last position's hidden state goes into the next batch's first embedding, with its gradient."""
    memory, loss = torch.zeros(4, 1, 32), 0.0
    for part in range(2):
        ids, mask, labels = batch(2 * step + part)
        embedded = torch.cat([memory, model.get_input_embeddings()(ids)[:, 1:]], 1)
        outputs = model(inputs_embeds=embedded, attention_mask=mask, output_hidden_states=True)
        memory = outputs.hidden_states[-1][:, -1:]
        loss = loss + next_tokens(outputs.logits, labels)
    yield loss


torch.manual_seed(0)
history = train(llama(), chosen(), batches=lambda step: (step,))
