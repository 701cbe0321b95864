"""ZeRO under DeepSpeed itself, on a group that sends a byte for each value between hosts."""

from __future__ import annotations

import importlib.util
import re

import pytest

from tests.comm.ranks import run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600, func_only=True),
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"),
]

# Two hosts of one rank: which collectives DeepSpeed called, and the loss at the beginning and the end.
TRAINING = """
pretend_hosts(1)
os.environ.setdefault("DS_ACCELERATOR", "cpu")
import deepspeed
deepytorch.switch.SWITCH.enabled = True
deepytorch.configure(process_groups=Options(quantize={wire!r}))
init("gloo", timeout=120)
deepytorch.switch.SWITCH.enabled = False
make_group = dist.new_group
def new_group(*given, **named):  # DeepSpeed's own groups are ours too; the model is left as it is
    deepytorch.switch.SWITCH.enabled = True
    try:
        return make_group(*given, **named)
    finally:
        deepytorch.switch.SWITCH.enabled = False
dist.new_group = new_group
calls = []
def listen(name):
    import torch.distributed as owner
    inner = getattr(owner, name)
    def called(*given, **named):
        calls.append(name)
        return inner(*given, **named)
    setattr(owner, name, called)
for name in ("reduce_scatter_tensor", "all_gather_into_tensor", "all_reduce", "reduce"):
    listen(name)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 8))
settings = {{
    "train_batch_size": 16 * size,
    "optimizer": {{"type": "AdamW", "params": {{"lr": 2e-3, "torch_adam": True}}}},
    "zero_optimization": {{"stage": {stage}}},
}}
engine, *_ = deepspeed.initialize(
    model=model, model_parameters=model.parameters(), config=settings, dist_init_required=False
)
teacher = torch.randn(64, 8, generator=torch.Generator().manual_seed(1)) / 8
losses = []
for step in range(60):
    features = torch.randn(16, 64, generator=torch.Generator().manual_seed(step * size + rank))
    loss = torch.nn.functional.mse_loss(engine(features), features @ teacher)
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
from collections import Counter
say("calls", dict(Counter(calls)))
say("first", sum(losses[:5]) / 5, "last", sum(losses[-10:]) / 10)
os._exit(0)
"""


def _train(stage: int, wire: str | None) -> tuple[str, float, float]:
    output = run(TRAINING.format(stage=stage, wire=wire), warm=False, timeout=240)[0]
    first, last = re.search(r"first ([\d.e-]+) last ([\d.e-]+)", output).groups()
    return output, float(first), float(last)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.matrix
def test_zero_learns_as_well_with_a_byte_a_value(stage):
    # Stage 1 sums gradients by all_reduce, which stays exact, and gathers weights; stage 3 scatters gradients too.
    _, first, wanted = _train(stage, None)
    _, _, found = _train(stage, "int8")
    assert wanted < 0.7 * first
    assert abs(found - wanted) < 0.1 * wanted
    assert found != wanted, "nothing was rounded, so nothing was quantised"
