"""A step once more, as eager would have run it: for whoever looks at more of it than was computed.

[Note: weights that an optimizer changes]
Scripts log what a step gave after its `optimizer.step()`. As long as somebody holds an output of a step whose pads
could be asked for, weights are copied before an optimizer changes them: up to `MAX_COPIED_BYTES` for all steps
together, beyond which a look at pads is an error then. A loop that drops its outputs, such as the Trainer's, copies
nothing.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from deepytorch.compiler.step.outputs.tokens import Modes
from deepytorch.errors import DeferredError
from deepytorch.passes.samples import Sampler
from deepytorch.patches import listen

MAX_COPIED_BYTES = 1 << 30


class Replay:
    """The inputs of one step of a region with everything else that its numbers depend on, and the eager step on them.

    It must be made before the step runs. written: inputs that the step writes to; the replay writes to copies, with the
    values from before. sampler: looks into the weights for writes that leave no version behind. draws: whether the step
    draws random numbers; the replay draws what eager would have drawn.
    """

    def __init__(
        self,
        eager: Callable[..., Any],
        inputs: Sequence[Any],
        *,
        parameters: Sequence[int],
        sampler: Sampler,
        written: Sequence[int] = (),
        draws: bool = False,
    ) -> None:
        self._eager, self._inputs = eager, inputs
        self._versions = [
            each._version if isinstance(each, torch.Tensor) and not each.is_inference() else None for each in inputs
        ]
        self.weights, self._sampler = [inputs[index] for index in parameters], sampler
        self._samples = sampler.take(self.weights)
        self._copies = {index: inputs[index].detach().clone() for index in written}
        self._modes = Modes()
        self._random = _RandomState(inputs) if draws else None
        self._outputs: tuple[Any, ...] | None = None
        self.seconds = 0.0
        self.copied_bytes = 0
        listen(register_optimizer_step_pre_hook, _copy_before_step, "keep weights that pads still need", _copy_all)
        _ALIVE.add(self)

    @property
    def has_run(self) -> bool:
        """Whether its outputs are there."""
        return self._outputs is not None

    @torch.compiler.disable(reason="a step is replayed in eager")
    def outputs(self, name: str) -> tuple[Any, ...]:
        """The eager step's outputs, computed at the first call; `name` is the one that is wanted.

        Raises `DeferredError` where a weight or the batch is no longer what it was.
        """
        if self._outputs is None:
            self._check(name)
            started = time.perf_counter()
            inputs = [self._copies.get(index, each) for index, each in enumerate(self._inputs)]
            with self._modes:
                if self._random is None:
                    self._outputs = tuple(self._eager(*inputs))
                else:
                    with self._random.as_it_was():
                        self._outputs = tuple(self._eager(*inputs))
            self.seconds = time.perf_counter() - started
            self._inputs, self._copies, self.weights, self.copied_bytes = (), {}, [], 0
            _ALIVE.discard(self)
        return self._outputs

    def rewind(self) -> None:
        """Have random numbers drawn from where the step began."""
        if self._random is not None:
            self._random.set_back()

    def copy_before(self, changed: set[int], copies: dict[int, torch.Tensor]) -> None:
        """Keep the weights that are about to be changed, by id. copies: those that others keep already."""
        for index, (each, version) in enumerate(zip(self._inputs, self._versions, strict=True)):
            if id(each) not in changed or index in self._copies or version is None or each._version != version:
                continue
            if id(each) not in copies:
                copies[id(each)] = each.detach().clone()
            self._copies[index] = copies[id(each)].requires_grad_(each.requires_grad)
            self.copied_bytes += each.nbytes

    def bytes_before(self, changed: set[int]) -> int:
        """What that would take."""
        return sum(
            each.nbytes for index, each in enumerate(self._inputs) if id(each) in changed and index not in self._copies
        )

    def _check(self, name: str) -> None:
        for index, (each, version) in enumerate(zip(self._inputs, self._versions, strict=True)):
            if version is None or index in self._copies or each._version == version:
                continue
            kind = "a weight" if isinstance(each, torch.nn.Parameter) else "the batch"
            raise _changed(name, kind, tuple(each.shape))
        copied = {id(self._inputs[index]) for index in self._copies}
        for weight in self._sampler.changed(self.weights, self._samples, copied):
            raise _changed(name, "a weight", tuple(weight.shape))


_ALIVE: weakref.WeakSet[Replay] = weakref.WeakSet()  # not run, and held by outputs that somebody holds


def _copy_all() -> None:
    """No step will be announced any more: copy whatever replays still need."""
    _copy({id(each) for replay in _ALIVE for each in replay.weights})


@torch.compiler.disable(reason="weights that outputs may still need are copied before a step")
def _copy_before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if _ALIVE:
        _copy({id(each) for group in optimizer.param_groups for each in group["params"]})


def _copy(changed: set[int]) -> None:
    """Copy what is about to change, for replays that need it, as far as there is room."""
    replays = list(_ALIVE)
    copies: dict[int, torch.Tensor] = {}
    left = MAX_COPIED_BYTES - sum(replay.copied_bytes for replay in replays)
    for replay in replays:
        if 0 < replay.bytes_before(changed) <= left:
            replay.copy_before(changed, copies)
            left -= replay.copied_bytes


def _changed(name: str, kind: str, shape: tuple[int, ...]) -> DeferredError:
    return DeferredError(
        f"padded positions of {name!r} are computed when they are first looked at, and {kind} of shape {shape} has "
        "changed since the step; expected the first look before that. Look at them before optimizer.step() or before "
        "the batch is overwritten, look at real positions only, or compile with "
        "torch.compile(..., options={'defer_outputs': False}) (deepytorch.configure(options=...) under the import)"
    )


class _RandomState:
    """Where the generators stand that a step on these inputs draws from."""

    def __init__(self, inputs: Sequence[Any]) -> None:
        self._cpu = torch.get_rng_state()
        indices = {each.device.index for each in inputs if isinstance(each, torch.Tensor) and each.is_cuda}
        self._devices = sorted(indices)
        self._cuda = [torch.cuda.get_rng_state(index) for index in self._devices]

    @contextlib.contextmanager
    def as_it_was(self) -> Iterator[None]:
        """Inside, they stand there again; afterwards they stand where they stood before."""
        with torch.random.fork_rng(self._devices):
            self.set_back()
            yield

    def set_back(self) -> None:
        """Have them stand there again."""
        torch.set_rng_state(self._cpu)
        for index, state in zip(self._devices, self._cuda, strict=True):
            torch.cuda.set_rng_state(state, index)
