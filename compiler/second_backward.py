"""What AOTAutograd's backwards cannot do: keep their graph for a second one, or be differentiated themselves.

A compiled region leaves one autograd node behind, which is a Python object, and autograd looks its `apply` up in it for
every backward. So a node of one call can be given another one, with nothing between the region and its outputs, neither
a copy nor a view. Ordinary backwards go on to what was there. One that is to keep what donated buffers would
overwrite (`retain_graph=True`), or to have a graph of its own (`create_graph=True`), runs the region's forward again in
eager, with random numbers, autocast and buffers as they were, and differentiates that.

Once that was asked for, the region runs in eager: asked once is asked at every step.

[Note: what is kept] The inputs of a call are kept until its backward, and not longer: weights live anyway, and what
comes from regions before mostly is saved for the backward too. Inside of a checkpoint, which is there to have them
gone, they are not kept: its own arguments are still alive, and where others are not the backward is what it was. What
the region writes into is copied before, but for statistics that no output depends on (BatchNorm's).
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.autograd import forward_ad

from deepytorch.compiler.report import RegionRecord
from deepytorch.compiler.unused_outputs import Parts, with_zeros
from deepytorch.log import logger, once

_VIEWS = 8  # how many nodes lie, at most, between an output that is a view and the node of its region
_BACKWARD = ("apply", "apply_boxed")  # what autograd calls of a node; newer versions hand gradients over in a list


@dataclass(slots=True)
class Call:
    """One call of a region as it began: what it takes to run it again.

    copies: of inputs that the call wrote into, by their place, from before.
    """

    inputs: Sequence[Any]
    versions: list[int]
    copies: dict[int, torch.Tensor]
    random: list[tuple[torch.Generator, torch.Tensor]]
    autocast: list[tuple[str, bool, torch.dtype]]
    rerun: Callable[..., Sequence[Any]]

    def let_go(self) -> None:
        """Keep the inputs no longer than others do."""
        self.inputs = [weakref.ref(each) if isinstance(each, torch.Tensor) else each for each in self.inputs]

    def kept(self) -> Sequence[Any] | None:
        """The inputs, or None where one is gone."""
        found = [each() if isinstance(each, weakref.ref) else each for each in self.inputs]
        gone = [isinstance(one, weakref.ref) and other is None for one, other in zip(self.inputs, found, strict=True)]
        return None if any(gone) else found


@dataclass(slots=True)
class _Rerun:
    """A forward that was run again: its outputs, the inputs as it left them, and what stands for each input in it."""

    outputs: Sequence[Any]
    inputs: list[Any]
    sources: dict[Any, torch.Tensor] = field(default_factory=dict)  # by edge


class SecondBackward:
    """Watches the calls of one region, for backwards that need more than it compiled.

    unread: places of inputs that are written, and that no output depends on. asked: called at the first such backward,
    with what it asked for. parts: which inputs have a part in which outputs, if weights behind unused ones are to have
    no gradient.
    """

    def __init__(self, unread: Collection[int], asked: Callable[[str], None], parts: Parts | None = None) -> None:
        self._unread, self.asked, self._parts = frozenset(unread), asked, parts
        self.behind: list[frozenset[int] | None] | None = None  # of each gradient that a node returns: see `parts`
        self.differentiable: list[bool] = []  # of each gradient that a node is given
        self._places: list[int] | None = None  # of tensors among the inputs, those that are written left out
        self._written: list[int] = []
        self._devices: list[str] = []
        self._generators: list[torch.Generator] = []  # that the region draws from
        self._all_generators: list[torch.Generator] = []  # that it could draw from
        self._node_class: Any = None
        self._route: tuple[int, int] = (0, 0)  # from which output, and how many nodes back, its node is found
        self._blind = False  # no output has a graph, or it is none that we know

    # ------------------------------------------------------------------ a call

    def begin(self, inputs: Sequence[Any], rerun: Callable[..., Sequence[Any]]) -> Call | None:
        """Right before a call. `rerun(*inputs)` gives, in eager, what the compiled call gives, output for output."""
        if self._blind or not torch.is_grad_enabled():
            return None
        try:
            return self._begin(inputs, rerun)
        except Exception:  # a kind of tensor that cannot be copied, or has no version
            self._blind = True
            logger.debug("traceback of the failure", exc_info=True)
            return None

    def _begin(self, inputs: Sequence[Any], rerun: Callable[..., Sequence[Any]]) -> Call:
        if self._places is None:
            self._look_at(inputs)
        assert self._places is not None
        return Call(
            inputs,
            [inputs[place]._version for place in self._places],
            {place: inputs[place].clone() for place in self._written},
            [(generator, generator.get_state()) for generator in self._generators],
            [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in self._devices],
            rerun,
        )

    def watch(self, call: Call | None, outputs: Sequence[Any]) -> None:
        """Right behind the call that `call` stands for."""
        if call is None:
            return
        node = self._known_node(outputs)
        if node is None:
            try:
                node = self._find_node(call, outputs)
                known = node is not None and self._learn(call, node, len(outputs))
            except Exception:  # likewise: to be ready for what may never be asked must not cost the step
                known = False
                logger.debug("traceback of the failure", exc_info=True)
            if not known:
                self._blind = True
                return
        replacement = _Replacement(self, call, weakref.ref(node))
        if self.behind is not None:
            node.set_materialize_grads(False)
        for name in _BACKWARD:
            if hasattr(self._node_class, name):
                setattr(node, name, getattr(replacement, name))

    # ------------------------------------------------------------------ what the first call shows

    def _look_at(self, inputs: Sequence[Any]) -> None:
        tensors = [place for place, each in enumerate(inputs) if isinstance(each, torch.Tensor)]
        self._unread = frozenset(place for place in self._unread if not inputs[place].requires_grad)
        self._places = [place for place in tensors if not inputs[place].is_inference()]
        self._written = [
            place
            for place in tensors
            if place not in self._unread
            and not isinstance(inputs[place], nn.Parameter)
            and not _stands_for_more(inputs[place])
        ]
        devices = sorted({inputs[place].device for place in tensors}, key=str)
        self._devices = sorted({"cpu", *(device.type for device in devices if _has_autocast(device.type))})
        self._all_generators = [torch.default_generator]
        for device in devices:
            if device.type == "cuda":
                self._all_generators.append(torch.cuda.default_generators[device.index])
        self._generators = self._all_generators

    def _learn(self, call: Call, node: Any, num_outputs: int) -> bool:
        """Which inputs the region writes into and whether it is random; False where the node is not as we know them."""
        metadata = node._forward_cls.metadata
        assert self._places is not None
        if metadata.num_outputs != num_outputs or any(info.mutates_metadata for info in metadata.input_info):
            return False
        written = set(self._unread)
        if len(metadata.input_info) == len(call.inputs):  # else some were merged, and the rest has to show it
            written |= {place for place, info in enumerate(metadata.input_info) if info.mutates_data}
        for place, version in zip(self._places, call.versions, strict=True):
            if call.inputs[place]._version != version:
                written.add(place)
        written |= {place for place, copy in call.copies.items() if not _same(copy, call.inputs[place])}
        self._written = sorted(written - self._unread)
        if any(place not in call.copies for place in self._written):
            return False  # a parameter that its own region writes into
        places = [place for place in self._places if place not in written]
        versions = dict(zip(self._places, call.versions, strict=True))
        call.versions = [versions[place] for place in places]
        call.copies = {place: call.copies[place] for place in self._written}
        self._places = places
        call.random = [(each, state) for each, state in call.random if not torch.equal(each.get_state(), state)]
        self._generators = [generator for generator, _ in call.random]
        self._learn_parts(call, node)
        return True

    def _learn_parts(self, call: Call, node: Any) -> None:
        metadata = node._forward_cls.metadata
        if self._parts is None or metadata.mutated_inp_runtime_indices or metadata.num_intermediate_bases:
            return
        behind: dict[Any, frozenset[int]] = {}
        for given, part in zip(call.inputs, self._parts, strict=True):
            edge = _edge(given) if isinstance(given, torch.Tensor) else None
            if edge is not None:
                behind[edge] = behind.get(edge, frozenset()) | part
        edges = iter([_known(*edge) for edge in node.next_functions if edge[0] is not None])
        self.behind = [behind.get(next(edges, None)) if needs else None for needs in node.needs_input_grad]
        self.differentiable = [bool(info.requires_grad) for info in metadata.output_info]
        if len(node._input_metadata) != len(self.differentiable):
            self.behind = None

    def _known_node(self, outputs: Sequence[Any]) -> Any:
        if self._node_class is None:
            return None
        number, steps = self._route
        node = outputs[number].grad_fn
        for _ in range(steps):
            node = node.next_functions[0][0] if node is not None else None
        return node if type(node) is self._node_class and _BACKWARD[0] not in vars(node) else None

    def _find_node(self, call: Call, outputs: Sequence[Any]) -> Any:
        for number, output in enumerate(outputs):
            node = output.grad_fn if isinstance(output, torch.Tensor) else None
            for steps in range(_VIEWS):
                if node is None:
                    break
                if _is_ours(node, call):
                    self._node_class, self._route = type(node), (number, steps)
                    return node
                node = node.next_functions[0][0] if node.next_functions else None
        return None

    # ------------------------------------------------------------------ the forward, again

    def run_again(self, call: Call, edges: Collection[Any]) -> _Rerun | None:
        """Run the forward of a call in eager, if its inputs are still there. edges: what gradients are wanted for."""
        inputs = call.kept()
        if inputs is None:
            return None
        self._check(call, inputs)
        found = _Rerun((), list(inputs))
        aliases: dict[int, torch.Tensor] = {}
        with _as_it_was(call, self._all_generators), torch.enable_grad():
            for place, given in enumerate(inputs):
                if not isinstance(given, torch.Tensor):
                    continue
                if id(given) not in aliases:
                    aliases[id(given)] = self._stand_in(given, call.copies.get(place), place, edges, found.sources)
                found.inputs[place] = aliases[id(given)]
            found.outputs = call.rerun(*found.inputs)
        return found

    def _stand_in(
        self,
        given: torch.Tensor,
        copy: torch.Tensor | None,
        place: int,
        edges: Collection[Any],
        sources: dict[Any, torch.Tensor],
    ) -> torch.Tensor:
        """What the forward is run on in place of an input, whose own hooks have no business in here."""
        if place in self._unread:
            return given.detach().clone()
        before, edge = (given, _edge(given)) if copy is None else (copy, _edge_behind(copy))
        if edge not in edges:
            return before.detach() if copy is None else before.detach().clone()
        source = before.view_as(before) if before.requires_grad else before.detach().requires_grad_()
        sources[edge] = source
        return source if copy is None else source.clone()

    def _check(self, call: Call, inputs: Sequence[Any]) -> None:
        assert self._places is not None
        for place, version in zip(self._places, call.versions, strict=True):
            given = inputs[place]
            if given._version != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"[{given.type()} {list(given.shape)}] is at version {given._version}; expected version {version} "
                    "instead."
                )


class TwiceDifferentiable:
    """A compiled region that falls back to `eager`, its own graph, where its backward is asked for more than once."""

    def __init__(
        self,
        compiled: Callable[..., Sequence[Any]],
        eager: Callable[..., Sequence[Any]],
        unread: Collection[int],
        record: RegionRecord,
        parts: Parts | None = None,
    ) -> None:
        self._compiled, self._eager, self._record = compiled, eager, record
        self._second = SecondBackward(unread, self._asked, parts)
        self._in_eager = False

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        """Run the region."""
        in_checkpoint = _saves_elsewhere()  # which expects the same forward when it is run again, whatever was asked
        if (self._in_eager and not in_checkpoint) or forward_ad._current_level >= 0:
            return self._eager(*inputs)
        call = self._second.begin(inputs, self._eager)
        outputs = self._compiled(*inputs)
        self._second.watch(call, outputs)
        if call is not None and in_checkpoint:
            call.let_go()
        return outputs

    def _asked(self, what: str) -> None:
        if not self._in_eager:
            self._in_eager = True
            self._record.fallbacks.append(f"{self._record.name}: a backward with {what}; the region runs in eager")
            once(
                logging.INFO,
                "a backward with %s, which compiled code cannot do: what it went through runs in eager from now on",
                what,
            )


def _stands_for_more(tensor: torch.Tensor) -> bool:
    """Whether places of it share memory (`expand`): torch writes into no such tensor, and a copy holds them all."""
    return tensor.layout is torch.strided and any(
        stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


class _Replacement:
    """What a node runs as its backward."""

    __slots__ = ("_again", "_call", "_node", "_second")

    def __init__(self, second: SecondBackward, call: Call, node: weakref.ref[Any]) -> None:
        self._second, self._node = second, node  # weakly: the node holds this
        self._call: Call | None = call
        self._again: _Rerun | None = None

    def apply(self, *gradients: Any) -> Any:
        """Gradients of the inputs, from those of the outputs."""
        return self._run("apply", gradients, gradients)

    def apply_boxed(self, gradients: list[Any]) -> Any:
        """The same, for a list that is emptied."""
        return self._run("apply_boxed", (gradients,), gradients)

    def _run(self, name: str, arguments: Sequence[Any], gradients: Sequence[Any]) -> Any:
        node: Any = self._node()
        if self._second.behind is not None:
            gradients = list(gradients)
            filled = with_zeros(node, gradients, self._second.differentiable)
            arguments = filled if name == _BACKWARD[0] else (filled,)
        stock = partial(self._stock, getattr(type(node), name), list(gradients))
        keeps, creates = torch._C._autograd._get_current_graph_task_keep_graph(), torch.is_grad_enabled()
        call, again = self._call, self._again
        if not keeps:
            self._call = self._again = None
        if call is None:
            return stock(node, *arguments)
        asked = "create_graph=True" if creates else "retain_graph=True" if keeps and _donates(node) else None
        if asked is None:
            call = call if call.copies else None
            try:
                return stock(node, *arguments)
            except RuntimeError as error:  # before it took any gradient
                if call is None or "modified by an inplace operation" not in str(error):
                    raise
                asked = "buffers that a later call wrote into"
        edges = [_known(*edge) for edge in node.next_functions if edge[0] is not None]
        again = again or self._second.run_again(call, edges)
        self._again = again if keeps else None
        found = None if again is None else _differentiate(node, again, edges, gradients, creates)
        if found is None:
            return stock(node, *arguments)
        self._second.asked(asked)
        return found

    def _stock(self, backward: Any, gradients: Sequence[Any], node: Any, *arguments: Any) -> Any:
        """What the node would have run, without the zeros that it makes for weights of outputs that nobody used."""
        found, behind = backward(node, *arguments), self._second.behind
        used = {number for number, each in enumerate(gradients) if each is not None}
        if behind is None or len(used) == sum(self._second.differentiable) or len(found) != len(behind):
            return found
        return tuple(
            None if part is not None and not part & used else each for each, part in zip(found, behind, strict=True)
        )


def _differentiate(
    node: Any, again: _Rerun, edges: Sequence[Any], gradients: Sequence[Any], creates: bool
) -> tuple[Any, ...] | None:
    """What the node hands to its edges; None where they, or its outputs, cannot be told."""
    values = _values(node._forward_cls.metadata, again, len(gradients))
    if values is None or len(edges) != sum(node.needs_input_grad) or any(edge not in again.sources for edge in edges):
        return None
    came = [(value, each) for value, each in zip(values, gradients, strict=True) if each is not None]
    if any(not isinstance(value, torch.Tensor) or value.shape != each.shape for value, each in came):
        return None
    came = [(value, each) for value, each in came if value.requires_grad]
    nodes = [edge[0] for edge in node.next_functions if edge[0] is not None]
    wanted = [edge for place, edge in enumerate(edges) if edge not in edges[:place] and _is_wanted(nodes[place])]
    if not came or not wanted:
        return (None,) * len(node.needs_input_grad)
    results = torch.autograd.grad(
        [value for value, _ in came],
        [again.sources[edge] for edge in wanted],
        [each for _, each in came],
        create_graph=creates,
        retain_graph=True,
        allow_unused=True,
    )
    handed = dict(zip(wanted, results, strict=True))
    left = iter(edges)
    return tuple(handed.pop(next(left), None) if needs else None for needs in node.needs_input_grad)


def _is_wanted(node: Any) -> bool:
    """Whether autograd goes on to this node, or hands out what would go there."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # it does not tell of a leaf where only some gradients are asked for
        return True


