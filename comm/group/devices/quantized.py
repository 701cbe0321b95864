"""Quantised collectives for tensors on GPUs: torch's operators do what csrc/quantized.cpp does in host memory.

Blocks, scales, rounding and error feedback are the same, so the bytes are the same. Inside a host, sums are exact, in
float32. Between hosts, each rank sends to the same local rank of every other host. This module has not run on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F

from deepytorch.comm.group.groups import group_of

_BLOCK = 256  # values that share a scale, as in quantized.cpp
_SCALE_BYTES = 4
_LEAST_SCALE = torch.finfo(torch.float32).tiny  # its inverse is finite
_CODES = {"int8": (torch.int8, 127.0), "fp8": (torch.float8_e4m3fn, 448.0)}


@dataclass(frozen=True)
class Teams:
    """The two groups that a step between hosts uses, made of the ranks of one group.

    inside: the ranks of this host, None if the host has one. across: the same local rank of every host. order: all
    ranks of the group, by local rank and then by host.
    """

    inside: dist.ProcessGroup | None
    across: dist.ProcessGroup
    order: tuple[int, ...]
    host: int
    num_hosts: int


def teams_of(group: dist.ProcessGroup) -> Teams:
    """Make the teams of a deepytorch group with equally many ranks per host. Every rank of the group calls this."""
    topology, rank = group_of(group).topology, dist.get_rank(group)
    hosts = [topology.ranks_on(host) for host in range(topology.num_hosts)]
    host, place = topology.host_of[rank], topology.local_rank(rank)

    def team(ranks: list[int]) -> dist.ProcessGroup:
        members = [dist.get_global_rank(group, each) for each in ranks]
        kind, timeout = dist.get_backend(group), group_of(group).timeout  # else those of the default group
        made: dist.ProcessGroup = dist.new_group(members, timeout, kind, use_local_synchronization=True)
        return made

    inside = team(list(hosts[host])) if len(hosts[host]) > 1 else None
    across = team([ranks[place] for ranks in hosts])
    order = tuple(ranks[each] for each in range(len(hosts[host])) for ranks in hosts)
    return Teams(inside, across, order, host, len(hosts))


def num_bytes(count: int) -> int:
    """Return the bytes of `count` encoded values: the scales, then one byte per value."""
    return -(-count // _BLOCK) * _SCALE_BYTES + count


def encode(values: torch.Tensor, wire: str, residual: torch.Tensor | None = None) -> torch.Tensor:
    """Return each row of `values` (rows, count), float32, as (rows, num_bytes(count)) of uint8.

    residual: (rows, count), float32, is added to the values, and then receives the rounding errors. A block with a
    value that is not finite arrives as NaN, as an exact sum would show it.
    """
    dtype, limit = _CODES[wire]
    rows, count = values.shape
    corrected = values if residual is None else values + residual
    blocks = F.pad(corrected, (0, -count % _BLOCK)).view(rows, -1, _BLOCK)
    largest = blocks.abs().amax(-1, keepdim=True)
    finite = largest.isfinite()
    scale = torch.where(finite, (largest / limit).clamp_min(_LEAST_SCALE), torch.nan)
    scaled = torch.where(finite, blocks * scale.reciprocal(), 0.0)
    codes = (scaled.round() if wire == "int8" else scaled).to(dtype)
    if residual is not None:
        lost = torch.where(finite, blocks - codes.float() * scale, 0.0)
        residual.copy_(lost.view(rows, -1)[:, :count])
    sent = codes.view(torch.uint8).view(rows, -1)[:, :count]
    return torch.cat([scale.view(rows, -1).view(torch.uint8), sent], 1)


def decode(encoded: torch.Tensor, count: int, wire: str) -> torch.Tensor:
    """Return the (rows, count) values, float32, of what `encode` returned, (rows, num_bytes(count))."""
    head = num_bytes(count) - count
    scale = encoded[:, :head].contiguous().view(torch.float32)
    codes = encoded[:, head:].contiguous().view(_CODES[wire][0]).float()
    return codes * scale.repeat_interleave(_BLOCK, 1)[:, :count]


def reduce_scatter(
    output: torch.Tensor, given: torch.Tensor, teams: Teams, wire: str, average: bool, residual: torch.Tensor | None
) -> None:
    """Run `reduce_scatter_tensor` on the current stream, with one byte per value between hosts.

    Args:
        output: `count` values.
        given: `count` values for each rank, one rank after another.
        residual: (hosts, count), float32, on the same device, the same tensor for this payload in every step; or None.
    """
    count, size = output.numel(), len(teams.order)
    order = torch.tensor(teams.order, device=given.device)
    parts = given.reshape(size, count).index_select(0, order).float()
    sums = parts
    if teams.inside is not None:
        sums = torch.empty(teams.num_hosts, count, device=given.device)
        dist.reduce_scatter_tensor(sums, parts, group=teams.inside)
    own = sums[teams.host].clone()  # is not rounded, because it is not sent
    sums[teams.host] = 0.0
    sent = encode(sums, wire, residual)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=teams.across)
    values = decode(received, count, wire)
    values[teams.host] = own
    total = values.sum(0)
    output.copy_((total.div_(size) if average else total).view_as(output))


def all_gather(output: torch.Tensor, given: torch.Tensor, group: dist.ProcessGroup, wire: str) -> None:
    """Run `all_gather_into_tensor` on the current stream, one byte per value; all ranks get the same rounded values."""
    count = given.numel()
    sent = encode(given.reshape(1, count).float(), wire)
    received = torch.empty(dist.get_world_size(group), num_bytes(count), dtype=torch.uint8, device=given.device)
    dist.all_gather_into_tensor(received, sent, group=group)
    output.copy_(decode(received, count, wire).view_as(output))
