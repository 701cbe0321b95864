"""Every host of a training loop, with the real package: the same script with the import and without."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deepytorch.bench.benchmark import Cell
from deepytorch.bench.hosts import ALL, WITH, Hosts, HostsOptions
from deepytorch.bench.run import run_benchmark

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


class NotCompiled(Hosts):
    """The benchmark with graphs that run operator by operator."""

    def cells(self, options: HostsOptions) -> list[Cell]:
        return [
            replace(cell, setups=[replace(each, job=replace(each.job, lowering="aot_eager")) for each in cell.setups])
            for cell in super().cells(options)
        ]


@pytest.mark.parametrize(
    ("host", "model", "how"),
    [
        pytest.param(*cell, id="-".join(cell[:2]), marks=pytest.mark.matrix if cell[:2] in RARE else pytest.mark.slow)
        for cell in CELLS
    ],
)
def test_losses_agree_and_checkpoints_are_interchangeable(host: str, model: str, how: str) -> None:
    for package in ALL[host].packages:
        pytest.importorskip(package)
    # Rows are cut so late that no batch has hardly any padding, whichever of them a rank is dealt.
    options = HostsOptions(hosts=(host,), models=(model,), size="tiny", batch_size=4, max_length=400, steps=6)
    results = run_benchmark(NotCompiled(), options)
    assert [row.failed for row in results.rows if row.failed] == []
    Hosts().verdict(results)
    [row] = results.having(setup=WITH)
    assert row.texts == {"padding": how, "fallbacks": ""}
    # Of 6 steps, and 2 more where a second training runs in the same process, the first is watched.
    assert row.figures["steps_packed"] >= 5, row
    assert row.figures["steps_padded"] <= 1, row
