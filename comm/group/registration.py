"""Makes the name "deepytorch" known to `torch.distributed`, at next to no cost: a first group loads the rest."""

from __future__ import annotations

from typing import Any

NAME = "deepytorch"


def register() -> None:
    """Make `init_process_group("deepytorch")` possible, as `import deepytorch` does. Again: nothing changes."""
    from torch.distributed.distributed_c10d import Backend  # `torch.distributed` itself may still be on its way

    from deepytorch.torch_internals import backend_plugins

    if NAME.upper() not in backend_plugins:
        Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])


def _create(options: Any, group_options: Any) -> Any:
    from deepytorch.comm.group.backend import create

    return create(options, group_options)
