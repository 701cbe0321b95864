"""The capture of Dynamo's graph: traced once more into the one vocabulary that every pass reads, pre-dispatch ATen.

The result (about 25 distinct overloads for a language model) keeps `linear`, `layer_norm`,
`scaled_dot_product_attention`, `embedding`, `cross_entropy_loss` and `dropout` whole. Four things are normalised on
top. Sizes are read from tensors, and not from the integers that Dynamo lifted. Empty key-value caches that are about to
be concatenated vanish. In-place arithmetic on a fresh value becomes out-of-place. Casts that change nothing vanish.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy

from deepytorch.compiler.dynamo.custom_functions import Derived, find_derivatives
from deepytorch.compiler.dynamo.vmapped import without_vmaps
from deepytorch.passes.base import GraphInput, Role
from deepytorch.passes.slicing import returns_alias, writes_in_place
from deepytorch.torch_internals import (
    FakeTensor,
    FakeTensorMode,
    HigherOrderOperator,
    enter_autocast,
    exit_autocast,
    set_grad_enabled_in_graphs,
)

aten = torch.ops.aten

# In-place operators with the out-of-place ones that compute the same if nothing else reads the changed value.
_OUT_OF_PLACE = {
    aten.add_.Tensor: aten.add.Tensor,
    aten.add_.Scalar: aten.add.Scalar,
    aten.sub_.Tensor: aten.sub.Tensor,
    aten.mul_.Tensor: aten.mul.Tensor,
    aten.mul_.Scalar: aten.mul.Scalar,
    aten.div_.Tensor: aten.div.Tensor,
    aten.masked_fill_.Scalar: aten.masked_fill.Scalar,
    aten.masked_fill_.Tensor: aten.masked_fill.Tensor,
    aten.relu_.default: aten.relu.default,
    aten.silu_.default: aten.silu.default,
    aten.clamp_.default: aten.clamp.default,
    aten.dropout_.default: aten.dropout.default,
}


@dataclass(frozen=True)
class Captured:
    """A region in normal form. `module` takes the inputs of Dynamo's graph, in their order."""

    module: fx.GraphModule
    inputs: tuple[GraphInput, ...]
    fake_mode: FakeTensorMode | None

    @property
    def shape_env(self) -> Any:
        """Return the symbols' environment, or None if every size is a number."""
        return self.fake_mode.shape_env if self.fake_mode is not None else None


def capture(module: fx.GraphModule, example_inputs: Sequence[Any]) -> Captured:
    """Trace `module` (a Dynamo graph) under Dynamo's own fake inputs and normalise the result."""
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    inputs = tuple(_graph_input(node, value) for node, value in zip(placeholders, example_inputs, strict=True))
    fakes = [node.meta.get("example_value", value) for node, value in zip(placeholders, example_inputs, strict=True)]
    fake_mode = next((f.fake_mode for f in fakes if hasattr(f, "fake_mode")), None)
    if fake_mode is None:
        raise RuntimeError("the graph has no fake tensor among its inputs: nothing to trace under")
    module = without_vmaps(module, fake_mode)
    derivatives = find_derivatives(module)
    allowed = fake_mode.allow_non_fake_inputs
    fake_mode.allow_non_fake_inputs = True
    try:
        # Annotations such as activation checkpointing's recompute tags travel in node.meta.
        with fake_mode, torch.fx.traceback.preserve_node_meta(), contextlib.ExitStack() as casts:
            interpreter = _Inlining(module, casts, derivatives)
            traced = make_fx(lambda *args: interpreter.run(*args), pre_dispatch=True, tracing_mode="real")(*fakes)
    finally:
        fake_mode.allow_non_fake_inputs = allowed
    _refuse_baked_values(traced)
    # make_fx's own kind of module generates its code lazily, which Dynamo cannot enter.
    traced = fx.GraphModule(traced, traced.graph)
    for node, graph_input in zip(_placeholders(traced), inputs, strict=True):
        node.meta["input"] = graph_input
    sizes_from_tensors(traced)
    sizes_for_shapes(traced.graph)
    drop_empty_caches(traced.graph)
    out_of_place(traced.graph)
    drop_casts_to_self(traced.graph)
    traced.graph.eliminate_dead_code()
    traced.graph.lint()
    traced.recompile()
    return Captured(traced, inputs, fake_mode)


