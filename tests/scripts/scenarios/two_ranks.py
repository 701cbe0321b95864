"""Two ranks train a model under DistributedDataParallel, each on batches of its own."""

import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tiny import batch, bert, case, chosen, llama, next_tokens, norms, train
from torch import nn
from torch.nn.parallel import DistributedDataParallel

RANKS = 2


def mine(number):
    return batch(10 * dist.get_rank() + number)


@case(default=True)
def ddp_loss_inside():
    """The model's own loss; losses are averaged over ranks for the log."""

    def step(model, ids, mask, labels):
        loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        yield loss
        yield mean.item() / 2

    return train(DistributedDataParallel(llama()), step, steps=3, batches=mine)


@case
def ddp_loss_outside_counting_pads():
    """The loss stands outside and counts pads."""

    def step(model, ids, mask, labels):
        logits = model(input_ids=ids, attention_mask=mask).logits
        yield next_tokens(logits, ids)

    return train(DistributedDataParallel(llama()), step, steps=3, batches=mine)


@case
def ddp_outputs_on_one_rank():
    """Only the first rank reads all logits, for a metric."""

    def step(model, ids, mask, labels):
        outputs = model(input_ids=ids, attention_mask=mask, labels=labels)
        yield outputs.loss
        if dist.get_rank() == 0:
            yield from (outputs.logits.std().item(), outputs.logits.argmax(-1).float().mean().item())

    return train(DistributedDataParallel(llama()), step, batches=mine)


@case
def ddp_two_backwards():
    """Two losses of one forward, each with a backward of its own."""

    def step(model, ids, mask, labels):
        outputs = model(input_ids=ids, attention_mask=mask, labels=labels)
        with model.no_sync():
            outputs.loss.backward(retain_graph=True)
        yield 0.1 * outputs.logits.pow(2).mean()
        for weight in model.parameters():
            dist.all_reduce(weight.grad)
        yield from (outputs.loss.item(), [weight.grad.norm() for weight in model.parameters()])

    return train(DistributedDataParallel(llama()), step, steps=3, batches=mine)


@case
def ddp_unused_parameters():
    """With find_unused_parameters: heads are used by turns."""

    class TwoHeads(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = bert()
            self.heads = nn.ModuleList([nn.Linear(32, 3), nn.Linear(32, 3)])

        def forward(self, ids, mask, which):
            return self.heads[which](self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state)

    def step(model, number):
        ids, mask, _ = mine(number)
        logits = model(ids, mask, number % 2)
        yield F.cross_entropy(logits.mean(1), ids[:, 1] % 3) + F.cross_entropy(logits[:, 0], ids[:, 1] % 3)

    model = DistributedDataParallel(TwoHeads(), find_unused_parameters=True)
    return train(model, step, batches=lambda number: (number,))


@case
def ddp_wrapped_again():
    """A model is wrapped three times, as by several Trainers; the last two wrappers take turns, and wait together."""
    model, recorded = llama(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_of(wrapped, number):
        ids, mask, labels = mine(number)
        return wrapped(input_ids=ids, attention_mask=mask, labels=labels).loss

    def step(number, *wrapped):
        losses = [loss_of(each, number) for each in wrapped]
        for loss in losses:
            loss.backward()
        recorded.extend([*[loss.item() for loss in losses], torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)])
        optimizer.step()
        optimizer.zero_grad()

    first = DistributedDataParallel(model)
    for number in range(3):
        step(number, first)
    with torch.no_grad():
        recorded.append(loss_of(first, 3).item())
    loss_of(first, 3)  # without a backward
    del first
    second = DistributedDataParallel(model, find_unused_parameters=True)
    for number in range(3):
        step(number, second)
    third = DistributedDataParallel(model)
    for number in range(4):
        step(number, (second, third)[number % 2])
    step(9, second, third)
    return [*recorded, norms(model)]


@case
def ddp_no_sync():
    """Accumulation with no_sync, and a loss outside that counts pads."""
    model, recorded = DistributedDataParallel(llama()), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        ids, mask, _ = mine(step)
        with contextlib.nullcontext() if step % 2 else model.no_sync():
            logits = model(input_ids=ids, attention_mask=mask).logits
            loss = next_tokens(logits, ids) / 2
            loss.backward()
        if step % 2:
            recorded.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
            optimizer.step()
            optimizer.zero_grad()
    return [*recorded, norms(model)]


@case
def ranks_gather_embeddings():
    """Ranks gather their pooled embeddings for a contrastive loss, without DistributedDataParallel."""

    def step(model, ids, mask, labels):
        mine = F.normalize(model(input_ids=ids, attention_mask=mask).last_hidden_state.mean(1), dim=-1)
        everyone = [torch.empty_like(mine) for _ in range(2)]
        dist.all_gather(everyone, mine.detach())
        everyone[dist.get_rank()] = mine
        scores = mine @ torch.cat(everyone).T / 0.2
        yield F.cross_entropy(scores, 4 * dist.get_rank() + torch.arange(4).roll(1))

    model = bert()
    for weight in model.parameters():
        weight.register_post_accumulate_grad_hook(lambda weight: dist.all_reduce(weight.grad))
    return train(model, step, steps=3, batches=mine)


torch.manual_seed(0)
dist.init_process_group("gloo")
history = chosen()()
dist.destroy_process_group()
