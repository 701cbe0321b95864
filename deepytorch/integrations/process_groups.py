"""`init_process_group("nccl" | "gloo" | None)` gives the deepytorch backend, which delegates to these two.

It chooses among their algorithms and its own by measurement: see docs/comm.md. Left as asked for: any other backend,
calls with options of a backend, and what comes after `deepytorch.configure(process_groups=False)`.
"""

from __future__ import annotations

import functools
from typing import Any

from deepytorch.log import logger
from deepytorch.switch import SWITCH

ROUTED = (None, "gloo", "nccl", "cpu:gloo,cuda:nccl")


def attach(torch_module: Any) -> None:
    """Route the default group of `torch.distributed`, where this build of torch has that."""
    distributed = torch_module.distributed
    if not distributed.is_available() or hasattr(distributed.init_process_group, "_deepytorch_original"):
        return
    original = distributed.init_process_group

    @functools.wraps(original)
    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        name = backend.lower() if isinstance(backend, str) else backend
        if SWITCH.enabled and SWITCH.process_groups and name in ROUTED and kwargs.get("pg_options") is None:
            logger.info("init_process_group(%r): the deepytorch backend, over gloo and nccl", backend)
            backend = "deepytorch"
        return original(backend, *args, **kwargs)

    init_process_group._deepytorch_original = original  # type: ignore[attr-defined]
    distributed.init_process_group = distributed.distributed_c10d.init_process_group = init_process_group


def detach(torch_module: Any) -> None:
    """Give torch its own function back."""
    distributed = torch_module.distributed
    original = getattr(distributed.init_process_group, "_deepytorch_original", None)
    if original is not None:
        distributed.init_process_group = distributed.distributed_c10d.init_process_group = original
