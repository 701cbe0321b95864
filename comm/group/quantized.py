"""Sharded training with one byte per value between hosts: reduce-scatter of gradients, all-gather of weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from deepytorch.comm.group.groups import group_of
from deepytorch.comm.group.wire import QUANTIZE, Fsdp2Collective, fsdp2_modules
from deepytorch.errors import ConfigError

if TYPE_CHECKING:
    from deepytorch.comm.group.devices.quantized import Teams

Wire = Literal["int8", "fp8"]


def quantize(model: nn.Module, wire: Wire = "int8") -> int:
    """Send an FSDP2 model's gradients and weights as one byte per value between hosts; inside a host they stay exact.

    Blocks of 256 values share one fp32 scale (as in ZeRO++, Wang et al. 2023). A gradient's rounding error is added to
    the next step's gradient (error feedback, Karimireddy et al. 2019): 4 bytes per value for each other host. Every
    rank gets the same rounded weights in forward and backward; the shards that the optimizer updates stay exact.

    model: `fully_shard` has been applied to the model or to modules in it. Returns the number of these modules. Groups
    of one host, and of other backends, send exact values. Call the function again after the model was made anew. Raises
    `ConfigError` for another wire, or a model without such modules.
    """
    QUANTIZE.check_type(wire)
    expected = "an FSDP2 model. Others take deepytorch.comm.Options(quantize=...): see docs/comm.md"
    found = fsdp2_modules(model, "quantize", expected)
    teams: _TeamsOf = {}
    for number, module in enumerate(found):
        module.set_custom_reduce_scatter(_ReduceScatter(wire, f"module {number}", teams))
        module.set_custom_all_gather(_AllGather(wire))
    return len(found)


_TeamsOf = dict[dist.ProcessGroup, "Teams"]  # made for the first payload of a group on a GPU


class _Quantized(Fsdp2Collective):
    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def _backend(self, group: dist.ProcessGroup, op: Any, *tensors: torch.Tensor) -> Any | None:
        """Return the deepytorch backend if these tensors are to be quantised, else None."""
        if not QUANTIZE.takes(op, *tensors):
            return None
        try:
            found = group_of(group)
        except ConfigError:
            return None
        return found.backend if found.topology.num_hosts > 1 and found.topology.is_regular else None


class _ReduceScatter(_Quantized):
    def __init__(self, wire: Wire, key: str, teams: _TeamsOf) -> None:
        super().__init__(wire)
        self._key = key
        self._teams = teams
        self._residual: torch.Tensor | None = None  # of payloads on a GPU; the backend keeps those of CPU payloads

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        backend = self._backend(group, op, output_tensor, input_tensor)
        if backend is None:
            return dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)
        if not _in_host_memory(output_tensor):
            self._on_device(output_tensor, input_tensor, group, op == dist.ReduceOp.AVG)
            return None
        reduce_op = op if isinstance(op, dist.ReduceOp) else dist.ReduceOp(op)
        settings = reduce_op, self._wire, self._key
        return _run(backend.reduce_scatter_quantized, output_tensor, input_tensor, settings, async_op)

    def _on_device(self, output: torch.Tensor, given: torch.Tensor, group: dist.ProcessGroup, average: bool) -> None:
        from deepytorch.comm.group.devices import quantized as on_device

        if group not in self._teams:
            self._teams[group] = on_device.teams_of(group)
        teams = self._teams[group]
        shape = (teams.num_hosts, output.numel())
        if self._residual is None or self._residual.shape != shape or self._residual.device != output.device:
            self._residual = torch.zeros(shape, device=output.device)
        on_device.reduce_scatter(output, given, teams, self._wire, average, self._residual)


class _AllGather(_Quantized):
    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        backend = self._backend(group, dist.ReduceOp.SUM, output_tensor, input_tensor)
        if backend is None:
            return dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)
        if not _in_host_memory(output_tensor):
            from deepytorch.comm.group.devices import quantized as on_device

            on_device.all_gather(output_tensor, input_tensor, group, self._wire)
            return None
        return _run(backend.all_gather_quantized, output_tensor, input_tensor, (self._wire,), async_op)


def _in_host_memory(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


def _run(
    call: Any, output: torch.Tensor, given: torch.Tensor, settings: tuple[Any, ...], async_op: bool
) -> dist.Work | None:
    """Run `call` on tensors in host memory, or on contiguous copies of them."""
    if output.is_contiguous() and given.is_contiguous():
        work: dist.Work = call(output, given, *settings, async_op)
        if async_op:
            return work
        work.wait()
        return None
    whole = torch.empty(output.shape, dtype=output.dtype)
    call(whole, given.contiguous(), *settings, False).wait()
    output.copy_(whole)
    return None
