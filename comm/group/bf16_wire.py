"""Gradients sent as bf16 and summed in float32: half the bytes of float32, and one rounding of each value.

A ring of bf16 rounds its sums at every rank; here no sum is added to after it was rounded. Each rank casts its values
once and sends every other rank its part (all_to_all). The owner of a part sums it over all ranks in float32. For an
all_reduce, the owners cast their sums once more, and all ranks gather them, so that all ranks get the same bits. The
traffic is half of a float32 ring's. On GPUs no data goes through the host, and the host does not wait. This module has
not yet run on several GPUs. Parts are sent as bytes: every backend can send bytes, and no backend rounds them.
"""

# No postponed annotations: DistributedDataParallel compares the annotations of its hooks with classes.

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepytorch.comm.group.wire import BF16, Fsdp2Collective, fsdp2_modules
from deepytorch.errors import ConfigError


def all_reduce_bf16(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: dist.ProcessGroup | None = None) -> None:
    """Run `torch.distributed.all_reduce` in place; each value is rounded to bf16, and each float32 sum once more.

    Every rank gets the same bits. NaN and infinities are kept; values over 3.39e38 become infinite. On GPUs the call is
    asynchronous, on the current stream. The call needs 4 bytes per value, and 6 per value of a rank's part.

    Args:
        tensor: contiguous, float32 or bfloat16, on the device of the group's backend, of any size.
        op: SUM, or AVG, which divides the float32 sum.
        group: of any backend; None is the default group.

    Raises:
        ConfigError: another dtype or reduction, or a tensor that is not contiguous. No rank has been told then.
    """
    BF16.check(op, tensor)
    size = dist.get_world_size(group)
    if size == 1 or tensor.numel() == 0:
        return
    wire = _cast(tensor, size)
    total = _sum_of_parts(wire, op, group)
    part = total.to(torch.bfloat16)
    dist.all_gather_into_tensor(wire.view(torch.uint8), part.view(torch.uint8), group)
    tensor.view(-1).copy_(wire[: tensor.numel()])


def reduce_scatter_bf16(
    output: Tensor, given: Tensor, op: Any = dist.ReduceOp.SUM, group: dist.ProcessGroup | None = None
) -> None:
    """Run `torch.distributed.reduce_scatter_tensor`; each value is rounded to bf16, and summed in float32.

    A float32 sum is not rounded again, so gradients that were bfloat16 before lose nothing. On GPUs the call is
    asynchronous, on the current stream. The call needs 4 bytes per value of `given`, and 4 per value of a rank's part.

    Args:
        output: contiguous, this rank's part of the sum, of the dtype of `given`.
        given: contiguous, float32 or bfloat16, as many parts of `output`'s size as there are ranks. Not changed.
        op, group: as in `all_reduce_bf16`.

    Raises:
        ConfigError: another dtype or reduction, tensors that are not contiguous, or other sizes. No rank has been told.
    """
    BF16.check(op, given)
    size = dist.get_world_size(group)
    if output.numel() * size != given.numel() or output.dtype != given.dtype or not output.is_contiguous():
        raise ConfigError(
            f"reduce_scatter_bf16 of {given.numel()} elements ({given.dtype}) among {size} ranks into {output.numel()} "
            f"({output.dtype}); expected contiguous tensors of one dtype, the first {size} times the second"
        )
    if size == 1:
        output.view(-1).copy_(given.view(-1))
    elif given.numel() > 0:
        output.view(-1).copy_(_sum_of_parts(_cast(given, size), op, group))


def send_bf16(model: nn.Module) -> int:
    """Send the gradients of a DDP or FSDP2 model as bf16, summed in float32; the dtype of `param.grad` stays the same.

    DDP's buckets use `all_reduce_bf16`, FSDP2's gradients `reduce_scatter_bf16` (for hybrid sharding: inside a shard
    group; between replicas as before). Gradients of dtypes other than float32 and bfloat16, and reductions other than
    sums and averages, are sent as before. On CPU tensors DDP's backward waits for each bucket.

    model: a DistributedDataParallel module that has not run yet, or an FSDP2 model: `fully_shard` was applied to the
    model or to modules in it. Returns the number of such modules. Call the function again after the model was made
    anew. Raises `ConfigError` for any other model.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model.register_comm_hook(_Sender(model.process_group), _bf16_hook)
        return 1
    found = fsdp2_modules(model, "send_bf16", "a DistributedDataParallel module, or an FSDP2 model")
    for module in found:
        module.set_custom_reduce_scatter(_ReduceScatter())
    return len(found)


def _cast(tensor: Tensor, size: int) -> Tensor:
    """Return (ranks * part,) bf16: a part for each rank, with zeros after the last values so that parts are equal."""
    count = tensor.numel()
    wire = torch.empty(-(-count // size) * size, dtype=torch.bfloat16, device=tensor.device)
    wire[:count].copy_(tensor.view(-1))
    wire[count:].zero_()
    return wire


def _sum_of_parts(wire: Tensor, op: Any, group: dist.ProcessGroup | None) -> Tensor:
    """Return (part,) float32: this rank's part, summed over all ranks in rank order."""
    size = dist.get_world_size(group)
    arrived = torch.empty_like(wire)
    dist.all_to_all_single(arrived.view(torch.uint8), wire.view(torch.uint8), group=group)
    total = arrived.view(size, -1).sum(0, dtype=torch.float32)
    return total.div_(size) if op == dist.ReduceOp.AVG else total


class _Sender:
    """The sender of one module's gradients; gradients on a GPU are sent on a separate stream."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._stream: Any = None

    def send(self, tensor: Tensor, call: Callable[[], None]) -> torch.futures.Future[Tensor]:
        """Run `call`, which writes `tensor`, concurrently with the caller's stream; return a future of `tensor`."""
        if tensor.device.type == "cpu":
            call()
            done: torch.futures.Future[Tensor] = torch.futures.Future()
            done.set_result(tensor)
            return done
        if self._stream is None:
            self._stream = torch.Stream(tensor.device)
        self._stream.wait_stream(torch.accelerator.current_stream(tensor.device))
        with self._stream:
            call()
            tensor.record_stream(self._stream)
            done = torch.futures.Future(devices=[tensor.device])
            done.set_result(tensor)  # records this stream's position: a waiting caller lets its own stream wait for it
        return done


def _bf16_hook(sender: _Sender, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Average a full bucket over the ranks: a hook of DistributedDataParallel, and of buckets of `comm.gradients`."""
    tensor = bucket.buffer()
    if BF16.takes(dist.ReduceOp.AVG, tensor):
        return sender.send(tensor, lambda: all_reduce_bf16(tensor, dist.ReduceOp.AVG, sender.group))
    tensor.div_(dist.get_world_size(sender.group))
    future = dist.all_reduce(tensor, group=sender.group, async_op=True).get_future()
    return future.then(lambda done: done.value()[0])


def sends_bf16(hook: Any) -> bool:
    """Return whether a communication hook is that of `send_bf16`."""
    return hook is _bf16_hook


class _ReduceScatter(Fsdp2Collective):
    """The reduce-scatter that FSDP2 calls in place of its own, on the stream that FSDP2 has made current."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        if async_op or not BF16.takes(op, input_tensor) or output_tensor.dtype != input_tensor.dtype:
            return dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)
        reduce_scatter_bf16(output_tensor, input_tensor, op, group)
        return None