def _values(metadata: Any, again: _Rerun, count: int) -> list[Any] | None:
    """Eager's values of the node's outputs: inputs that were changed, outputs, and what outputs are views of."""
    changed, bases = metadata.mutated_inp_runtime_indices, metadata.num_intermediate_bases
    if count != len(changed) + metadata.num_outputs + bases or len(again.outputs) != metadata.num_outputs:
        return None
    if changed and len(metadata.input_info) != len(again.inputs):
        return None
    views: dict[int, Any] = {}
    for info, output in zip(metadata.output_info, again.outputs, strict=True):
        if info.output_type.name in ("alias_of_intermediate", "alias_of_intermediate_save_as_output"):
            views.setdefault(info.base_idx, output._base)
    return [
        *(again.inputs[place] for place in changed),
        *again.outputs,
        *(views.get(number) for number in range(bases)),
    ]


def _edge(given: torch.Tensor) -> Any:
    """Where the gradient of a tensor goes, in a form that can be compared."""
    if given.grad_fn is not None:
        return given.grad_fn, given.output_nr
    return (id(given), 0) if given.is_leaf else None


def _edge_behind(copy: torch.Tensor) -> Any:
    return None if copy.grad_fn is None else _known(*copy.grad_fn.next_functions[0])


def _known(node: Any, number: int) -> Any:
    """An edge of a node, as `_edge` has it."""
    return (id(node.variable), 0) if type(node).__name__ == "AccumulateGrad" else (node, number)


