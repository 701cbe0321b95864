"""Tensor-parallel ranks of Megatron-LM of which one dies, stops, or sees another batch: an error in time, no hang."""

from __future__ import annotations

import os
import re
import signal

import pytest

from deepytorch.comm.group.native import native
from tests.comm.ranks import Outcome, Ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(180, func_only=True),  # a hang is the failure that these tests look for
]


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    """Compile the process group here, where no deadline of a test runs."""
    native.load()


BEGIN = """
deepytorch.switch.SWITCH.enabled = True
deepytorch.switch.SWITCH.process_groups = {ours}
from tests.integrations.megatron_runs import *
stand_in()
init("gloo", timeout={timeout})
from megatron.core import parallel_state
from deepytorch.integrations import megatron_entry
parallel_state.initialize_model_parallel(2, distributed_timeout_minutes={timeout} / 60)
model = gpt(LLAMA | {{"tensor_model_parallel_size": 2}}, position_embedding_type="rope")
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
attend = megatron_entry.varlen_attention

def in_a_packed_layer(action):
    def attention(*args, **kwargs):
        action()
        return attend(*args, **kwargs)
    megatron_entry.varlen_attention = attention

def train(step, change=lambda arguments: None):
    arguments, weights = batch("loss mask", step)
    change(arguments)
    loss, _ = mean_loss(weights, model(**arguments))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()

for step in range(3):
    train(step)
record = record_of(model)
assert record.steps_packed == 2, record
"""


def begin(ours: bool, timeout: float) -> str:
    return BEGIN.format(ours=ours, timeout=timeout)


SURVIVOR = """
if rank == 1:
    in_a_packed_layer(lambda: os.kill(os.getpid(), signal.{signal}))
started = time.monotonic()
error, seconds = told(lambda: train(3))
say("found after", round(seconds, 1), error)
error, seconds = told(lambda: train(4))
say("again after", round(seconds, 1), error)
dist.destroy_process_group()
say("destroyed")
"""


@pytest.mark.parametrize("ours", [True, False], ids=["deepytorch", "gloo"])
def test_a_rank_killed_in_a_packed_layer_is_seen_long_before_the_timeout(ours: bool) -> None:
    with Ranks(begin(ours, 100.0) + SURVIVOR.format(signal="SIGKILL")) as ranks:
        one, other = ranks.wait(90)
    print(one.output, other.output)
    assert other.code == -signal.SIGKILL
    assert one.code == 0


@pytest.mark.parametrize("ours", [True, False], ids=["deepytorch", "gloo"])
def test_a_rank_stopped_in_a_packed_layer_times_out(ours: bool) -> None:
    with Ranks(begin(ours, 5.0) + SURVIVOR.format(signal="SIGSTOP")) as ranks:
        ranks.until(0, "destroyed", 90)
        os.kill(ranks.processes[1].pid, signal.SIGCONT)
        outcomes = ranks.wait(30)
    print(*(each.output for each in outcomes))
    assert 0
