"""Batches that host frameworks move to a device: host copies are remembered, so that no step waits to read a batch.

Accelerate (and the Trainer, whose loaders are Accelerate's), Lightning and Fabric each have one function that moves
batches, which their modules import by name; scripts call `BatchEncoding.to`. Batches that a script moves with
`Tensor.to` are not seen: `deepytorch.prefetch` is for them.
"""

from __future__ import annotations

from typing import Any

from deepytorch.patches import replace

_MOVERS = ("send_to_device", "move_data_to_device")  # Accelerate's, Lightning's
_WHY = "remember what a batch held on the host"


def attach(module: Any) -> None:
    """Wrap the function that moves batches, if `module` calls one."""
    from deepytorch.compiler.host_copies import remembering

    for name in _MOVERS:
        if name in vars(module):
            replace(module, name, remembering, _WHY)


def attach_encodings(tokenization: Any) -> None:
    """Wrap `BatchEncoding.to`, which moves batches. `tokenization`: transformers.tokenization_utils_base."""

    def moving(original: Any) -> Any:
        def to(self: Any, *args: Any, **kwargs: Any) -> Any:
            from deepytorch.compiler.host_copies import remember
            from deepytorch.switch import SWITCH

            before = dict(self.data)
            moved = original(self, *args, **kwargs)
            if SWITCH.enabled:
                remember(dict(moved.data), before)
            return moved

        return to

    replace(tokenization.BatchEncoding, "to", moving, _WHY)
