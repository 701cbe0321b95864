"""Every benchmark, by the name of its command."""

from __future__ import annotations

from typing import Any

from deepytorch.bench.acspeed import Acspeed
from deepytorch.bench.benchmark import Benchmark
from deepytorch.bench.comm import Comm
from deepytorch.bench.compute import Compute
from deepytorch.bench.ddp import Ddp
from deepytorch.bench.epoch import Epoch
from deepytorch.bench.hosts import Hosts
from deepytorch.bench.kernels import Kernels
from deepytorch.bench.loss import Loss
from deepytorch.bench.memory_table import Memory
from deepytorch.bench.model_classes.benchmark import Models
from deepytorch.bench.peers import Peers
from deepytorch.bench.product import Product
from deepytorch.bench.scaling import Scaling
from deepytorch.bench.sharded import Sharded
from deepytorch.bench.start import Start
from deepytorch.bench.unpad import Unpad

_ALL: tuple[Benchmark[Any], ...] = (
    Unpad(), Hosts(), Ddp(), Sharded(), Comm(), Start(), Epoch(), Loss(), Compute(),
    Acspeed(), Scaling(), Memory(), Product(), Peers(), Models(), Kernels(),
)  # fmt: skip
BENCHMARKS = {each.name: each for each in _ALL}
