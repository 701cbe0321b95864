"""Backwards that AOTAutograd cannot give: one that keeps its graph for a second one, or is differentiated itself.

A compiled region leaves one autograd node behind. The node is a Python object, and autograd looks up its `apply` for
every backward. So the node of one call can be given another `apply`, with neither a copy nor a view between the region
and its outputs. Ordinary backwards go on to the node's own `apply`. Four kinds of backward run the region's forward
again in eager, with random numbers, autocast and buffers as they were (`run_again`), and differentiate that:

- one that has to keep values that donated buffers would overwrite (`retain_graph=True`);
- one that has to have a graph of its own (`create_graph=True`);
- one that goes through the remains of an earlier one: eager frees operator by operator what a backward met, AOTAutograd
  frees a whole region, though its parts may share nothing (`_Replacement`);
- one that fails.

Once such a backward was asked for, the region runs in eager: what a script asked once it asks at every step. A region
whose node cannot be found, or is of an unknown kind, runs in eager from its first call on.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from deepytorch.comm.gradients.registry import without_gradients
from deepytorch.compiler.step.layouts import has_ordered_gradient, ordered
from deepytorch.compiler.step.past import Past, generators_of
from deepytorch.compiler.step.run_again import (
    Passage,
    Rerun,
    differentiate,
    edge_behind,
    edge_of,
    edges_before,
    edges_of,
    go_through,
    run_again,
    wanted_edges,
)
from deepytorch.compiler.step.unused_outputs import Parts
from deepytorch.log import logger
from deepytorch.torch_internals import (
    disable_dynamo,
    functorch_config,
    keeps_graph_of_this_backward,
    top_saved_tensors_default_hooks,
    will_engine_execute_node,
)

_VIEWS = 8  # the most nodes between an output that is a view and the node of its region

_BACKWARD = ("apply", "apply_boxed")  # a node's methods that autograd calls; newer versions pass gradients in a list


class SecondBackward:
    """The support of one region's calls for backwards that its compiled code cannot give.

    unread: places of inputs that are written, and that no output depends on. asked: called at the first such backward,
    with its request. parts: the part of inputs in outputs, if weights behind unused outputs are to have no gradient.
    """

    def __init__(self, unread: Collection[int], asked: Callable[[str], None], parts: Parts | None = None) -> None:
        self._unread, self.asked, self._parts = frozenset(unread), asked, parts
        self.behind: list[frozenset[int] | None] | None = None  # of each gradient that a node returns: see `parts`
        self.differentiable: list[bool] | None = None  # of each gradient that a node is given; None: it is not known
        self.in_order: list[bool] = []  # of each gradient that a node returns: see `layouts`
        self.stands_for: list[frozenset[int]] = []  # of each gradient that a node is given the outputs, as in `parts`
        self.saves = True  # whether the forward saves tensors, so that only one backward can go through it
        self.waiting: weakref.WeakSet[_Replacement] = weakref.WeakSet()  # for another backward that may come
        self._places: list[int] | None = None  # of tensors among the inputs, without those that are written
        self._written: list[int] = []
        self._generators: list[torch.Generator] = []  # that the region draws from
        self._all_generators: list[torch.Generator] = []  # that the region could draw from
        self._node_class: Any = None
        self._route: tuple[int, int] = (0, 0)  # the output from which the node is found, and the number of nodes back
        self._blind = False  # no output has a graph, or the graph is of an unknown kind
        self.declines = False  # the inputs are of an unknown kind: the region runs in eager from its first call on

    # ------------------------------------------------------------------ a call

    def run(
        self,
        code: Callable[[Sequence[Any]], Sequence[Any]],
        arguments: Sequence[Any],
        again: Callable[..., Sequence[Any]],
        inputs: Sequence[Any],
        *,
        lets_go: bool = False,
    ) -> Sequence[Any]:
        """Run compiled code, and make its node ready for backwards that the code cannot give.

        again: gives the same outputs in eager, called as `again(*inputs)`. lets_go: inside of a checkpoint, inputs are
        kept no longer than others keep them.
        """
        call = self.begin(inputs, again)
        if self.declines:
            return tuple(again(*inputs))
        outputs = self.watch(call, code(arguments))
        if call is not None and lets_go and _saves_elsewhere():
            call.let_go()
        return outputs

    def begin(self, inputs: Sequence[Any], rerun: Callable[..., Sequence[Any]]) -> Past | None:
        """Return the past of a call that is about to run; None if no backward can need it, or if it cannot be made.

        rerun: gives in eager, called as `rerun(*inputs)`, the outputs of the compiled call.
        """
        if self._blind or not torch.is_grad_enabled():
            return None
        try:
            for each in list(self.waiting) if self.waiting else ():
                each.let_go_if_changed()
            if self._places is None:
                self._places = self._look_at(inputs)
            versions, copies = {}, {}
            for place in self._places:
                versions[place] = inputs[place]._version
            for place in self._written:
                copies[place] = inputs[place].clone()
            return Past(rerun, inputs, versions, copies, self._generators)
        except Exception:  # a kind of tensor that cannot be copied, or has no version
            self._blind = self.declines = True
            self.asked("inputs that cannot be watched for what else it asks")
            logger.debug("traceback of the failure", exc_info=True)
            return None

    def watch(self, call: Past | None, outputs: Sequence[Any]) -> Sequence[Any]:
        """Make the node of a call that has just run ready; return the outputs to hand out, mostly the call's own."""
        if call is None:
            return outputs
        node = self._known_node(outputs)
        if node is None:
            try:
                node = self._find_node(call, outputs)
                known = node is not None and self._learn(call, node, outputs)
            except Exception:  # an unknown kind of node: support for a rare backward must not break the step
                known = False
                logger.debug("traceback of the failure", exc_info=True)
            if not known:
                return self._unwatched(call, outputs)
        if self._node_class is None:
            return outputs
        replacement = _Replacement(self, call, weakref.ref(node))
        if self.differentiable is not None:
            node.set_materialize_grads(False)
        for name in _BACKWARD:
            if hasattr(self._node_class, name):
                setattr(node, name, getattr(replacement, name))
        return outputs

    def _unwatched(self, call: Past, outputs: Sequence[Any]) -> Sequence[Any]:
        """Return the outputs to hand out of a call whose node cannot be made ready.

        Eager's outputs if a backward can go through the call and the call has changed none of its inputs; else its own.
        """
        self._blind = True
        before = {id(edge[0]) for edge in edges_before(call) if edge is not None}
        chains = [chain for each in outputs for chain in _nodes_behind(each)]
        if not any(_is_compiled(node) and id(node) not in before for node in chains):
            return outputs
        self.asked("a graph that cannot be watched for what else it asks")
        if call.changed() or any(not _same(copy, call.inputs[place]) for place, copy in call.copies.items()):
            return outputs
        call.rewind()
        return tuple(call.eager(*call.inputs))

    # ------------------------------------------------------------------ what the first call shows

    def _look_at(self, inputs: Sequence[Any]) -> list[int]:
        """Learn what the first call's inputs show; return the places of tensors whose versions count writes."""
        tensors = [place for place, each in enumerate(inputs) if isinstance(each, torch.Tensor)]
        self._unread = frozenset(place for place in self._unread if not inputs[place].requires_grad)
        written = self._parts.written if self._parts is not None else frozenset[int]()
        for place in written:
            there = [each for each in tensors if _share_memory(inputs[each], inputs[place])]
            if len(there) > 1 and any(inputs[each].requires_grad for each in there):
                raise _Unwatchable("an input that is written into shares its memory with another one")
        self._written = [
            place
            for place in tensors
            if place not in self._unread
            and (place in written or not isinstance(inputs[place], nn.Parameter))
            and not _stands_for_more(inputs[place])
        ]
        self._all_generators = generators_of(inputs[place].device for place in tensors)
        self._generators = self._all_generators
        return [place for place in tensors if not inputs[place].is_inference()]

    def _learn(self, call: Past, node: Any, outputs: Sequence[Any]) -> bool:
        """Learn what the region writes into and draws from; return False if its node is of an unknown kind."""
        metadata = node._forward_cls.metadata
        assert self._places is not None
        if any(info.mutates_metadata for info in metadata.input_info):
            return False
        written = set(self._unread)
        if len(metadata.input_info) == len(call.inputs):  # else some were merged: versions and copies show the writes
            written |= {place for place, info in enumerate(metadata.input_info) if info.mutates_data}
        written |= set(call.changed())
        written |= {place for place, copy in call.copies.items() if not _same(copy, call.inputs[place])}
        self._written = sorted(written - self._unread)
        if any(place not in call.copies for place in self._written):
            self._node_class = None  # the region writes into a parameter, which is copied from the next call on
            return True
        self._places = [place for place in self._places if place not in written]
        call.versions = {place: call.versions[place] for place in self._places}
        call.copies = {place: call.copies[place] for place in self._written}
        call.random = [(each, state) for each, state in call.random if not torch.equal(each.get_state(), state)]
        self._generators = [generator for generator, _ in call.random]
        self._learn_outputs(node, outputs)
        self._learn_layouts(call, node)
        if self._parts is not None and self.differentiable is not None:
            self._learn_behind(call, node, self._parts)
        return True

    def _learn_outputs(self, node: Any, outputs: Sequence[Any]) -> None:
        """Learn to which outputs of the region each gradient that the node is given belongs.

        Dynamo, which traced the region once more, may return an output of the graph twice, and a number not at all.
        """
        compiled = node._forward_cls
        metadata = compiled.metadata
        self.saves = bool(node._raw_saved_tensors)
        self.behind = self.differentiable = None
        written = metadata.mutated_inp_runtime_indices
        of = [{~place} for place in written] + [set() for _ in node._input_metadata[len(written) :]]
        for number, output in enumerate(outputs):
            place = _gradient_of(output, node)
            if place is not None:
                of[place].add(number)
        self.stands_for = [frozenset(each) for each in of]
        if getattr(compiled, "maybe_subclass_metadata", None) is not None:
            return
        inputs = [metadata.input_info[place] for place in written]
        self.differentiable = [bool(info.requires_grad and info.mutates_data) for info in inputs]
        self.differentiable += [bool(each) for each in of[len(written) :]]

    def _learn_layouts(self, call: Past, node: Any) -> None:
        known = {edge_of(each) for each in call.inputs if has_ordered_gradient(each)} - {None}
        edges = iter(edges_of(node, known)) if known else iter(())
        self.in_order = [next(edges, None) in known if needs else False for needs in node.needs_input_grad]

    def _learn_behind(self, call: Past, node: Any, parts: Parts) -> None:
        metadata = node._forward_cls.metadata
        if metadata.mutated_inp_runtime_indices and len(metadata.input_info) != len(call.inputs):
            return  # some inputs were merged
        behind: dict[Any, frozenset[int]] = {}
        for place, (given, part) in enumerate(zip(call.inputs, parts.gradients, strict=True)):
            if isinstance(given, torch.Tensor):
                copy = call.copies.get(place)
                edge = edge_of(given) if copy is None else edge_behind(copy)
                if edge is not None:
                    behind[edge] = behind.get(edge, frozenset()) | part
        edges = iter(edges_of(node, behind))
        self.behind = [behind.get(next(edges, None)) if needs else None for needs in node.needs_input_grad]

    def _known_node(self, outputs: Sequence[Any]) -> Any:
        if self._node_class is None:
            return None
        number, steps = self._route
        node = outputs[number].grad_fn
        for _ in range(steps):
            node = node.next_functions[0][0] if node is not None else None
        return node if type(node) is self._node_class and _BACKWARD[0] not in vars(node) else None

    def _find_node(self, call: Past, outputs: Sequence[Any]) -> Any:
        for number, output in enumerate(outputs):
            for steps, node in enumerate(_nodes_behind(output)):
                if _is_of_call(node, call):
                    self._node_class, self._route = type(node), (number, steps)
                    return node
        return None

    # ------------------------------------------------------------------ a backward that asks for more

    def run_again(self, call: Past, edges: Collection[Any], numbers: Collection[int]) -> Rerun | None:
        """Run the forward of a call in eager; return None if one of its inputs is gone.

        edges: the edges that gradients are wanted for. numbers: of the gradients that came.
        """
        needed, outputs = None, self.outputs(numbers)
        if self._parts is not None:
            needed = {place for place, part in enumerate(self._parts.values) if part & outputs}
        return run_again(call, edges, unread=self._unread, needed=needed, generators=self._all_generators)

    def outputs(self, numbers: Iterable[int]) -> frozenset[int]:
        """Return the outputs, as in `parts`, to which these gradients of the node belong."""
        return frozenset[int]().union(*map(self.stands_for.__getitem__, numbers))

    def left_by(self, passages: Sequence[Passage]) -> frozenset[int]:
        """Return the numbers of the outputs through which, as in eager, a backward may still come after `passages`.

        These are the outputs that had no gradient; all of them if some edges wanted none, or if nothing is saved.
        """
        if self.differentiable is None:
            return frozenset()
        all_outputs = left = frozenset(itertools.compress(itertools.count(), self.differentiable))
        if not self.saves:
            return all_outputs
        for each in passages:
            if each.edges is not None:
                return all_outputs
            left -= each.outputs
        return left

    def why_eager_may(self, error: Exception, call: Past | None) -> str | None:
        """Return the reason for a failed backward that eager's need not share; None if eager may not be tried.

        No gradient of the failed backward was handed out yet.
        """
        if call is None:
            return None
        if call.copies and "modified by an inplace operation" in str(error):
            return "buffers that a later call wrote into"
        if self._parts is None:  # other ranks may wait in it for this one
            return None
        return f"an error in compiled code ({type(error).__name__}: {str(error)[:200]})"

    def is_out_of_reach(self, call: Past, left: Collection[int]) -> bool:
        """Return whether none of the outputs `left` can be computed any more: an input of each was changed since."""
        changed = call.changed()
        if not changed or self._parts is None:
            return bool(changed)
        affected = frozenset[int]().union(*(self._parts.values[place] for place in changed))
        return all(self.stands_for[number] & affected for number in left)


