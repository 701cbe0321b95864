"""What stands in classes changes after training has begun: a number, a method, a library's method; so do globals."""

import torch
import torch.nn.functional as F
from torch import nn

DEFAULT = True
FACTOR = 1.0


class Part(nn.Module):
    scale = 1.0

    def __init__(self):
        super().__init__()
        self.inner, self.outer, self.drop = nn.Linear(8, 8), nn.Linear(8, 4), nn.Dropout(0.0)

    def forward(self, x):
        return self.outer(self.drop(torch.tanh(self.inner(x)))) * self.scale * FACTOR


def of_class(kind, model):
    kind.scale = 0.3


def of_instance(kind, model):
    model.scale = 0.7


def method(kind, model):
    kind.forward = lambda self, x: self.outer(self.inner(x))


def forward_of_instance(kind, model):
    model.inner.forward = lambda x: F.linear(x, model.inner.weight) * 2


def of_library(kind, model):
    nn.Dropout.forward = lambda self, x: x * 0.5


def swapped(kind, model):
    model.inner = nn.Sequential(nn.Linear(8, 8), nn.ReLU())


def global_number(kind, model):
    global FACTOR
    FACTOR = 0.5


def mode_of_part(kind, model):
    model.drop.p = 1.0
    model.drop.eval()


def frozen(kind, model):
    model.inner.weight.requires_grad = False


def other_weight(kind, model):
    model.inner.weight = nn.Parameter(torch.full((8, 8), 0.1))


history, plain = [], nn.Dropout.forward
for number, change in enumerate(
    [of_class, of_instance, method, forward_of_instance, of_library, swapped, global_number, mode_of_part, frozen,
     other_weight]
):  # fmt: skip
    torch.manual_seed(number)
    kind = type("Part", (Part,), {})
    FACTOR, model = 1.0, kind().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    for step in range(5):
        if step == 3:
            change(kind, model)
        optimizer.zero_grad()
        loss = model(torch.randn(6, 8)).pow(2).mean()
        loss.backward()
        optimizer.step()
        history.append([loss.item(), sum(weight.grad is not None for weight in model.parameters())])
    nn.Dropout.forward = plain
