"""A benchmark that torchrun has started as ranks: each of these processes starts and serves one rank of every setup.

So the setups of a cell have processes of their own and take turns on a cluster, too. Rank 0 has the result file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from deepytorch.bench.benchmark import Place
from deepytorch.bench.processes import free_port, rank_environment

_PATIENCE = timedelta(days=2)  # for the slowest rank: a cell that fails ends by its own time limit


class Beside:
    """The processes that torchrun has started, which talk over gloo."""

    def __init__(self, per_host: int, hosts: int) -> None:
        import torch.distributed as dist

        self.per_host, self.hosts = per_host, hosts
        dist.init_process_group("gloo", timeout=_PATIENCE)
        self._dist, self.rank = dist, dist.get_rank()

    def close(self) -> None:
        """Leave the others."""
        self._dist.destroy_process_group()

    def told(self, value: Any) -> Any:
        """Return what rank 0 has given."""
        values = [value]
        self._dist.broadcast_object_list(values)
        return values[0]

    def everyones(self, value: Any) -> list[Any]:
        """Return what each rank has given."""
        values: list[Any] = [None] * self._dist.get_world_size()
        self._dist.all_gather_object(values, value)
        return values

    def impossible(self, place: Place) -> str | None:
        """Return why a place cannot be had on the hosts that torchrun has; None if it can."""
        if place.hosts > self.hosts or place.ranks > self.per_host:
            return f"torchrun has started {self.hosts} hosts of {self.per_host} ranks"
        return None

    def variables(self, place: Place) -> dict[str, str]:
        """Return the environment of the rank that this process starts for a setup; empty if it starts none."""
        port = self.told(free_port() if self.rank == 0 else None)
        host, local = divmod(self.rank, self.per_host)
        if host >= place.hosts or local >= place.ranks:
            return {}
        if place.all_ranks == 1:
            return {"LOCAL_RANK": "0"}
        return {
            **rank_environment(host * place.ranks + local, place.all_ranks, place.ranks),
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "False",  # the store of torchrun itself is for these processes
        }

    def gathered(self, found: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
        """Return what the ranks of all processes have found, in their order, by setup."""
        answers = self.everyones(dict(found))
        return {name: [rank for each in answers for rank in each.get(name, [])] for name in found}
