"""Gradients that travel as bf16 and are summed in float32: half the bytes of float32, and one rounding of each value.

A ring that adds bf16 rounds at every rank; here nobody adds what has been rounded before. Each rank casts its values
once and gives every other one its part (all_to_all), a part's owner adds up all ranks' in float32, and an all_reduce
casts the sums once more and gathers them. All ranks get the owner's bits. Bytes on the way are half of a float32
ring's. On GPUs nothing goes through the host, and the host waits for nothing. Not yet run on several GPUs.

Parts move as bytes: every backend moves those, and none takes them for values that it may round.
"""

# No `annotations` of the future: DistributedDataParallel compares those of its hooks with classes.

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepytorch.comm.kernels.buckets import Slots, pack
from deepytorch.errors import ConfigError

_FROM = (torch.float32, torch.bfloat16)  # fp16 has bits that bf16 lacks, fp64 is asked for where rounding matters
_OPS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG)


def all_reduce_bf16(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: dist.ProcessGroup | None = None) -> None:
    """`torch.distributed.all_reduce` in place: each value is rounded to bf16, the float32 sum of all ranks' once more.

    Every rank gets the same bits. NaN and infinities pass through; what is over 3.39e38 becomes infinite. Asynchronous
    on GPUs, on the current stream. Needs 4 bytes for each value meanwhile, and 6 for each of a rank's part.

    Args:
        tensor: contiguous, float32 or bfloat16, on the device of the group's backend, of any size.
        op: SUM, or AVG, which divides the float32 sum.
        group: of any backend; None is the default group.

    Raises:
        ConfigError: another dtype or reduction, or a tensor that is not contiguous. No rank has been told then.
    """
    _check(tensor, op)
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
    """`torch.distributed.reduce_scatter_tensor`: each value is rounded to bf16, and summed in float32 at its owner.

    A float32 sum is not rounded again, so gradients that were bfloat16 before lose nothing at all. Asynchronous on
    GPUs, on the current stream. Needs 4 bytes for each value of `given` meanwhile, and 4 for each of a rank's part.

    Args:
        output: contiguous, a rank's part of the sum, of the dtype of `given`.
        given: contiguous, float32 or bfloat16, as many parts of `output`'s size as there are ranks. Not changed.
        op, group: as in `all_reduce_bf16`.

    Raises:
        ConfigError: another dtype or reduction, tensors that are not contiguous, or other sizes. No rank has been told.
    """
    _check(given, op)
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
    """Let the gradients of a DDP or FSDP2 model travel as bf16, summed in float32; `param.grad` stays what it was.

    DDP's buckets go by `all_reduce_bf16`, FSDP2's gradients by `reduce_scatter_bf16` (for hybrid sharding: inside of a
    shard group; between replicas as before). Gradients of other dtypes than float32 and bfloat16, and reductions other
    than sums and averages, go as before. On CPU tensors DDP's backward waits for each bucket.

    model: a DistributedDataParallel module that has not run yet, or one that `fully_shard` was applied to, itself or
    modules in it. Returns how many such modules there are. Call it again after the model was made anew. Raises
    `ConfigError` for any other model.
    """
    from torch.distributed.fsdp import FSDPModule

    if isinstance(model, nn.parallel.DistributedDataParallel):
        model.register_comm_hook(_Sender(model.process_group), _bf16_hook)
        return 1
    found = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not found:
        raise ConfigError(
            f"send_bf16() of a {type(model).__name__}; expected a DistributedDataParallel module, or an FSDP2 model "
            "with a module that fully_shard was applied to"
        )
    for module in found:
        scatter: Any = _ReduceScatter()  # FSDP2's interface for it has a private home
        module.set_custom_reduce_scatter(scatter)
    return len(found)


def _check(tensor: Tensor, op: Any) -> None:
    if not _takes(tensor, op):
        raise ConfigError(
            f"a sum as bf16 with {op} of a tensor of {tensor.dtype}; expected SUM or AVG of a contiguous one of "
            "float32 or bfloat16"
        )


def _takes(tensor: Tensor, op: Any) -> bool:
    dense = tensor.layout == torch.strided and tensor.is_contiguous()
    return dense and op in _OPS and tensor.dtype in _FROM


def _cast(tensor: Tensor, size: int) -> Tensor:
    """(ranks * part,) bf16, for each rank its part; zeros behind the last values, so that parts are alike."""
    count = tensor.numel()
    wire = torch.empty(-(-count // size) * size, dtype=torch.bfloat16, device=tensor.device)
    pack([tensor.view(-1)], Slots([wire[:count]]))
    wire[count:].zero_()
    return wire


def _sum_of_parts(wire: Tensor, op: Any, group: dist.ProcessGroup | None) -> Tensor:
    """(part,) float32: this rank's part, added up over all ranks in their order."""
    size = dist.get_world_size(group)
    arrived = torch.empty_like(wire)
    dist.all_to_all_single(arrived.view(torch.uint8), wire.view(torch.uint8), group=group)
    total = arrived.view(size, -1).sum(0, dtype=torch.float32)
    return total.div_(size) if op == dist.ReduceOp.AVG else total


class _Sender:
    """What sends one module's gradients, on a stream of its own where they are on a GPU."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._stream: Any = None

    def send(self, tensor: Tensor, call: Callable[[], None]) -> torch.futures.Future[Tensor]:
        """Run `call`, which writes `tensor`, beside what the caller's stream does next; what it gives, as a future."""
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
            done.set_result(tensor)  # notes where the current stream stands: who waits lets its own stream wait
        return done


def _bf16_hook(sender: _Sender, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """What DistributedDataParallel calls with a full bucket, and `comm.gradients` with one of its own."""
    tensor = bucket.buffer()
    if _takes(tensor, dist.ReduceOp.AVG):
        return sender.send(tensor, lambda: all_reduce_bf16(tensor, dist.ReduceOp.AVG, sender.group))
    tensor.div_(dist.get_world_size(sender.group))
    future = dist.all_reduce(tensor, group=sender.group, async_op=True).get_future()
    return future.then(lambda done: done.value()[0])


def sends_bf16(hook: Any) -> bool:
    """Whether a communication hook is the one of `send_bf16`."""
    return hook is _bf16_hook


class _ReduceScatter:
    """What FSDP2 asks for in place of a reduce_scatter of its own; runs on the stream that FSDP2 has made current."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for the collective, as FSDP2 takes it by itself."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        if async_op or not _takes(input_tensor, op) or output_tensor.dtype != input_tensor.dtype:
            return dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)
        reduce_scatter_bf16(output_tensor, input_tensor, op, group)
        return None
