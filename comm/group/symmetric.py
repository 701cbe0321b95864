"""Collectives of CUDA tensors through torch's symmetric memory: what the algorithms of `nvlink` run.

One-shot and two-shot are kernels of our own where Triton is installed; else, and for the switch's own reduction, they
are torch's operators; `copies` moves values by plain copies. All run on a stream of the group's own, beside what the
caller computes, and in memory that no other stream uses: torch's shared workspace is not safe across streams. Not yet
run on several GPUs.
"""

from __future__ import annotations

import torch

from deepytorch.comm.algorithms.nvlink import CopyEngines, Multimem, OneShot, TwoShot
from deepytorch.comm.group import copies
from deepytorch.errors import ConfigError
from deepytorch.torch_internals import SymmetricMemory, has_triton_package

NAMES = (OneShot.name, TwoShot.name, CopyEngines.name, Multimem.name)


class SymmetricCollectives:
    """Those of one group. Memory is set up at the first use and when a larger payload comes, on all ranks."""

    def __init__(self, group_name: str) -> None:
        """`group_name`: as torch knows the group by."""
        self._group_name = group_name
        self._stream: torch.cuda.Stream | None = None
        self._for_kernels: _KernelMemory | None = None
        self._for_operators: _Memory | None = None
        self._for_copies: _Memory | None = None

    def __call__(
        self, name: str, kind: str, output: torch.Tensor, given: torch.Tensor, average: bool
    ) -> torch.cuda.Stream:
        """Run a collective of the group, asynchronously; every rank calls it with the same arguments.

        Args:
            name: the algorithm, of `NAMES`.
            kind: "all_reduce", in place: `output` is `given`; copy engines also do "reduce_scatter" and "all_gather".
            output: contiguous, on the GPU. Where values are added up of float32, bfloat16 or float16, and for kernels a
                multiple of 16 bytes long.
            given: as `output`; as many times as large as there are ranks for a reduce-scatter, as small for an
                all-gather.
            average: whether sums are divided by the number of ranks.

        Returns:
            The stream that it runs on. It waits for the caller's current stream; who reads `output` waits for it.
        """
        with torch.cuda.device(output.device):
            if self._stream is None:
                self._stream = torch.cuda.Stream(priority=-1)
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                if name == CopyEngines.name:
                    self._by_copies(kind, output, given, average)
                elif name != Multimem.name and has_triton_package():
                    self._by_kernels(name, output, average)
                else:
                    self._by_operators(name, output, average)
            for tensor in (output, given):
                tensor.record_stream(self._stream)
        return self._stream

    def _by_copies(self, kind: str, output: torch.Tensor, given: torch.Tensor, average: bool) -> None:
        self._for_copies = memory = self._of_size(self._for_copies, given.nbytes, given.device)
        if kind == "all_gather":
            copies.all_gather(memory.handle, output, given)
        elif kind == "reduce_scatter":
            copies.reduce_scatter(memory.handle, output, given, average)
        else:
            copies.all_reduce(memory.handle, output, average)

    def _of_size(self, memory: _Memory | None, num_bytes: int, device: torch.device) -> _Memory:
        """`memory` where it is large enough, else more: a power of two, so that few are made."""
        if memory is None or memory.num_bytes < num_bytes:
            memory = _Memory(1 << (num_bytes - 1).bit_length(), device, self._group_name)
        return memory

    def _by_kernels(self, name: str, tensor: torch.Tensor, average: bool) -> None:
        from deepytorch.comm.kernels.symmetric_triton import all_reduce, half_bytes

        memory = self._for_kernels
        if memory is None or memory.half < tensor.nbytes:
            self._for_kernels = memory = _KernelMemory(half_bytes(tensor.nbytes), tensor.device, self._group_name)
        all_reduce(
            tensor, memory.buffers, memory.calls, memory.half, memory.rank,
            two_shot=name == TwoShot.name, average=average,
        )  # fmt: skip

    def _by_operators(self, name: str, tensor: torch.Tensor, average: bool) -> None:
        dtype = torch.float32 if tensor.dtype == torch.float16 else tensor.dtype  # which torch has no kernels for
        self._for_operators = memory = self._of_size(
            self._for_operators, tensor.numel() * dtype.itemsize, tensor.device
        )
        buffer = memory.handle.get_buffer(memory.rank, tensor.shape, dtype)
        buffer.copy_(tensor)
        if name == OneShot.name:
            buffer = torch.ops.symm_mem.one_shot_all_reduce(buffer, "sum", self._group_name)
        elif name == TwoShot.name:
            torch.ops.symm_mem.two_shot_all_reduce_(buffer, "sum", self._group_name)
        else:
            torch.ops.symm_mem.multimem_all_reduce_(buffer, "sum", self._group_name)
        if average:
            buffer.div_(memory.handle.world_size)
        tensor.copy_(buffer)


class _Memory:
    """Zeros that all ranks of a group map, each of its own; a rank that has them knows that all have theirs."""

    def __init__(self, num_bytes: int, device: torch.device, group_name: str) -> None:
        """Made on all ranks together, which wait for each other."""
        if torch.cuda.is_current_stream_capturing():
            raise ConfigError(
                f"a collective that wants {num_bytes} bytes of symmetric memory is recorded into a CUDA graph; "
                "expected one as large to have run before, as in a warm-up step"
            )
        self.num_bytes = num_bytes
        self._own = SymmetricMemory.empty_strided_p2p((num_bytes,), [1], torch.uint8, device, group_name)
        self._own.zero_()
        torch.cuda.synchronize(device)  # zeros are there, and no earlier call reads memory that is to be given back
        self.handle = SymmetricMemory.rendezvous(self._own)
        self.rank = int(self.handle.rank)


class _KernelMemory(_Memory):
    """What the kernels of one group go through: see `symmetric_triton.all_reduce`."""

    def __init__(self, half: int, device: torch.device, group_name: str) -> None:
        """As `_Memory`. half: bytes for values, twice."""
        from deepytorch.comm.kernels.symmetric_triton import PROGRAMS, buffer_bytes

        super().__init__(buffer_bytes(half), device, group_name)
        self.half = half
        whole, ranks = (self.num_bytes,), range(self.handle.world_size)
        addresses = [self.handle.get_buffer(rank, whole, torch.uint8).data_ptr() for rank in ranks]
        self.buffers = torch.tensor(addresses, dtype=torch.int64, device=device)
        self.calls = torch.zeros(PROGRAMS, dtype=torch.int32, device=device)