def _refuse_baked_values(traced: fx.GraphModule) -> None:
    """Raise `Untraceable` if a value of this batch is a constant in the trace, by `x.data` or `vmap` for example.

    The constant would stand for the value of every batch.
    """
    for node in traced.graph.nodes:
        if node.op == "get_attr" and isinstance(getattr(traced, str(node.target), None), FakeTensor):
            raise Untraceable(f"{node.name} is a value of the batch that tracing took for a constant")


class Untraceable(Exception):
    """An error for a graph with effects that a trace of its forward would lose; the region is left to stock."""


# Calls in Dynamo's graphs that act on gradients, or on the calls after them: a trace of the forward loses them.
_LOST_MODULES = ("torch.autograd.", "torch._functorch.", "torch._C._functorch.", "torch.func.", "torch._dynamo.")
_LOST_METHODS = frozenset({
    "register_hook", "register_post_accumulate_grad_hook", "retain_grad", "requires_grad_", "backward",
})  # fmt: skip


class _Inlining(fx.Interpreter):
    """The interpreter of a Dynamo graph that inlines checkpointed parts, with tags for recomputation in the backward.

    Tracing records the model's own autocast and does not enter it. Here it is entered, and left with `casts` at the
    latest: dtypes are then those of the run, and a `.float()` inside is not dropped as a cast that changes nothing.
    Raises `Untraceable` for a custom autograd function (but for those in `derivatives`, whose forward alone stands for
    them), a hook on a gradient, `torch.func`, control flow, and for selective checkpointing, whose policy only
    AOTAutograd knows how to ask.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        casts: contextlib.ExitStack,
        derivatives: Mapping[fx.GraphModule, Derived],
    ) -> None:
        super().__init__(module)
        self._casts, self._derivatives = casts, derivatives
        self._entered: list[contextlib.ExitStack] = []

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one call; of a checkpointed part, run the graph inside."""
        if target is enter_autocast:
            device, dtype, enabled, _ = args
            self._entered.append(self._casts.enter_context(contextlib.ExitStack()))
            self._entered[-1].enter_context(autocast_unrecorded(device, dtype, enabled))
        elif target is exit_autocast:
            self._entered.pop().close()
        if target is torch.ops.higher_order.autograd_function_apply and args[0] in self._derivatives:
            derived = self._derivatives[args[0]]
            return (_Inlining(derived.forward, self._casts, {}).run(args[2 + derived.place]),)
        if target is not torch.ops.higher_order.tag_activation_checkpoint:
            module = f"{getattr(target, '__module__', None)}."
            if isinstance(target, HigherOrderOperator) or module.startswith(_LOST_MODULES):
                raise Untraceable(f"{getattr(target, '__name__', target)} is left to stock")
            return super().call_function(target, args, kwargs)
        part = args[0]
        if "_checkpoint_context_fn" in part.meta:
            raise Untraceable("selective activation checkpointing (context_fn) is left to stock")
        number = next(_CHECKPOINTS)
        for node in part.graph.nodes:
            node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
            node.meta["ac_graph_id"] = number
        return _Inlining(part, self._casts, self._derivatives).run(*args[1:])

    def call_method(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a tensor's method."""
        if target in _LOST_METHODS:
            raise Untraceable(f"Tensor.{target} is left to stock")
        return super().call_method(target, args, kwargs)


@contextlib.contextmanager
def autocast_unrecorded(device: str, dtype: torch.dtype | None, enabled: bool) -> Iterator[None]:
    """Enter autocast without a record in the trace, which `torch.autocast` itself would leave."""
    before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device), torch.is_autocast_cache_enabled()
    torch.set_autocast_enabled(device, enabled)
    torch.set_autocast_dtype(device, dtype or before[1])
    torch.set_autocast_cache_enabled(False)  # the cache would keep fake weights
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, before[0])
        torch.set_autocast_dtype(device, before[1])
        torch.set_autocast_cache_enabled(before[2])


