"""Process groups of the deepytorch backend in place of gloo and nccl, to which it delegates.

The backend chooses among their algorithms and its own by measurement: see docs/comm.md. A group reports the name of the
backend that was asked for: scripts and libraries decide by it. Left to torch are any other backend, calls with options
of a backend or a `device_id` (which promise features of nccl alone, such as splitting), groups split off such a group,
and all groups after `deepytorch.configure(process_groups=False)`.
"""

from __future__ import annotations

import atexit
import inspect
import time
from typing import Any

from deepytorch.log import logger
from deepytorch.patches import replace
from deepytorch.switch import SWITCH
from deepytorch.torch_internals import is_usable

ROUTED = ("undefined", "gloo", "nccl", "cpu:gloo,cuda:nccl")
_HELPER = "_new_process_group_helper"  # makes every group, the default one too
# gloo's threads hold Python objects (the context of the backward in which a collective was begun) and drop them after
# the collective. A thread that does so while Python shuts down aborts the process; torchrun reports a failed rank.
_LAST_OBJECTS_SECONDS = 0.05


def attach(torch_module: Any) -> None:
    """Route the groups of `torch.distributed`, if this build of torch has it."""
    distributed = torch_module.distributed
    if not distributed.is_available():
        return
    c10d = distributed.distributed_c10d

    def routing(original: Any) -> Any:
        signature = inspect.signature(original)

        def new_process_group(*args: Any, **kwargs: Any) -> Any:
            atexit.unregister(_let_threads_finish)
            atexit.register(_let_threads_finish)
            given = signature.bind(*args, **kwargs)
            asked = given.arguments["backend"]
            if not _is_routed(c10d, asked, given.arguments):
                return original(*args, **kwargs)
            logger.info("a process group of %s: the deepytorch backend, over gloo and nccl", asked)
            given.arguments["backend"] = c10d.Backend("deepytorch")
            given.arguments["backend_options"] = SWITCH.group_options
            made = original(*given.args, **given.kwargs)
            if isinstance(made[0], c10d.ProcessGroup):
                _answer_as(c10d, made[0], asked)
            return made

        return new_process_group

    replace(c10d, _HELPER, routing, "give the deepytorch backend where gloo or nccl is asked for")


def _let_threads_finish() -> None:
    """Leave Python to gloo's threads for a moment."""
    time.sleep(_LAST_OBJECTS_SECONDS)


def _is_routed(c10d: Any, asked: Any, arguments: dict[str, Any]) -> bool:
    if not (SWITCH.enabled and SWITCH.process_groups and is_usable()) or str(asked).lower() not in ROUTED:
        return False
    if arguments.get("backend_options") is not None or arguments.get("device_id") is not None:
        return False
    # A default group that is bound to a device lets nccl split the others off it.
    return not (c10d.is_initialized() and c10d._get_default_group().bound_device_id)


def _answer_as(c10d: Any, group: Any, asked: Any) -> None:
    """Let torch report the group under the name of the backend that was asked for."""
    _, store = c10d._world.pg_map[group]
    c10d._world.pg_map[group] = (asked, store)
    c10d._world.pg_backend_config[group] = str(c10d.BackendConfig(asked))
    kinds, cpu = c10d.ProcessGroup.BackendType, c10d.torch.device("cpu")
    if cpu not in group._device_types:
        return
    ours = group._get_backend(cpu)
    gloo = getattr(ours, "inner_cpu", None)
    if gloo is not None and str(asked).lower() != "nccl":
        ours.show_as_gloo()
    if gloo is None or not getattr(ours, "on_one_host", False):
        return
    # Torch's C++ takes any backend registered as GLOO for a `ProcessGroupGloo` (DDP's logger), so the inner one is
    # registered there; calls go to the backend that was registered for the device last. Between hosts nobody else may
    # hold the inner group, since its connections have to close after an error.
    group._register_backend(cpu, kinds.GLOO, gloo)
    group._register_backend(cpu, kinds.CUSTOM, ours)
    if str(asked).lower() != "nccl":
        group._set_default_backend(kinds.GLOO)
