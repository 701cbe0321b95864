"""A custom autograd function gets logits of a later step only: for `autograd.grad`, twice, and with another use."""

import torch
from tiny import TIMES, batch, llama, norms

DEFAULT = True


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def trained(use):
    torch.manual_seed(0)
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(4 * TIMES):
        ids, mask, labels = batch(step)
        optimizer.zero_grad()
        outputs = model(input_ids=ids, attention_mask=mask, labels=labels)
        if step == 4 * TIMES - 2:
            use(model, outputs, Scale.apply(outputs.logits).pow(2).mean())
        else:
            outputs.loss.backward()
        history.append([0 if each.grad is None else each.grad.norm() for each in model.parameters()])
        optimizer.step()
    history.append(norms(model))


def by_autograd_grad(model, outputs, extra):
    found = torch.autograd.grad(outputs.loss + extra, list(model.parameters()))
    history.append([each.norm() for each in found])


def twice(model, outputs, extra):
    extra.backward(retain_graph=True)
    extra.backward()


def beside_another_use(model, outputs, extra):
    (outputs.loss + extra + outputs.logits.abs().mean()).backward()


history = []
for use in (by_autograd_grad, twice, beside_another_use):
    trained(use)
