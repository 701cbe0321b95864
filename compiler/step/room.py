"""Memory for the comparison of two forms of a step: for its time, both hold what their backwards need."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deepytorch.config import process_environment
from deepytorch.kept_memory import available_memory
from deepytorch.process_facts import memory, peak_memory

_LEAST_SHARE = 0.3  # of the memory of a device, or of the host, that has to be available
_TIMES_PEAK = 3  # with large logits, the comparison takes twice as much as a step


def has_room(devices: Sequence[int]) -> bool:
    """Return whether memory is there for the comparison, on these CUDA devices, or on the host without any.

    The host is to have room for the process to grow to three times its peak, which a step of eager's has made, for each
    of the ranks that it has: they compare in the same step. A host that runs out of memory ends processes; a device
    that does raises an error, which is caught.
    """
    if devices:
        return min(map(_free_share, devices)) >= _LEAST_SHARE
    found = available_memory()
    if found is None:
        return True
    share, available = found
    try:
        num_ranks = max(1, int(process_environment().get("LOCAL_WORLD_SIZE", "1")))
    except ValueError:
        num_ranks = 1
    return share >= _LEAST_SHARE and available >= num_ranks * (_TIMES_PEAK * peak_memory() - memory())


def _free_share(device: int) -> float:
    free, total = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return float((free + unused) / total)


def devices_of(tensors: Sequence[object]) -> list[int]:
    """Return the CUDA devices of the tensors among some values."""
    return sorted({each.device.index for each in tensors if isinstance(each, torch.Tensor) and each.is_cuda})