_CHECKPOINTS = itertools.count(1_000_000)  # apart from the numbers that torch gives


def _placeholders(module: fx.GraphModule) -> list[fx.Node]:
    return [node for node in module.graph.nodes if node.op == "placeholder"]


def _graph_input(node: fx.Node, value: Any) -> GraphInput:
    if not isinstance(value, torch.Tensor):
        return GraphInput(node.name, Role.SIZE)
    if isinstance(value, torch.nn.Parameter):
        return GraphInput(node.name, Role.PARAMETER)
    return (
        GraphInput(node.name, Role.BATCH) if is_batch_input(node, value) else GraphInput(node.name, Role.BUFFER, value)
    )


def is_batch_input(node: fx.Node, value: Any) -> bool:
    """Return whether an input of a Dynamo graph comes with the call, and is no state of a module."""
    if not isinstance(value, torch.Tensor) or isinstance(value, torch.nn.Parameter):
        return False
    source = getattr(node.meta.get("grapharg"), "source", None)
    return source is None or not source.guard_source.is_unspecialized_nn_module()


def sizes_from_tensors(module: fx.GraphModule, values: str = "val") -> None:
    """Read every size from a tensor that has it, so that the graph needs no integer inputs.

    values: the key in a node's meta under which its value stands.
    """
    graph = module.graph
    placeholders = _placeholders(module)
    homes: dict[Any, tuple[fx.Node, int]] = {}
    for node in placeholders:
        value = node.meta.get(values)
        if isinstance(value, torch.Tensor):
            for dim, size in enumerate(value.shape):
                if isinstance(size, torch.SymInt):
                    homes.setdefault(size.node.expr, (node, dim))
    for node in placeholders:
        value = node.meta.get(values)
        if not isinstance(value, torch.SymInt) or not node.users or value.node.expr not in homes:
            continue
        tensor, dim = homes[value.node.expr]
        with graph.inserting_after(placeholders[-1]):
            size = graph.call_function(aten.sym_size.int, (tensor, dim))
        size.meta[values] = value
        node.replace_all_uses_with(size)


_AS_ANOTHER = {
    aten.expand_as.default: aten.expand.default,
    aten.view_as.default: aten.view.default,
    aten.reshape_as.default: aten.reshape.default,
}


def sizes_for_shapes(graph: fx.Graph) -> None:
    """Turn `mask.expand_as(scores)` into `mask.expand(sizes)`, which does not read the scores.

    A shape with a size that no input has stays as it is.
    """
    homes: dict[Any, tuple[fx.Node, int]] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder" and isinstance(value, torch.Tensor):
            for dim, size in enumerate(value.shape):
                if isinstance(size, torch.SymInt):
                    homes.setdefault(size.node.expr, (node, dim))
    for node in list(graph.nodes):
        target = _AS_ANOTHER.get(node.target)
        if target is None or not isinstance(node.args[1], fx.Node):
            continue
        shape = node.meta["val"].shape
        if any(isinstance(size, torch.SymInt) and size.node.expr not in homes for size in shape):
            continue
        sizes: list[Any] = []
        with graph.inserting_before(node):
            for size in shape:
                if isinstance(size, torch.SymInt):
                    read = graph.call_function(aten.sym_size.int, homes[size.node.expr])
                    read.meta["val"] = size
                    sizes.append(read)
                else:
                    sizes.append(size)
            made = graph.call_function(target, (node.args[0], sizes))
        made.meta = dict(node.meta)
        node.replace_all_uses_with(made)
        graph.erase_node(node)


