"""Hooks on inner modules, and on all modules, come after training has begun; later they go, or are replaced."""

import torch
import torch.nn.modules.module as of_all
from torch import nn

DEFAULT = True


def halve_output(module, given, output):
    calls.append(1)
    return output * 0.5


def change_input(module, given):
    return (given[0] * 0.5,)


def change_gradients(module, into, out):
    return (into[0] * 0.5,)


def change_gradient_of_output(module, out):
    return (out[0] * 0.5,)


def of_linear(module, given, output):
    return output * 0.9 if isinstance(module, nn.Linear) else None


def gradients_of_linear(module, into, out):
    return (into[0] * 0.9,) if isinstance(module, nn.Linear) and into[0] is not None else None


KINDS = [
    lambda model: model[1].register_forward_hook(halve_output),
    lambda model: model[2].register_forward_pre_hook(change_input),
    lambda model: model[2].register_full_backward_hook(change_gradients),
    lambda model: model[2].register_full_backward_pre_hook(change_gradient_of_output),
    lambda model: of_all.register_module_forward_hook(of_linear),
    lambda model: of_all.register_module_full_backward_hook(gradients_of_linear),
]
history, calls = [], []
for number, register in enumerate(KINDS):
    torch.manual_seed(number)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(7):
        if step == 2:
            handle = register(model)
        if step == 4:
            handle.remove()
        if step == 5 and number == 0:  # another one in its place
            handle = model[1].register_forward_hook(lambda module, given, output: output * 0.25)
        optimizer.zero_grad()
        loss = model(torch.randn(6, 8)).pow(2).mean()
        loss.backward()
        optimizer.step()
        history.append([loss.item(), len(calls)])
    history.append([weight.detach().norm().item() for weight in model.parameters()])
