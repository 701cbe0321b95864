"""Gradient checkpointing with dropout, where the gradient of an output is looked at so that steps run in eager.

The loss is linear in the weights of the last normalisation, so their gradients tell which forward was differentiated.
"""

import torch
from tiny import TIMES, batch, bert

DEFAULT = True
torch.manual_seed(0)
model = bert(hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)
model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
last = model.encoder.layer[-1].output.LayerNorm
torch.nn.init.normal_(last.bias)
direction, history = torch.randn(32), []


def norms_of_gradients():
    return sum(weight.grad.norm().item() for weight in model.parameters() if weight.grad is not None)


for step in range(4 * TIMES):
    ids, mask, _ = batch(step)
    hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state
    hidden.register_hook(lambda gradient: None)
    loss = (hidden * direction * mask[..., None]).sum()
    loss.backward()
    by_gradient = (last.weight * last.weight.grad).sum() + (last.bias * last.bias.grad).sum()
    history.append([loss.item(), by_gradient.item(), norms_of_gradients()])
    optimizer.step()
    optimizer.zero_grad()
