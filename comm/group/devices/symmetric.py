"""Collectives of CUDA tensors through torch's symmetric memory: the implementation of the algorithms of `nvlink`.

One-shot and two-shot run deepytorch's kernels if Triton is installed, else torch's operators; the switch's reduction is
always torch's operator; `copies` moves values by plain copies. All run on a separate stream of the group, concurrently
with the caller's computation, and in memory that no other stream uses: torch's shared workspace is not safe across
streams. This module has not yet run on several GPUs.
"""

from __future__ import annotations

import torch

from deepytorch.comm.algorithms.nvlink import CopyEngines, Multimem, OneShot, TwoShot
from deepytorch.comm.group.devices import copies
from deepytorch.errors import ConfigError
from deepytorch.torch_internals import SymmetricMemory, has_triton_package


class SymmetricCollectives:
    """The collectives of one group. All ranks set up memory at the first use, and again for larger payloads."""

    def __init__(self, group_name: str) -> None:
        """Start without memory. group_name: torch's name of the group."""
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
            output: contiguous, on the GPU. Sums are of float32, bfloat16 or float16; kernels need a multiple of 16
                bytes.
            given: like `output`; larger by the number of ranks for a reduce-scatter, and smaller by it for an
                all-gather.
            average: whether sums are divided by the number of ranks.

        Returns:
            The collective's stream, which waits for the caller's current stream; readers of `output` wait for it.
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
        """Return `memory` if it is large enough, else new memory; sizes are powers of two, so that few are made."""
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
        dtype = torch.float32 if tensor.dtype == torch.float16 else tensor.dtype  # torch has no kernels for float16
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
    """A rank's memory, zeros, that all ranks of a group map; once one rank has its memory, all ranks have theirs."""

    def __init__(self, num_bytes: int, device: torch.device, group_name: str) -> None:
        """Make the memory on all ranks together; the ranks wait for each other."""
        if torch.cuda.is_current_stream_capturing():
            raise ConfigError(
                f"a collective that wants {num_bytes} bytes of symmetric memory is recorded into a CUDA graph; "
                "expected one as large to have run before, as in a warm-up step"
            )
        self.num_bytes = num_bytes
        self._own = SymmetricMemory.empty_strided_p2p((num_bytes,), [1], torch.uint8, device, group_name)
        self._own.zero_()
        torch.cuda.synchronize(device)  # zeros are written, and no earlier call reads memory that will be freed
        self.handle = SymmetricMemory.rendezvous(self._own)
        self.rank = int(self.handle.rank)


class _KernelMemory(_Memory):
    """The memory that the kernels of one group use: see `symmetric_triton.all_reduce`."""

    def __init__(self, half: int, device: torch.device, group_name: str) -> None:
        """Make the memory on all ranks together. half: bytes of each of the two halves for values."""
        from deepytorch.comm.kernels.symmetric_triton import PROGRAMS, buffer_bytes

        super().__init__(buffer_bytes(half), device, group_name)
        self.half = half
        whole, ranks = (self.num_bytes,), range(self.handle.world_size)
        addresses = [self.handle.get_buffer(rank, whole, torch.uint8).data_ptr() for rank in ranks]
        self.buffers = torch.tensor(addresses, dtype=torch.int64, device=device)
        self.calls = torch.zeros(PROGRAMS, dtype=torch.int32, device=device)
