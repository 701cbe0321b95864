"""The use of a host's hardware while steps run: processors, memory, disk, network, GPU."""

from __future__ import annotations

import contextlib
import threading
import time
from types import TracebackType
from typing import Any

import psutil


class Hardware:
    """Samples the use of this host, as long as the `with` block runs, in a thread of its own.

    `series[name]`: a value for each sample, by the names of `jobs.HARDWARE`; `seconds`: when it was taken. Network and
    disk are both directions added up, over all devices that this process sees but the loopback. GPUs are left out if
    nvidia-ml-py finds none.
    """

    def __init__(self, every_s: float = 0.2) -> None:
        self._every_s = every_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._gpus = _gpus()
        self.seconds: list[float] = []
        self.series: dict[str, list[float]] = {}

    def __enter__(self) -> Hardware:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _sample(self) -> None:
        psutil.cpu_percent()  # the next call says the use since this one
        began = last = time.perf_counter()
        moved = _moved()
        while not self._over.wait(self._every_s):
            now, before, moved = time.perf_counter(), moved, _moved()
            passed, last = now - last, now
            found = {"cpu_percent": psutil.cpu_percent(), "memory_percent": psutil.virtual_memory().percent}
            found["disk_mb_per_s"] = max(moved[0] - before[0], 0) / passed / 1e6
            found["network_mbit_per_s"] = max(moved[1] - before[1], 0) / passed / 1e6 * 8
            found |= self._gpu_use()
            self.seconds.append(now - began)
            for name, value in found.items():
                self.series.setdefault(name, []).append(float(value))

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
