"""Every benchmark, by the name of its command."""

from __future__ import annotations

from typing import Any

from deepytorch.bench.acspeed import Acspeed
from deepytorch.bench.benchmark import Benchmark
from deepytorch.bench.compute import Compute
from deepytorch.bench.epoch import Epoch
from deepytorch.bench.loss import Loss
from deepytorch.bench.memory_table import Memory
from deepytorch.bench.peers import Peers
from deepytorch.bench.product import Product
from deepytorch.bench.unpad import Unpad

BENCHMARKS: dict[str, Benchmark[Any]] = {
    each.name: each for each in (Unpad(), Epoch(), Loss(), Compute(), Acspeed(), Memory(), Product(), Peers())
}
