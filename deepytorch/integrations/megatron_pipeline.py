"""Pipelines of Megatron-LM: stages pack inside, and exchange hidden states of the padded shape.

[Note: packed stages of a pipeline]
Stages exchange hidden states (positions, rows, hidden), whose shape both sides know beforehand. It stays so: a stage
takes the tokens out of what it is sent, runs on them, and puts them back into the padded shape. What it computes at
tokens depends on nothing at pads, which the probe shows for each stage by itself. So in the padded run no gradient
comes back at pads, if nobody looks at what the last stage makes of them. That has to be known before the first stage
leaves it out:

- When a step begins all stages are at one place, in Megatron-LM's schedule. There they tell each other whether they can
  pack (one all-reduce of a number), and pack in this step only if all can. The last stage can once the uses of its
  outputs are known, and are of tokens alone.
- Each stage finds the tokens of a batch by itself, from its own arguments. A packed stage fills the pads of what it
  sends with a NaN whose bits no computation makes. The next stage compares: if a position that it needs was left out,
  or if it cannot pack this batch, that is an error. Numbers that are wrong without a word cannot come of it.

A script that looks at hidden states between two stages is noticed as any use of outputs is (docs/outputs.md).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from deepytorch.compiler.step.outputs.deferred import defer
from deepytorch.errors import DeepytorchError, DeferredError
from deepytorch.integrations.entry_uses import OutputUses, Peers
from deepytorch.integrations.packed_batch import Side
from deepytorch.switch import SWITCH
from deepytorch.training_calls import is_ours_to_run

# The bits of the NaN at positions that were left out: a quiet one, which copies and messages leave as it is.
LEFT_OUT: Mapping[torch.dtype, tuple[torch.dtype, int]] = {
    torch.float64: (torch.int64, 0x7FF8_0000_DEE9_7043),
    torch.float32: (torch.int32, 0x7FC0_DEE9),
    torch.bfloat16: (torch.int16, 0x7FD7),
    torch.float16: (torch.int16, 0x7ED7),
}
_CAN, _NOT_YET, _NEVER = 0, 1, 2  # what stages tell each other; the largest one holds for all
NO_KINDS: frozenset[Any] = frozenset()
OUTSIDE = "a stage of a pipeline outside of Megatron-LM's schedule without interleaving"
_STAGE = "_deepytorch_stage"  # of a model's `Stage`, which so lives as long as the model


class Stage:
    """One stage of a pipeline: a model whose block of layers is sent hidden states, or sends them on, or both.

    Attributes:
        takes: Whether it is sent hidden states.
        gives: Whether it sends its own on.
        kinds: The kinds of calls that may be packed in the step that runs, by what all stages have said.
        why_padded: The reason for which no call is packed or profiled; None while Megatron-LM's schedule runs.
        entry: The packing at the model's entry, once it was called.
    """

    def __init__(self, model: Any, group: Any) -> None:
        self.takes, self.gives = not model.pre_process, not model.post_process
        self.kinds = NO_KINDS
        self.why_padded: str | None = OUTSIDE
        self.entry: Any = None
        self._block: Any = getattr(model, "decoder", None) or getattr(model, "encoder", None)
        self._group = group
        self._compared = self._was_called = False
        self._given: tuple[Tensor, Tensor] | None = None  # the output that a script holds, and what is to be sent

    # ------------------------------------------------------------------ a step

    def opinion(self) -> tuple[int, frozenset[Any]]:
        """Return what this stage tells the others as a step begins, and the kinds of calls that it can pack."""
        if self.entry is None and not self._was_called:
            return _NOT_YET, NO_KINDS
        kinds = None if self.entry is None else self.entry.packs()
        if kinds is None:
            return _NEVER, NO_KINDS
        return (_CAN if kinds else _NOT_YET), kinds

    @contextlib.contextmanager
    def running(self, kinds: frozenset[Any], *, is_over: bool) -> Iterator[None]:
        """Let calls of `kinds` be packed inside of the block, a step. is_over: whether a stage has said never."""
        self.kinds, self.why_padded = kinds, "another stage of the pipeline stays padded" if is_over else None
        try:
            yield
        finally:
            self.kinds, self._given = NO_KINDS, None
            if not is_over:
                self.why_padded = OUTSIDE

    def calling(self, forward_step: Callable[..., Any]) -> Callable[..., Any]:
        """Return the script's forward step of one micro batch, with what it hands on made ready to be sent."""

        def forward_step_func(*args: Any, **kwargs: Any) -> Any:
            self._compared, self._was_called = False, self._was_called or is_ours_to_run()
            outputs, *others = forward_step(*args, **kwargs)
            if self.kinds and self.takes and not self._compared:
                self.compare(None, "its call did not come to deepytorch, or is paused there")
            given, self._given = self._given, None
            return (given[1] if given is not None and outputs is given[0] else outputs), *others

        return forward_step_func

    # ------------------------------------------------------------------ what comes

    def compare(self, packed: Side | None, why_padded: str) -> None:
        """Compare what the stage before has left out with what this one needs; raise an error if it needs it.

        packed: The tokens of this stage's packed batch. None if it runs padded, for the reason `why_padded`.
        """
        self._compared = True
        hidden = self._block.input_tensor
        if not self.kinds or not self.takes or hidden is None:
            return
        bits, number = LEFT_OUT[hidden.dtype]
        left_out = (hidden.detach()[..., 0].view(bits) == number).transpose(0, 1)  # (rows, positions)
        if packed is not None and left_out.shape == (packed.num_rows, packed.num_positions):
            left_out = left_out.reshape(-1)[packed.indices]
            why_padded = "its batch or its masks are others"
        missing = int(left_out.sum())
        if missing:
            rank = self._group.rank()
            ranks = torch.distributed.get_process_group_ranks(self._group)
            raise DeepytorchError(
                f"stage {rank} of the pipeline (rank {ranks[rank]}) needs {missing} positions of this batch that stage "
                f"{rank - 1} (rank {ranks[rank - 1]}) has left out as padding: {why_padded}. Expected both to get the "
                "same batch with the same masks, and to be called alike. See to it, or train with "
                "deepytorch.configure(options={'unpad': False})"
            )

    @contextlib.contextmanager
    def sent(self, hidden: Tensor | None) -> Iterator[None]:
        """Have the model take other hidden states (positions, rows, hidden), inside of the block; None: its own."""
        before = self._block.input_tensor
        try:
            if hidden is not None:
                self._block.set_input_tensor(hidden)
            yield
        finally:
            self._block.set_input_tensor(before)

    def packed(self, side: Side) -> Tensor | None:
        """Return the tokens (tokens, 1, hidden) of the hidden states that were sent; None in the first stage."""
        return side.pack(self._block.input_tensor.transpose(0, 1)).transpose(0, 1) if self.takes else None

    # ------------------------------------------------------------------ what goes

    def give(self, hidden: Tensor, side: Side | None, uses: OutputUses) -> Tensor:
        """Return the hidden states that a script gets of a call, which become those that are sent.

        hidden: A padded call's (positions, rows, hidden), whose uses are to be noted; or a packed call's, of `side`,
            (1, tokens, hidden).
        """
        if side is None:
            shape, wire = tuple(hidden.shape), hidden
        else:
            shape, wire = (side.num_positions, side.num_rows, hidden.shape[2]), with_left_out(hidden, side)

        def padded() -> Tensor:
            if side is None:
                return hidden
            raise DeferredError(
                "hidden states that a stage of a pipeline sends on are looked at, and those of pads are not computed; "
                "expected them to be looked at in the first step of training, after which they are. Do so, or pass "
                "deepytorch.configure(options={'unpad': False})"
            )

        output = defer(
            shape,
            padded,
            dtype=wire.dtype,
            device=wire.device,
            requires_grad=wire.requires_grad,
            name="hidden states",
            events=uses.events,
            profiled=side is None,
        )
        self._given = output, wire
        return output


