"""Every benchmark, by the name of its command."""

from __future__ import annotations

from typing import Any

from deepytorch.bench.acspeed import Acspeed
from deepytorch.bench.benchmark import Benchmark

BENCHMARKS: dict[str, Benchmark[Any]] = {each.name: each for each in (Acspeed(),)}
