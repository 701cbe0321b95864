"""Reduction of gradients: arriving gradients are packed into buckets, and full buckets are averaged over the ranks.

A `GradientReducer` stands for one DistributedDataParallel module. Gradients reach it from compiled backwards (`arrive`,
through `ops`) and from autograd (a hook on each parameter, for parameters that eager frames use). A bucket is sent as
soon as it is full and the buckets before it are sent, so that every rank issues the same collectives in the same order,
whatever its graphs look like. Buckets that are incomplete when the backward ends are sent then.

Autograd receives views of the buckets, in the layouts of the parameters. Autograd stores the views as `param.grad`, so
a reduced gradient is never copied out.

The first three backwards are profiled, and the plan is made anew from the profiles: see `replanning.Phase`.

Before the reducer takes over, and after `release`, the gradients of compiled backwards only pass through.

[Note: rows] A gradient that a compiled graph knows to be rows of an embedding is sent as rows, if the plan says that
this pays (`sparse_rows`): after all buckets, when every rank has told how many rows it has. A rank that has such a
gradient as a whole, from an eager frame or with earlier micro-batches in it, says so, and then all ranks send it as a
whole.

[Note: parts] A parameter that two graphs, or a graph and an eager frame, use gets its gradient in parts, which autograd
adds up before the parameter's hook sees the sum. The gradients of such parameters are sent only after their sum.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepytorch.comm.gradients.autograd_leaves import accumulator, has_hooks, is_accumulated, on_accumulated
from deepytorch.comm.gradients.bucket_memory import strides
from deepytorch.comm.gradients.bucket_sender import BucketSender, Counts
from deepytorch.comm.gradients.buckets import BucketPlan
from deepytorch.comm.gradients.comm_hooks import CommHook
from deepytorch.comm.gradients.replanning import Replanner
from deepytorch.comm.gradients.sparse_rows import Rows, add_rows, reduce_rows, summed_rows
from deepytorch.comm.topology.cost import Link
from deepytorch.device_reads import send
from deepytorch.errors import GradientError
from deepytorch.torch_internals import current_graph_task_id, queue_callback


class GradientReducer:
    """The gradients of one data-parallel module.

    A reducer is only as thread-safe as autograd: one backward at a time.
    """

    def __init__(
        self,
        name: str,
        parameters: Sequence[tuple[str, nn.Parameter]],
        plan: BucketPlan,
        group: dist.ProcessGroup,
        *,
        link: Link,
        bucket_bytes: int | None = None,
        may_be_unused: bool = False,
        hook: CommHook | None = None,
    ) -> None:
        """Make the reducer, which takes over gradients only at `take_over`.

        Args:
            name: a name that no other module has.
            parameters: in the order of the plan's members, equal on all ranks. Some may be frozen, now or later.
            plan: for the backwards that are profiled.
            group: the ranks to average over.
            link: the assumed time of an all-reduce.
            bucket_bytes: the size of buckets that the user wants; None to have it chosen.
            may_be_unused: a parameter that no rank used keeps its gradient unchanged, as with DDP's
                `find_unused_parameters`; otherwise a parameter that is not used is an error.
            hook: called with each bucket in place of an all-reduce.
        """
        self.name = name
        self.counts = Counts()
        self._names = [name for name, _ in parameters]
        self._parameters = [parameter for _, parameter in parameters]
        self._accumulators = [accumulator(each) for each in self._parameters]
        self._layouts = [(each.shape, strides(each), each.dtype, each.device) for each in self._parameters]
        self._group, self._may_be_unused = group, may_be_unused
        self._comm_hook = hook
        self._replanner = Replanner(group, self._parameters[0].device, link, bucket_bytes, may_send_rows=hook is None)
        self._arrived: set[int] = set()
        self._in_parts: set[int] = set()  # see [Note: parts]
        self._parts: dict[int, Tensor] = {}  # of this backward, to be returned to autograd
        self._rest_of: dict[int, str] = {}  # members of which a part arrived, and how their rows are handled
        self._rows: dict[int, Rows | None] = {}  # of this backward, to be sent
        self._set_plan(plan)
        self._armed = False  # whether the next backward reduces
        self._armed_anew = False  # whether a forward armed the reducer since the last backward began
        self._backward = -1  # autograd's number of the backward that is under way; -1: none
        self._absent: set[int] = set()  # gradients that the running node hands over as zeros although they do not exist
        self.is_ours = self._released = False
        self._hooks: list[Any] = []

    def _set_plan(self, plan: BucketPlan) -> None:
        self.plan = plan
        self._sender = BucketSender(plan, self._parameters, self._group, self._comm_hook, self.counts)

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """Return the parameters, in the order of the plan's members."""
        return self._parameters

    def to_json(self) -> dict[str, Any]:
        """Return plan and counts as plain JSON values.

        Seconds are those that the backward stood still, over all its steps.
        """
        return {
            "name": self.name,
            **self.plan.to_json(),
            "syncs": self.counts.syncs,
            "collectives": self.counts.collectives,
            "num_bytes": self.counts.num_bytes,
            "from_eager_frames": self.counts.late,
            "exposed_seconds": self.counts.exposed_seconds,
        }

    def reset_counts(self) -> None:
        """Start counting anew."""
        self.counts = self._sender.counts = Counts()

    # ------------------------------------------------------------------ called for DDP

    def arm(self) -> None:
        """Have the next backward reduce: that of the forward that has just ended."""
        self._armed = self._armed_anew = True

    def disarm(self) -> None:
        """Undo `arm`."""
        self._armed = self._armed_anew = False

    def take_over(self) -> None:
        """Reduce gradients from now on, on all ranks; hooks also take those that no compiled backward hands over."""
        self.is_ours = True
        for member, parameter in enumerate(self._parameters):
            self._hooks.append(on_accumulated(parameter, self._hook(member)))

    def release(self) -> None:
        """Stop reducing and remove the hooks, after the backward that is awaited if there is one."""
        self._released = True
        if not self._armed:
            self._detach()

    def _detach(self) -> None:
        self.is_ours = False
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    # ------------------------------------------------------------------ arriving gradients

    def arrive(self, members: Sequence[int], gradients: Sequence[Tensor]) -> None:
        """Pack gradients of a compiled backward, and send the buckets that are full with them.

        Gradients that autograd does not accumulate (`torch.autograd.grad`, `backward(inputs=...)`) only pass through.
        """
        accumulated = [self._is_taken(member) for member in members]
        if any(accumulated):
            self._begin()
        whole = zip(members, accumulated, strict=True)
        self._stamp(member for member, taken in whole if taken and member not in self._in_parts)
        packed: list[int] = []
        sources: list[Tensor] = []
        for member, gradient, taken in zip(members, gradients, accumulated, strict=True):
            if not taken or member in self._arrived or member in self._in_parts:
                self._parts[member] = self._copy(member, gradient)
                continue
            self._count(member)
            if self._parameters[member].grad is None:
                packed.append(member)
                sources.append(gradient)
            else:
                self._fill(member, gradient)
        if packed:
            self._sender.pack(packed, sources)
        if any(accumulated):
            self._send_full()

    def arrive_part(self, member: int, gradient: Tensor) -> None:
        """Take a gradient without the rows that `arrive_rows` is given later."""
        if self._passes_through(member):
            self._parts[member] = self._copy(member, gradient)
            self._rest_of[member] = "autograd"
            return
        self._fill(member, gradient)
        apart = not self._sender.planned(member).as_rows  # otherwise the bucket is not sent before the rows
        self._rest_of[member] = "sent" if apart and self._sends_rows(member) else "added"
        if self._replanner.times is not None:
            self._replanner.times.arrived_but_for_rows(member)
        if self._rest_of[member] == "sent":
            self._count(member)
            self._send_full()

    def arrive_rows(self, member: int, ids: Tensor, values: Tensor, kept: Tensor | None) -> None:
        """Take rows of a gradient, or of the rest of one: see `summed_rows`.

        The rows are the whole gradient if nothing else arrived.
        """
        purpose = self._rest_of.pop(member, None)
        if purpose == "autograd" or (purpose is None and self._passes_through(member)):
            if purpose is None:
                self._parts[member] = self._copy(member, torch.zeros_like(self._parameters[member]))
            add_rows(self._parts[member], ids, values, kept)
            return
        if purpose == "sent":
            self._rows[member] = summed_rows(ids, values, kept)
            return
        if purpose is None:
            if self._sends_rows(member) and self._parameters[member].grad is None:
                self._rows[member] = summed_rows(ids, values, kept)
                self._sender.view(member).zero_()
                self._count(member)
                self._send_full()
                return
            self._fill(member, None)
        num_bytes = add_rows(self._sender.view(member), ids, values, kept)
        self._replanner.saw_rows(member, num_bytes, only=purpose is None)
        self._stamp([member])
        self._count(member)
        self._send_full()

    @contextmanager
    def without(self, parameters: Sequence[Any]) -> Iterator[None]:
        """Ignore, inside the block, the gradients that the running autograd node hands over for these parameters.

        The node gives none of them a gradient.
        """
        members = {number for number, each in enumerate(self._parameters) if any(each is one for one in parameters)}
        if self.is_ours and any(is_accumulated(self._accumulators[member]) for member in members):
            self._begin()  # this rank has to take part even if no gradient arrives
        self._absent = members
        try:
            yield
        finally:
            self._absent = set()

    def _is_taken(self, member: int) -> bool:
        return self.is_ours and member not in self._absent and is_accumulated(self._accumulators[member])

    def _passes_through(self, member: int) -> bool:
        """Return whether a gradient is not reduced as it arrives: autograd accumulates it first, or only returns it."""
        if not self._is_taken(member):
            return True
        self._begin()
        return member in self._arrived or member in self._in_parts

    def _sends_rows(self, member: int) -> bool:
        return (
            self._armed
            and member in self.plan.tables
            and not (torch.is_grad_enabled() or has_hooks(self._parameters[member]))
        )

    def _fill(self, member: int, gradient: Tensor | None) -> None:
        """Put a gradient (None: zeros) into its bucket, added to those of earlier micro-batches.

        The sum is sent as one gradient, and autograd gets the view in place of the earlier gradients.
        """
        parameter, view = self._parameters[member], self._sender.view(member)
        earlier, parameter.grad = parameter.grad, None
        if gradient is None:
            if earlier is None:
                view.zero_()
            elif earlier.data_ptr() != view.data_ptr():
                view.copy_(earlier)
        elif earlier is None:
            view.copy_(gradient)
        elif earlier.data_ptr() == view.data_ptr():
            view.add_(gradient)
        else:
            torch.add(earlier, gradient, out=view)

    def _copy(self, member: int, gradient: Tensor) -> Tensor:
        shape, stride, dtype, device = self._layouts[member]
        return torch.empty_strided(shape, stride, dtype=dtype, device=device).copy_(gradient)

    def wait(self, members: Sequence[int]) -> list[Tensor]:
        """Return the gradients for autograd: reduced, or to be reduced in place before the backward ends.

        Until then autograd only stores the gradients, unless the user's hooks read them or autograd creates a graph of
        the backward; only in these two cases this method waits.
        """
        if torch.is_grad_enabled() or any(has_hooks(self._parameters[member]) for member in members):
            self._sender.wait(member for member in members if member not in self._parts)
        return [
            self._parts.pop(each) if each in self._parts else self._sender.view(each).view_as(self._parameters[each])
            for each in members
        ]

    def layouts(self, members: Sequence[int]) -> list[tuple[Any, ...]]:
        """Return shape, stride, dtype and device of each result of `wait`."""
        return [self._layouts[member] for member in members]

    def _hook(self, member: int) -> Callable[[nn.Parameter], None]:
        this = weakref.ref(self)  # a parameter's hooks must not keep its module alive

        def accumulated(parameter: nn.Parameter) -> None:
            reducer = this()
            if reducer is not None and reducer._armed and parameter.grad is not None:
                reducer._accumulated(member, parameter.grad)

        return accumulated

    def _accumulated(self, member: int, gradient: Tensor) -> None:
        """Handle a gradient that autograd has accumulated."""
        self._begin()
        if member not in self._arrived:
            self._stamp([member])
            self.counts.late += 1
            self._take(member, gradient)
            self._count(member)
            self._send_full()
        elif gradient.data_ptr() != self._sender.view(member).data_ptr():  # a sum of parts
            if self._sender.memory_of(member).launched:
                raise GradientError(
                    f"{self._names[member]} got a gradient in parts, from a compiled graph and from elsewhere, for the "
                    "first time after the first step; expected it in every step: compile with "
                    "options={'reduce_gradients': False}"
                )
            self._take(member, gradient)
            self._in_parts.add(member)
            rows = self._rows.pop(member, None)  # the rows are not the whole gradient, which is there now
            if rows is not None:
                rows.add_to(self._sender.view(member))

    def _stamp(self, members: Iterable[int]) -> None:
        if self._replanner.times is not None:
            self._replanner.times.arrived(member for member in members if member not in self._arrived)

    def _take(self, member: int, gradient: Tensor) -> None:
        """Move a gradient that autograd holds into its bucket, and give autograd the view."""
        view = self._sender.view(member)
        if gradient.data_ptr() != view.data_ptr():
            view.copy_(gradient)
            self._parameters[member].grad = view.view_as(view)

    def _count(self, member: int) -> None:
        self._arrived.add(member)
        self._sender.fill(member)

    def _send_full(self) -> None:
        if self._armed and not self._replanner.phase.holds_back:
            self._sender.send_full()

    # ------------------------------------------------------------------ one backward

    def _begin(self) -> None:
        current = current_graph_task_id()
        if self._backward == current:
            return
        if self._backward >= 0 and self._armed and not self._armed_anew:
            raise GradientError(
                "a backward began inside of a backward (reentrant checkpointing, or a custom autograd.Function) or "
                "behind one that failed; expected one at a time: use checkpoint(..., use_reentrant=False), or "
                "compile with options={'reduce_gradients': False}"
            )
        self._armed_anew = False
        self._backward = current  # an earlier one that ended in an error is forgotten
        self._arrived.clear()
        self._parts.clear()
        self._rest_of.clear()
        self._rows.clear()
        self._sender.begin()
        if self._armed:
            self._replanner.begin()
        queue_callback(self._end)

    def _end(self) -> None:
        """End the backward: send what has not been sent, in order, and wait for everything."""
        times = self._replanner.times
        try:
            if self._armed:
                self._send_rest()
        finally:
            self._backward = -1
            armed, self._armed = self._armed, False
            self._replanner.forget()
        if self._released:
            self._detach()
        if armed:
            self.counts.syncs += 1
            self.counts.transfers = self._sender.transfers()
            plan = None if times is None else self._replanner.next_plan(self.plan, times)
            if plan is not None:
                self._set_plan(plan)

    def _send_rest(self) -> None:
        unused = [member for member in range(len(self._parameters)) if member not in self._arrived]
        touched = [member in self._arrived or each.grad is not None for member, each in enumerate(self._parameters)]
        kept: list[int] = []
        sources: list[Tensor] = []
        for member in unused:
            gradient = self._parameters[member].grad
            if gradient is None:
                self._sender.view(member).zero_()
                self._rows[member] = None
            else:
                kept.append(member)
                sources.append(gradient)
            self._count(member)
        if kept:
            self._sender.pack(kept, sources)
        if self._replanner.times is not None:
            self._replanner.times.ended()
        if self._replanner.phase.holds_back:
            self._replanner.saw_network(self.plan.buckets, self._sender.send_one_by_one())
        self._send_full()
        flags = self._used_anywhere(touched) if self._may_be_unused else None  # after all buckets, on every rank
        self._sender.wait()
        if self.plan.tables:
            reduce_rows(self._group, self._sender, self._rows)
        for member in self._arrived.difference(unused):  # autograd may have cloned the view it was given
            parameter, view = self._parameters[member], self._sender.view(member)
            if parameter.grad is not None and parameter.grad.data_ptr() != view.data_ptr():
                parameter.grad = view.view_as(view)
        # read only if needed, because reading waits for the device
        used = [bool(flag) for flag in flags.tolist()] if unused and flags is not None else None
        for member in unused:
            if used is None or used[member]:
                self._parameters[member].grad = self._sender.view(member).view_as(self._parameters[member])
        if unused and used is None:
            names = ", ".join(self._names[member] for member in unused[:5])
            more = f" and {len(unused) - 5} more" if len(unused) > 5 else ""
            raise GradientError(
                f"no gradient came for {names}{more}; expected one for every parameter that requires grad: give "
                "find_unused_parameters=True to DistributedDataParallel where some are not used, or freeze them"
            )

    def _used_anywhere(self, touched: Sequence[bool]) -> Tensor:
        """Return which parameters some rank has used, in this backward or in earlier ones that it only accumulated.

        (parameters,) int32 on their device, 0 or 1.
        """
        found = send(torch.tensor(touched, dtype=torch.int32), self._parameters[0].device)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self._group)
        return found