def drop_empty_caches(graph: fx.Graph) -> None:
    """Replace `cat([empty, keys], dim)` by `keys`: the first update of a fresh key-value cache."""
    for node in list(graph.nodes):
        if node.target is not aten.cat.default:
            continue
        value = node.meta.get("val")
        parts = [part for part in node.args[0] if not _is_legacy_empty(part)]
        if len(parts) == 1 and len(parts) < len(node.args[0]):
            whole = parts[0]
            if whole.meta["val"].dtype != value.dtype:  # an empty cache promotes too, as under autocast
                with graph.inserting_before(node):
                    whole = graph.call_function(aten.to.dtype, (whole, value.dtype))
                whole.meta["val"] = value
            empties = [part for part in node.args[0] if part is not parts[0]]
            node.replace_all_uses_with(whole)
            graph.erase_node(node)
            for empty in empties:
                _erase_chain(graph, empty)


_CASTS = frozenset({aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten.to.other})


def drop_casts_to_self(graph: fx.Graph) -> None:
    """Replace `x.to(...)` by `x` if the cast would change nothing."""
    for node in list(graph.nodes):
        if node.target in _CASTS and isinstance(node.args[0], fx.Node):
            before, after = node.args[0].meta["val"], node.meta["val"]
            same = (before.dtype, before.device, before.layout) == (after.dtype, after.device, after.layout)
            asks_more = node.kwargs.get("copy") or node.kwargs.get("memory_format") or len(node.args) > 3
            if same and not asks_more:
                node.replace_all_uses_with(node.args[0])
                graph.erase_node(node)


def _erase_chain(graph: fx.Graph, node: fx.Node) -> None:
    """Erase a constant that nobody uses any more; `detach_` counts as a side effect, so no other clean-up would."""
    while not node.users and node.op in ("call_function", "get_attr"):
        sources = node.all_input_nodes
        graph.erase_node(node)
        if len(sources) != 1:
            return
        node = sources[0]


def _is_legacy_empty(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dim() == 1 and value.shape[0] == 0


def out_of_place(graph: fx.Graph) -> None:
    """Turn `x.add_(y)` into `x = x + y` if `x` is fresh: no input, no view, and without a view that is alive.

    A write under `no_grad` into a value that has a gradient stays: the value's gradient does not go through the write.
    """
    position = {node: index for index, node in enumerate(graph.nodes)}
    untracked = without_grad(graph)
    for node in list(graph.nodes):
        target = _OUT_OF_PLACE.get(node.target)
        if target is None or not isinstance(node.args[0], fx.Node) or not _is_fresh(node.args[0]):
            continue
        mutated: fx.Node = node.args[0]
        before, after = mutated.meta.get("val"), node.meta.get("val")
        operands = [arg.meta.get("val") for arg in node.args[1:] if isinstance(arg, fx.Node)]
        if not _keeps_shape_and_dtype(before, after, operands):
            continue
        if node in untracked and mutated not in untracked:
            continue
        with graph.inserting_before(node):
            fresh = graph.call_function(target, node.args, node.kwargs)
        fresh.meta = dict(node.meta)
        node.replace_all_uses_with(fresh)
        for user in list(mutated.users):
            if user is not fresh and position.get(user, -1) > position[node]:
                user.replace_input_with(mutated, fresh)
        graph.erase_node(node)


def without_grad(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes that run while the graph itself has switched gradients off."""
    found: set[fx.Node] = set()
    enabled = True
    for node in graph.nodes:
        if node.target is set_grad_enabled_in_graphs:
            enabled = bool(node.args[0])
        if not enabled:
            found.add(node)
    return found


def _keeps_shape_and_dtype(before: Any, after: Any, operands: list[Any]) -> bool:
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return False
    dtypes = [before.dtype, *(value.dtype for value in operands if isinstance(value, torch.Tensor) and value.dim() > 0)]
    promoted = dtypes[0]
    for dtype in dtypes[1:]:
        promoted = torch.promote_types(promoted, dtype) if dtype is not torch.bool else promoted
    return promoted == before.dtype == after.dtype


def _is_fresh(node: fx.Node) -> bool:
    """Return whether `node` owns its memory and nothing else shares it."""
    if node.op != "call_function" or returns_alias(node):
        return False
    return not any(returns_alias(user) and not writes_in_place(user) for user in node.users)


def saving_for_nobody() -> Any:
    """Hide tensors that a trace saves for a backward from counts of saved tensors, such as an outer checkpoint's."""
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
