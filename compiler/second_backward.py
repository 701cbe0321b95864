"""What AOTAutograd's backwards cannot do: keep their graph for a second one, or be differentiated themselves.

A compiled region leaves one autograd node behind, which is a Python object, and autograd looks its `apply` up in it for
every backward. So a node of one call can be given another one, with nothing between the region and its outputs, neither
a copy nor a view. Ordinary backwards go on to what was there. One that is to keep what donated buffers would
overwrite (`retain_graph=True`), or to have a graph of its own (`create_graph=True`), runs the region's forward again in
eager, with random numbers, autocast and buffers as they were (`run_again`), and differentiates that.

Once that was asked for, the region runs in eager: asked once is asked at every step.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from deepytorch.compiler.autograd_edges import comparable, edge_behind, edge_of
from deepytorch.compiler.report import RegionRecord
from deepytorch.compiler.run_again import Call, Rerun, differentiate, run_again
from deepytorch.compiler.unused_outputs import Parts, with_zeros
from deepytorch.log import logger, once
from deepytorch.torch_internals import (
    forward_ad_level,
    functorch_config,
    keeps_graph_of_this_backward,
    top_saved_tensors_default_hooks,
)

_VIEWS = 8  # how many nodes lie, at most, between an output that is a view and the node of its region


_BACKWARD = ("apply", "apply_boxed")  # what autograd calls of a node; newer versions hand gradients over in a list


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
            edge = edge_of(given) if isinstance(given, torch.Tensor) else None
            if edge is not None:
                behind[edge] = behind.get(edge, frozenset()) | part
        edges = iter([comparable(*edge) for edge in node.next_functions if edge[0] is not None])
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
                if _is_of_call(node, call):
                    self._node_class, self._route = type(node), (number, steps)
                    return node
                node = node.next_functions[0][0] if node.next_functions else None
        return None

    # ------------------------------------------------------------------ a backward that asks for more

    def run_again(self, call: Call, edges: Collection[Any]) -> Rerun | None:
        """Run the forward of a call in eager, if its inputs are still there. edges: what gradients are wanted for."""
        assert self._places is not None
        return run_again(call, edges, unread=self._unread, places=self._places, generators=self._all_generators)


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
        if (self._in_eager and not in_checkpoint) or forward_ad_level() >= 0:
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
        self._again: Rerun | None = None

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
        keeps, creates = keeps_graph_of_this_backward(), torch.is_grad_enabled()
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
        edges = [comparable(*edge) for edge in node.next_functions if edge[0] is not None]
        again = again or self._second.run_again(call, edges)
        self._again = again if keeps else None
        found = None if again is None else differentiate(node, again, edges, gradients, creates)
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


def _is_of_call(node: Any, call: Call) -> bool:
    """Whether this is the node of a graph that AOTAutograd compiled, called with these inputs."""
    metadata = getattr(getattr(node, "_forward_cls", None), "metadata", None)
    if not hasattr(metadata, "output_info") or _BACKWARD[0] in vars(node):
        return False
    edges = {edge_of(each) for each in call.inputs if isinstance(each, torch.Tensor)}
    edges |= {edge_behind(copy) for copy in call.copies.values()}
    return all(comparable(*edge) in edges for edge in node.next_functions if edge[0] is not None)


def _donates(node: Any) -> bool:
    """Whether the compiled backward overwrites what the forward saved, so that it cannot run twice.

    One that is compiled at its first call, which is this one, is told whether it may.
    """
    compiled = node._forward_cls
    return bool(
        functorch_config.donated_buffer and compiled.compiled_bw is not None and compiled.metadata.bw_donated_idxs != []
    )


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    with torch.no_grad():
        return bool(((one == other) | ((one != one) & (other != other))).all())


def _has_autocast(kind: str) -> bool:
    return bool(torch.amp.is_autocast_available(kind))


def _saves_elsewhere() -> bool:
    """Whether what is saved for a backward goes through hooks: a checkpoint, for example."""
    return top_saved_tensors_default_hooks(False) is not None
