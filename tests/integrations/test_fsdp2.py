"""FSDP2 with nothing but the import: each block is compiled, and trains as it does in eager."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import deepytorch
deepytorch.configure(options={"lowering": "aot_eager"})
import copy
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from deepytorch import autowrap

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.one, self.two = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
    def forward(self, x):
        return x + self.two(torch.relu(self.one(self.norm(x))))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(16, 4)
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()

dist.init_process_group("gloo")
torch.manual_seed(0)
model = Net()
same = copy.deepcopy(model)
def sharded(net):
    for block in net.blocks:
        fully_shard(block)
    return fully_shard(net)
model, same = sharded(model), sharded(same)
keys = list(same.state_dict())
def train(net):
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    losses = []
    for step in range(5):
        x = torch.randn(3 + step % 2, 16, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        loss = net(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)
ours = train(model)
with deepytorch.paused():
    theirs = train(same)
torch.testing.assert_close(ours, theirs)
for one, other in zip(model.parameters(), same.parameters()):
    torch.testing.assert_close(one.full_tensor(), other.full_tensor())
assert [block._compiled_call_impl is not None for block in model.blocks] == [True] * 3
assert model._compiled_call_impl is None and not autowrap.armed(same)
assert list(model.state_dict()) == keys
assert deepytorch.report().to_json()["compiles"] >= 1
dist.destroy_process_group()
"""


def test_blocks_are_compiled_and_train_alike(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
