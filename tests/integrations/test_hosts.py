"""Every host of a training loop, with the real package: the same script with the import and without."""

from __future__ import annotations

import pytest

from deepytorch.bench.host_recipes import ARMS
from deepytorch.bench.hosts import run_hosts
from deepytorch.bench.hosts_worker import HostsOptions

GRAPH, ENTRY = "in the graph", "at model entry"
CELLS = [
    ("trainer", "llama", GRAPH),
    ("plain", "t5", GRAPH),
    ("ddp", "bert", GRAPH),
    ("fsdp2", "t5", ENTRY),
    ("accelerate", "bert", GRAPH),
    ("zero1", "bert", GRAPH),
    ("zero2", "t5", GRAPH),
    ("zero2-offload", "llama", GRAPH),
    ("zero3", "llama", ENTRY),
    ("zero3-offload", "bert", ENTRY),
    ("zero3", "t5", ENTRY),
    ("lightning", "llama", GRAPH),
    ("peft", "bert", GRAPH),
    ("trl", "llama", GRAPH),
    ("megatron", "llama", ENTRY),
    ("lora-checkpoint", "llama", GRAPH),
    ("sentence-transformers", "bert", GRAPH),
]

# What others of these go through as well: run with `-m "slow or matrix"`.
RARE = {
    *(("plain", "t5"), ("accelerate", "bert"), ("zero1", "bert"), ("zero2-offload", "llama"), ("zero3", "t5")),
    *(("zero2", "t5"), ("peft", "bert"), ("ddp", "bert"), ("trainer", "llama")),
    *(("fsdp2", "t5"), ("lightning", "llama")),  # test_fsdp2 and a script of Lightning too
    ("zero3-offload", "bert"),
    ("sentence-transformers", "bert"),
}


@pytest.mark.parametrize(
    ("host", "model", "how"),
    [
        pytest.param(*cell, id="-".join(cell[:2]), marks=pytest.mark.matrix if cell[:2] in RARE else pytest.mark.slow)
        for cell in CELLS
    ],
)
def test_losses_agree_and_checkpoints_are_interchangeable(host: str, model: str, how: str) -> None:
    for package in ARMS[host].packages:
        pytest.importorskip(package)
    # Rows are cut so late that no batch has hardly any padding, whichever of them a rank is dealt.
    options = HostsOptions(
        hosts=(host,), models=(model,), size="tiny", batch_size=4, max_length=400, steps=6, lowering="aot_eager"
    )
    [found] = run_hosts(options, notify=lambda _: None)
    [cell] = found.cells
    assert cell.named == ""
    assert cell.green, cell
    assert cell.how == how
    # Of 6 steps, and 2 more where a second training runs in the same process, the first is watched.
    assert cell.steps_packed >= 5, cell
    assert cell.steps_padded <= 1, cell
