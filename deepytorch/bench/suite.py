"""Every benchmark, by the name of its command."""

from __future__ import annotations

from typing import Any

from deepytorch.bench.acspeed import Acspeed
from deepytorch.bench.benchmark import Benchmark
from deepytorch.bench.comm import Comm
from deepytorch.bench.compute import Compute
from deepytorch.bench.memory_table import Memory
from deepytorch.bench.peers import Peers
from deepytorch.bench.product import Product

BENCHMARKS: dict[str, Benchmark[Any]] = {each.name: each for each in (Comm(), Acspeed(), Memory(), Product(), Peers(), Compute())}
