"""Registration of the name "deepytorch" with `torch.distributed`, at almost no cost: the first group loads the rest."""

from __future__ import annotations

from typing import Any

NAME = "deepytorch"


def register() -> None:
    """Make `init_process_group("deepytorch")` possible, as `import deepytorch` does. A second call changes nothing."""
    from torch.distributed.distributed_c10d import Backend  # `torch.distributed` may not be fully imported yet

    from deepytorch.torch_internals import backend_plugins

    if NAME.upper() not in backend_plugins:
        Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])


def _create(options: Any, group_options: Any) -> Any:
    from deepytorch.comm.group.backend import create

    return create(options, group_options)