def with_left_out(packed: Tensor, side: Side) -> Tensor:
    """Unpack (1, tokens, hidden) to (positions, rows, hidden), with `LEFT_OUT` at pads; their gradients are dropped.

    The result is no view, and its backward does not read it: Megatron-LM frees the memory of what it has sent.
    """
    bits, number = LEFT_OUT[packed.dtype]
    mark = torch.full((), number, dtype=bits, device=packed.device).view(packed.dtype)
    tokens = torch.zeros(side.num_rows * side.num_positions, dtype=torch.bool, device=packed.device)
    tokens[side.indices] = True
    tokens = tokens.view(side.num_rows, side.num_positions, 1).transpose(0, 1)
    return torch.where(tokens, side.unpack(packed).transpose(0, 1), mark).contiguous()


def stage_of(model: Any) -> Stage | None:
    """Return the stage of a pipeline that Megatron-LM's schedule has found this model to be; None before that."""
    return vars(model).get(_STAGE)  # type: ignore[no-any-return]


def agreeing(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return Megatron-LM's schedule, at whose begin stages agree: see [Note: packed stages of a pipeline]."""
    finished: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # models of which a stage never packs, as all stages know

    def forward_backward_pipelining_without_interleaving(**kwargs: Any) -> Any:
        model = _unwrapped(kwargs["model"])
        if not SWITCH.enabled or kwargs.get("forward_only", False) or model in finished:
            return original(**kwargs)
        communicator = kwargs.get("p2p_communicator")
        if communicator is None:
            group = import_module("megatron.core.parallel_state").get_pipeline_model_parallel_group()
        else:
            group = communicator.pp_group
        stage = stage_of(model)
        opinion, kinds = (_NOT_YET, NO_KINDS) if stage is None else stage.opinion()
        if stage is None and all(hasattr(model, each) for each in ("pre_process", "post_process", "pg_collection")):
            stage = vars(model)[_STAGE] = Stage(model, group)
        elif stage is None:
            opinion = _NEVER
        # All stages come here in each step, whatever they are made of, until one of them has said that it never packs.
        said = Peers([group], _device(model)).highest(opinion)[0]
        if said == _NEVER:
            finished.add(model)
        if stage is None:
            return original(**kwargs)
        with stage.running(kinds if said == _CAN else NO_KINDS, is_over=said == _NEVER):
            return original(**kwargs | {"forward_step_func": stage.calling(kwargs["forward_step_func"])})

    return forward_backward_pipelining_without_interleaving


def _device(model: nn.Module) -> torch.device:
    known = (each.device for each in model.parameters())
    return next(known, torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def _unwrapped(model: Any) -> nn.Module:
    """Return the model inside of what Megatron-LM has wrapped around it: `DistributedDataParallel`, `Float16Module`."""
    if isinstance(model, list):
        model = model[0]
    while hasattr(model, "module"):
        model = model.module
    return model  # type: ignore[no-any-return]
