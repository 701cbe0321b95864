"""A host's hardware, and its use while steps run: processors, memory, disk, network, GPU."""

from __future__ import annotations

import contextlib
import os
import platform
import threading
import time
from types import TracebackType
from typing import Any

from deepytorch.process_facts import cpu_model

_LEAST_S = 0.02  # of a sample: counters of processors advance by a hundredth of a second


class Hardware:
    """Samples the use of this host between `resume` and `pause`, in a thread of its own where that takes long.

    `found()`: values of each sample by the names of `jobs.HARDWARE`, and `seconds` of sampled time until its end.
    Network and disk are both directions added up, over all devices that this process sees but the loopback. GPUs are
    left out if nvidia-ml-py finds none. on: otherwise nothing is sampled.
    """

    def __init__(self, on: bool = True, every_s: float = 0.2) -> None:
        self._on, self._every_s = on, every_s
        self._over, self._lock, self._runs = threading.Event(), threading.Lock(), False
        self._thread = threading.Thread(target=self._sample_often, daemon=True)
        self._gpus = _gpus() if on else []
        self._series: dict[str, list[float]] = {"seconds": []}
        self._passed = 0.0

    def __enter__(self) -> Hardware:
        if self._on:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over.set()
        if self._on:
            self._thread.join()

    def resume(self) -> None:
        """Begin to sample."""
        if self._on:
            with self._lock:
                self._runs = True
                self._mark()

    def pause(self) -> None:
        """Sample what has passed, and sample no more."""
        if self._on:
            with self._lock:
                self._take()
                self._runs = False

    def found(self) -> dict[str, list[float]]:
        """Return all samples."""
        return self._series if self._series["seconds"] else {}

    def _sample_often(self) -> None:
        while not self._over.wait(self._every_s):
            with self._lock:
                if self._runs:
                    self._take()

    def _mark(self) -> None:
        import psutil

        psutil.cpu_percent()  # the next call says the use since this one
        self._began, self._moved = time.perf_counter(), _moved()

    def _take(self) -> None:
        import psutil

        passed = time.perf_counter() - self._began
        if passed < _LEAST_S:
            return
        disk, network = (now - before for now, before in zip(_moved(), self._moved, strict=True))
        self._passed += passed
        sample = {
            "seconds": self._passed,
            "cpu_percent": psutil.cpu_percent(),
            "memory_percent": psutil.virtual_memory().percent,
            "disk_mb_per_s": max(disk, 0) / passed / 1e6,
            "network_mbit_per_s": max(network, 0) / passed / 1e6 * 8,
            **self._gpu_use(),
        }
        for name, value in sample.items():
            self._series.setdefault(name, []).append(float(value))
        self._mark()

    def _gpu_use(self) -> dict[str, float]:
        if not self._gpus:
            return {}
        import pynvml

        rates = [pynvml.nvmlDeviceGetUtilizationRates(each).gpu for each in self._gpus]
        memory = [pynvml.nvmlDeviceGetMemoryInfo(each) for each in self._gpus]
        return {
            "gpu_percent": sum(rates) / len(rates),
            "gpu_memory_percent": 100 * sum(each.used for each in memory) / sum(each.total for each in memory),
        }


def _moved() -> tuple[int, int]:
    """Return the bytes that disks and network devices have moved so far."""
    import psutil

    disk = psutil.disk_io_counters()
    devices = psutil.net_io_counters(pernic=True)
    network = sum(each.bytes_sent + each.bytes_recv for name, each in devices.items() if name != "lo")
    return 0 if disk is None else disk.read_bytes + disk.write_bytes, network


def _gpus() -> list[Any]:
    with contextlib.suppress(Exception):  # not installed, or no driver: by any of a dozen errors
        import pynvml

        pynvml.nvmlInit()
        return [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    return []


def machine() -> str:
    """Return this machine in words: CPU, memory, GPUs."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    parts = [platform.machine(), f"{os.cpu_count()} CPUs ({cpu_model()})", f"{memory:.0f} GiB"]
    gpus = [_name(each) for each in _gpus()]
    return ", ".join(parts + [f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)])


def _name(gpu: Any) -> str:
    import pynvml

    return str(pynvml.nvmlDeviceGetName(gpu))
