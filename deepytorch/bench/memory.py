"""The peak memory of a step: beyond the memory held before it, or with it."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

_NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")


def peak_step_bytes(step: Callable[[], object], device: torch.device) -> int:
    """Run `step` and return the most bytes of tensors on `device` that it held at once, beyond those held before it.

    On CUDA the caching allocator counts them. On the CPU the allocator's own reports are added up (every allocation and
    release of a tensor, from eager and from compiled code). Unlike the resident size of the process, this sum depends
    neither on what ran before nor on how the C library returns memory.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    return _peak_cpu_bytes(step)


def peak_bytes(step: Callable[[], object], device: torch.device) -> int:
    """Run `step` and return the most bytes of tensors on `device` that this process held at once, weights included.

    On the CPU, what is held before the step are the tensors that Python reaches. The resident size would count the
    interpreter, libraries and compilers as well.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return torch.cuda.memory_allocated(device) + peak_step_bytes(step, device)
    held = {}
    for each in gc.get_objects():
        if type(each) in (Tensor, nn.Parameter) and each.device == device:  # subclasses hold tensors
            storage = each.untyped_storage()
            held[storage.data_ptr()] = storage.nbytes()
    return sum(held.values()) + peak_step_bytes(step, device)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error, or its cause, says that memory did not suffice, on a GPU or on the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _NO_MEMORY):
        return True
    return error.__cause__ is not None and is_out_of_memory(error.__cause__)


def _peak_cpu_bytes(step: Callable[[], object]) -> int:
    with _silent_stderr(), torch.autograd.profiler.profile(profile_memory=True, acc_events=True) as profiler:
        step()
    results = profiler.kineto_results
    assert results is not None
    changes = sorted((event.start_ns(), event.nbytes()) for event in results.events() if event.name() == "[memory]")
    peak = held = 0
    for _, num_bytes in changes:
        held += num_bytes
        peak = max(peak, held)
    return peak


@contextlib.contextmanager
def _silent_stderr() -> Iterator[None]:
    """Discard the process's stderr: the profiler's C++ writes a line there for every tensor older than itself."""
    sys.stderr.flush()
    saved = os.dup(2)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