def _stands_for_more(tensor: torch.Tensor) -> bool:
    """Return whether entries of a tensor share memory (`expand`): torch writes into no such tensor."""
    return tensor.layout is torch.strided and any(
        stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


class _Replacement:
    """The backward that a node runs in place of its own.

    Only the inputs of a call are kept, and the ways that backwards went through it. When its forward is run again, the
    parts that those backwards freed are freed again: autograd itself then says, as in eager, what may still be done.
    """

    __slots__ = ("__weakref__", "_again", "_call", "_left", "_node", "_passages", "_second")

    def __init__(self, second: SecondBackward, call: Past, node: weakref.ref[Any]) -> None:
        self._second, self._node = second, node  # weakly: the node holds this
        self._call: Past | None = call
        self._again: Rerun | None = None
        self._passages: list[Passage] = []  # those that freed what they met
        self._left: frozenset[int] = frozenset()

    def apply(self, *gradients: Any) -> Any:
        """Return gradients of the inputs, from those of the outputs."""
        return self._run("apply", gradients, gradients)

    def apply_boxed(self, gradients: list[Any]) -> Any:
        """Return gradients of the inputs, from a list of those of the outputs, which is emptied."""
        return self._run("apply_boxed", (gradients,), gradients)

    def let_go_if_changed(self) -> None:
        """Drop the call if no backward can come through any output that is left."""
        if self._call is None or self._second.is_out_of_reach(self._call, self._left):
            self._call = None

    @disable_dynamo  # a forward that is being traced may run backwards
    def _run(self, name: str, arguments: Sequence[Any], gradients: Sequence[Any]) -> Any:
        node: Any = self._node()
        second, gradients = self._second, list(gradients)
        came = frozenset([number for number, each in enumerate(gradients) if each is not None])
        if second.behind is not None and not came:
            return (None,) * len(second.behind)  # autograd calls the node without any gradient
        if second.differentiable is not None:
            filled = _with_zeros(node, gradients, second.differentiable)
            arguments = filled if name == _BACKWARD[0] else (filled,)
        stock = partial(self._stock, getattr(type(node), name), came, node, *arguments)
        call, again, passages = self._call, self._again, self._passages
        if call is None and again is None:
            return stock()
        keeps, creates = keeps_graph_of_this_backward(), torch.is_grad_enabled()
        asked = self._asked(node, keeps=keeps, creates=creates)
        if not keeps:
            self._free(node, came)
        in_eager = partial(self._in_eager, node, call, again, passages, gradients, came, keeps=keeps, creates=creates)
        if asked is not None:
            found = in_eager(asked)
            return stock() if found is None else found
        try:
            return stock()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            asked = second.why_eager_may(error, call)
            found = None if asked is None else in_eager(asked)
            if found is None:
                raise
            return found

    def _asked(self, node: Any, *, keeps: bool, creates: bool) -> str | None:
        """Return the request of a backward that compiled code cannot meet; None if there is none."""
        if creates:
            return "create_graph=True"
        if self._passages:
            return "another one before it through the same call"
        return "retain_graph=True" if keeps and _donates(node) else None

    def _free(self, node: Any, came: frozenset[int]) -> None:
        """Note a backward that frees what it meets, and drop the call if no other one may come.

        came: the numbers of the gradients that came.
        """
        edges = None
        if not _wants_all(node):
            edges = frozenset(wanted_edges(node, self._edges(node, self._call, self._again)))
        first = not self._passages
        self._passages = [*self._passages, Passage(came, edges)]
        self._left = self._second.left_by(self._passages)
        self._again = None
        if first and not self._left:
            self._call = None
        else:
            self._second.waiting.add(self)  # until the tensors that its outputs depend on are changed

    def _in_eager(
        self,
        node: Any,
        call: Past | None,
        again: Rerun | None,
        passages: Sequence[Passage],
        gradients: Sequence[Any],
        came: frozenset[int],
        asked: str,
        *,
        keeps: bool,
        creates: bool,
    ) -> Any:
        """Return the gradients that the node hands to its edges; None if they cannot be found.

        passages: the ways of earlier backwards. came: the numbers of the gradients that came.
        """
        edges = self._edges(node, call, again)
        if again is None or not (creates or keeps or passages) or (creates and passages):
            # A kept rerun that the graph of a backward leads into is not used: a way through that graph would free it.
            again = None if call is None else self._second.run_again(call, edges, came)
            if again is None:
                return None
            for each in passages:
                go_through(node, again, each, len(gradients))
        found = differentiate(node, again, edges, gradients, creates=creates, keeps=keeps or creates)
        if found is None:
            return None
        self._second.asked(asked)
        if self._call is not None and not (creates and self._passages):
            self._again = again
        return found

    def _edges(self, node: Any, call: Past | None, again: Rerun | None) -> list[Any]:
        known = again.sources if again is not None else edges_before(call) if call is not None else ()
        return edges_of(node, known)

    def _stock(self, backward: Any, came: frozenset[int], node: Any, *arguments: Any) -> Any:
        """Run the node's own backward, with None in place of zeros for weights of outputs that nobody used.

        came: the numbers of the gradients that came. Gradients have the layout of eager, see `layouts`.
        """
        found, in_order = self._without_zeros(backward, came, node, *arguments), self._second.in_order
        if not any(in_order) or len(found) != len(in_order):
            return found
        return tuple(
            ordered(each) if is_so and isinstance(each, torch.Tensor) else each
            for each, is_so in zip(found, in_order, strict=True)
        )

    def _without_zeros(self, backward: Any, came: frozenset[int], node: Any, *arguments: Any) -> Any:
        behind, has = self._second.behind, self._second.differentiable
        if behind is None or has is None or len(came) == sum(has):
            return backward(node, *arguments)
        used = self._second.outputs(came)
        unused = [part is not None and not part & used for part in behind]
        if True not in unused:
            return backward(node, *arguments)
        edges = iter([edge[0] for edge in node.next_functions if edge[0] is not None])
        weights = [getattr(next(edges, None), "variable", None) if needs else None for needs in node.needs_input_grad]
        with without_gradients([each for each, zeros in zip(weights, unused, strict=True) if zeros]):
            found = backward(node, *arguments)
        if len(found) != len(behind):
            return found
        return tuple(None if zeros else each for each, zeros in zip(found, unused, strict=True))


def _with_zeros(node: Any, gradients: Sequence[Any], differentiable: Sequence[bool]) -> list[Any]:
    """Return gradients as AOTAutograd expects them: zeros for an output that could have one and has none."""
    filled = []
    for each, meta, has in zip(gradients, node._input_metadata, differentiable, strict=True):
        is_missing = each is None and has
        filled.append(torch.zeros(meta.shape, dtype=meta.dtype, device=meta.device) if is_missing else each)
    return filled


def _wants_all(node: Any) -> bool:
    """Return whether the running backward goes on to all edges of a node."""
    try:
        for each, _ in node.next_functions:
            if each is not None and not will_engine_execute_node(each):
                return False
    except RuntimeError:  # the engine does not tell of a leaf if only some gradients are asked for
        return False
    return True


def _nodes_behind(output: Any) -> Iterator[Any]:
    """Yield the node of an output, and the nodes that it is a view of."""
    node = output.grad_fn if isinstance(output, torch.Tensor) else None
    for _ in range(_VIEWS):
        if node is None:
            return
        yield node
        node = node.next_functions[0][0] if node.next_functions else None


def _gradient_of(output: Any, node: Any) -> int | None:
    """Return the number of the gradient given to `node` that contains this output's; None if the output is not its."""
    if not isinstance(output, torch.Tensor) or output.grad_fn is None:
        return None
    found: Any = output.grad_fn
    place = output.output_nr
    for _ in range(_VIEWS):
        if found is node:
            return place
        if not found.next_functions or found.next_functions[0][0] is None:
            return None
        found, place = found.next_functions[0]
    return None


def _is_compiled(node: Any) -> bool:
    """Return whether a node is of a graph that AOTAutograd compiled, and still has its own backward."""
    metadata = getattr(getattr(node, "_forward_cls", None), "metadata", None)
    return hasattr(metadata, "output_info") and _BACKWARD[0] not in vars(node)


def _is_of_call(node: Any, call: Past) -> bool:
    """Return whether a node is of a compiled graph, called with the inputs of `call`."""
    if not _is_compiled(node):
        return False
    known = edges_before(call)
    return all(edge in known for edge in edges_of(node, known))


def _donates(node: Any) -> bool:
    """Return whether the compiled backward overwrites tensors that the forward saved, so that it cannot run twice.

    A backward that is compiled at its first call, which is this one, is told then whether it may overwrite them.
    """
    compiled = node._forward_cls
    return bool(
        functorch_config.donated_buffer and compiled.compiled_bw is not None and compiled.metadata.bw_donated_idxs != []
    )


class _Unwatchable(Exception):
    """An error for inputs that AOTAutograd replaces by others, of which nothing is known here."""


def _share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    with torch.no_grad():
        return bool(((one == other) | ((one != one) & (other != other))).all())


def _saves_elsewhere() -> bool:
    """Return whether tensors that are saved for a backward go through hooks: a checkpoint's, for example."""
    return top_saved_tensors_default_hooks(False) is not None