def _is_ours(node: Any, call: Call) -> bool:
    """Whether this is the node of a graph that AOTAutograd compiled, called with these inputs."""
    metadata = getattr(getattr(node, "_forward_cls", None), "metadata", None)
    if not hasattr(metadata, "output_info") or _BACKWARD[0] in vars(node):
        return False
    edges = {_edge(each) for each in call.inputs if isinstance(each, torch.Tensor)}
    edges |= {_edge_behind(copy) for copy in call.copies.values()}
    return all(_known(*edge) in edges for edge in node.next_functions if edge[0] is not None)


def _donates(node: Any) -> bool:
    """Whether the compiled backward overwrites what the forward saved, so that it cannot run twice.

    One that is compiled at its first call, which is this one, is told whether it may.
    """
    compiled = node._forward_cls
    return bool(
        torch._functorch.config.donated_buffer
        and compiled.compiled_bw is not None
        and compiled.metadata.bw_donated_idxs != []
    )


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    with torch.no_grad():
        return bool(((one == other) | ((one != one) & (other != other))).all())


def _has_autocast(kind: str) -> bool:
    return bool(torch.amp.is_autocast_available(kind))


def _saves_elsewhere() -> bool:
    """Whether what is saved for a backward goes through hooks: a checkpoint, for example."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


@contextlib.contextmanager
def _as_it_was(call: Call, generators: Sequence[torch.Generator]) -> Iterator[None]:
    """Random numbers and autocast as they were at the call; what is drawn inside is not missing outside."""
    now = [(generator, generator.get_state()) for generator in generators]
    with contextlib.ExitStack() as stack:
        for kind, enabled, dtype in call.autocast:
            stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
        try:
            for generator, state in call.random:
                generator.set_state(state)
            yield
        finally:
            for generator, state in now:
                generator.set_state(state)


# ---------------------------------------------------------------------- what a graph of Dynamo's writes


_STATISTICS = {
    torch.nn.functional.batch_norm: ("training", 5),
    torch.nn.functional.instance_norm: ("use_input_stats", 5),
}


def unread_statistics(graph: fx.Graph) -> frozenset[int]:
    """Places of inputs that a graph of Dynamo's writes into, and that none of its outputs depends on."""
    found = [
        place
        for place, node in enumerate(_placeholders(graph))
        if node.users and all(_only_writes(user, node) for user in node.users)
    ]
    return frozenset(found)


def _placeholders(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def _only_writes(user: fx.Node, node: fx.Node) -> bool:
    if user.op == "call_method":
        return user.target == "add_" and user.args[0] is node and not user.users
    if user.target not in _STATISTICS:
        return False
    name, place = _STATISTICS[user.target]
    writes = user.kwargs.get(name, user.args[place] if len(user.args) > place else name == "use_input_stats")
    others = [*user.args[:1], *user.args[3:], *(v for k, v in user.kwargs.items() if not k.startswith("running_"))]
    return writes is True and node not in others
