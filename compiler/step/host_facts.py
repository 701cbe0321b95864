"""Evaluation of `Program.facts` on the host, for batches on a device whose values the host knows."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from deepytorch.compiler.host_copies import host_copy
from deepytorch.device_reads import Later, read_would_sync
from deepytorch.log import once
from deepytorch.passes.samples import sample
from deepytorch.passes.unpad.program import Program

_SIZE = torch.ops.aten.sym_size.int


class HostFacts:
    """The facts of a program, evaluated on the host if all their inputs are known there."""

    def __init__(self, program: Program) -> None:
        self._program, self._failed = program, False
        self._module: fx.GraphModule | None = None
        self._buffers = {buffer.input: buffer for buffer in program.buffers}
        self._copies: dict[int, torch.Tensor] = {}  # of buffers, which were found unchanged before
        self._sampled: Later | None = None
        self._changed = False
        placeholders = [node for node in program.facts.graph.nodes if node.op == "placeholder"]
        self._only_sizes = [all(user.target is _SIZE for user in node.users) for node in placeholders]

    def values(self, inputs: Sequence[Any]) -> Sequence[torch.Tensor] | None:
        """Return the outputs of `Program.facts` for the region's inputs; None if the host does not know all of them."""
        if self._failed:
            return None
        given = self._on_host(inputs)
        if given is None:
            return None
        try:
            if self._module is None:
                self._module = on_host(self._program.facts)
            return self._module.forward(*given)  # type: ignore[no-any-return]
        except (torch.OutOfMemoryError, KeyboardInterrupt):
            raise
        except Exception as error:
            self._failed = True
            once(logging.WARNING, "batches are read from the device: %s", str(error)[:500])
            return None

    def _on_host(self, inputs: Sequence[Any]) -> list[Any] | None:
        """Return the inputs of `Program.facts` on the host.

        None if no input has a host copy, or if the values of one are known on the device alone.
        """
        found, known = [], False
        for index, only_sizes in zip(self._program.facts_inputs, self._only_sizes, strict=True):
            given = inputs[index]
            if not isinstance(given, torch.Tensor):
                found.append(given)
                continue
            held = host_copy(given)
            if held is not None:
                known = True
            elif index in self._buffers:
                held = self._buffer(index) if read_would_sync(given) else given
            elif only_sizes:
                held = torch.empty((), dtype=given.dtype).expand(given.shape)
            elif read_would_sync(given):
                return None
            else:
                held = given
            found.append(held)
        return found if known else None

    def _buffer(self, index: int) -> torch.Tensor:
        """Return a buffer's values on the host, which are read from the device once."""
        if index not in self._copies:
            self._copies[index] = self._buffers[index].tensor.detach().cpu()
        return self._copies[index]

    def buffer_changed(self) -> bool:
        """Return whether a comparison that an earlier step began found other values in a buffer on the device."""
        if self._changed or self._sampled is not None:
            found = None if self._sampled is None else self._sampled.get()
            if found is not None:
                self._changed, self._sampled = self._changed or bool(found.any()), None
        if self._sampled is None and not self._changed:
            differ = []
            for buffer in self._program.buffers:
                if buffer.sample is not None and read_would_sync(buffer.tensor):
                    now = sample(buffer.tensor)
                    assert now is not None
                    differ.append((now.view(torch.uint8) != buffer.sample.view(torch.uint8)).any())
            if differ:
                self._sampled = Later(torch.stack(differ))
        return self._changed


def on_host(module: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of the graph with its tensors on the host."""
    made = fx.GraphModule(module, copy.deepcopy(module.graph))
    host = torch.device("cpu")
    for node in made.graph.nodes:
        if node.op == "get_attr":
            owner, _, name = node.target.rpartition(".")
            value = getattr(made.get_submodule(owner), name)
            if isinstance(value, torch.Tensor):
                setattr(made.get_submodule(owner), name, value.detach().cpu())
        moved = {name: host for name, value in node.kwargs.items() if name == "device" and value is not None}
        node.kwargs = {**node.kwargs, **moved}
        node.args = tuple(host if isinstance(value, torch.device) else value for value in node.args)
    made.recompile()
    return made
