"""Forms that data-parallel and model-parallel frameworks give a module: wrapped, sharded or partitioned."""

from __future__ import annotations

from typing import Any

from torch import nn


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the model in a data-parallel wrapper or in DeepSpeed's engine."""
    inner = getattr(module, "module", None)
    if isinstance(inner, nn.Module) and (
        isinstance(module, nn.parallel.DistributedDataParallel) or type(module).__module__.startswith("deepspeed.")
    ):
        return unwrapped(inner)
    return module


def is_fsdp(module: nn.Module) -> bool:
    """Return whether FSDP2 (`fully_shard`) gathers this module's weights at its calls."""
    return any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)


def class_of(module: nn.Module) -> type:
    """Return the class that a module had before FSDP2 put a class of its own in its place."""
    kind = type(module)
    return kind.__bases__[-1] if kind.__bases__[0].__name__ == "FSDPModule" else kind


def is_partitioned(module: nn.Module) -> bool:
    """Return whether ZeRO-3, whose hooks cut every graph, has partitioned the module's weights."""
    return any(hasattr(each, "ds_id") for each in module.parameters())


def shares_weights(module: nn.Module) -> bool:
    """Return whether weights are DTensors, as under tensor parallelism, or are when FSDP2 has not gathered them."""
    return any(map(is_fsdp, module.modules())) or any(hasattr(each, "device_mesh") for each in module.parameters())


def is_divided(module: nn.Module) -> bool:
    """Return whether weights are DTensors within the module's forward too, as under tensor parallelism.

    FSDP2 shards weights over one dimension of a mesh, and gathers them for the forward.
    """
    gathered = {id(weight) for each in module.modules() if is_fsdp(each) for weight in each.parameters()}
    return any(
        sum(not placement.is_replicate() for placement in getattr(each, "placements", ())) > (id(each) in gathered)
        for each in module.parameters()
    )


def is_sharded(module: nn.Module) -> bool:
    """Return whether weights are sharded over ranks (ZeRO-3, FSDP2), so that all ranks take part in every call."""
    return is_partitioned(module) or shares_weights(module)


def sharding_groups(module: nn.Module) -> list[Any]:
    """Return the process groups over which weights are sharded; none if they are not.

    Replicas of one shard (HSDP) are in none of these groups: only gradients pass between them, so a script may call a
    frozen model in some of the replicas. If no weight is sharded, replicas are all that is known of the ranks that run
    the model together. Weights that FSDP2 has kept gathered since a forward
    (`reshard_after_forward=False`) are freed: they show no group.
    """
    for part in filter(is_fsdp, module.modules()):
        part.reshard()  # type: ignore[operator]
    groups: dict[bool, dict[str, Any]] = {True: {}, False: {}}  # by whether they hold shards
    for each in module.parameters():
        if hasattr(each, "ds_id"):
            return [each.ds_process_group]  # type: ignore[attr-defined]
        for dim, placement in enumerate(getattr(each, "placements", ())):
            group = each.device_mesh.get_group(dim)  # type: ignore[attr-defined]
            groups[not placement.is_replicate()].setdefault(group.group_name, group)
    return list((groups[True] or groups[False]).values())
