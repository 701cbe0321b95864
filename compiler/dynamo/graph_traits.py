"""Traits of a graph, read off its nodes before anything is compiled: what it holds, what it draws, where it was cut."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx

from deepytorch.passes.fuse_linear_loss import FuseLinearLoss
from deepytorch.passes.ops.attention_tile import Call, Rule
from deepytorch.passes.ops.varlen_attention_cuda import choose_form
from deepytorch.torch_internals import FakeTensorMode

# ------------------------------------------------------------------ attention and loss: quick looks


def may_have_attention(module: fx.GraphModule) -> bool:
    """Return whether a Dynamo graph may have attention: a cheap look, before sizes are made symbolic for its sake."""
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            for node in part.graph.nodes:
                name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
                if node.op in ("call_function", "call_method", "call_module") and (
                    "attention" in name or "softmax" in name
                ):
                    return True
    return False


def may_have_large_loss(module: fx.GraphModule) -> bool:
    """Return whether a Dynamo graph may have a cross-entropy of large logits: a cheap look."""
    for node in module.graph.nodes:
        if node.op == "call_function" and getattr(node.target, "__name__", "").startswith("cross_entropy"):
            given = node.args[0] if node.args else node.kwargs.get("input")
            logits = given.meta.get("example_value") if isinstance(given, fx.Node) else None
            if isinstance(logits, torch.Tensor) and logits.dim() == 2 and FuseLinearLoss().is_large(logits):
                return True
    return False


def attention_forms(graph: fx.Graph) -> dict[str, int]:
    """Return the number of attentions that each form computes, by the form's name and the reasons against the others.

    A key is, for example, "triton (flash: dtype torch.float32; efficient: slower where it was measured)". graph: every
    node has its value. The form is chosen by the traced shapes; each call chooses again, by its own arguments.
    """
    found: Counter[str] = Counter()
    for node in graph.find_nodes(op="call_function", target=torch.ops.deepytorch.varlen_attention.default):
        with FakeTensorMode():  # nothing is computed, and no size is guarded on
            found[_form(node)] += 1
    return dict(found)


def _form(node: fx.Node) -> str:
    query, key, value, cu_q, cu_k, _, _, bias = cast(Any, node.args[:8])
    query, key, value = _of_that_shape(query), _of_that_shape(key), _of_that_shape(value)
    if query.device.type != "cuda":
        return query.device.type
    rows_q = torch.empty(1)
    rows_k = rows_q if cu_k is cu_q else torch.empty(1)
    some_bias = None if bias is None else _of_that_shape(bias)
    # 1 and 1 stand for the longest rows: the choice only asks if there are tokens.
    call = Call(rows_q, rows_k, 1, 1, Rule(**node.kwargs), some_bias)  # type: ignore[arg-type]
    form, reasons = choose_form(query, key, value, call)
    return f"{form} ({'; '.join(reasons)})" if reasons else form


def _of_that_shape(node: Any) -> Tensor:
    """Return a tensor of the traced shape, with the values that its symbols had in the trace."""
    traced: Tensor = node.meta["val"]
    sizes, strides = (
        [(each.node.hint or 1) if isinstance(each, torch.SymInt) else each for each in given]
        for given in (traced.shape, traced.stride())
    )
    return torch.empty_strided(sizes, strides, dtype=traced.dtype, device=traced.device)


# ------------------------------------------------------------------ ranks


def communicates(module: fx.GraphModule) -> bool:
    """Return whether a Dynamo graph may wait for other ranks, as a norm over all ranks does.

    A function of the script's own may do so as well.
    """
    calls = [node for part in module.modules() if isinstance(part, fx.GraphModule) for node in part.graph.nodes]
    return any(
        "c10d" in str(node.target)
        or "torch.distributed" in getattr(node.target, "__module__", "")
        or (node.op == "call_function" and _name(node) == "autograd_function_apply")
        for node in calls
    )


# ------------------------------------------------------------------ random numbers

_NAMED = frozenset({
    "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "normal", "normal_", "bernoulli",
    "bernoulli_", "multinomial", "poisson", "uniform_", "random_", "exponential_", "geometric_", "cauchy_",
    "log_normal_", "rrelu", "rrelu_",
})  # fmt: skip


def draws_as_eager(module: fx.GraphModule) -> bool:
    """Return whether a graph draws numbers by name and has no dropout: its compiled code can draw what eager draws.

    With dropout this would cost what compiling gains, so that all its draws differ from eager's, as dropout's do.
    """
    calls = [node for part in module.modules() if isinstance(part, fx.GraphModule) for node in part.graph.nodes]
    return any(_name(node) in _NAMED for node in calls) and not any(_drops(node) for node in calls)


def _name(node: fx.Node) -> str:
    target: Any = node.target
    return str(target) if node.op == "call_method" else getattr(target, "__name__", "")


def _drops(node: fx.Node) -> bool:
    """Return whether a call is a dropout that is on."""
    if node.op != "call_function" or "dropout" not in _name(node):
        return False
    training = node.kwargs.get("training", node.args[2] if len(node.args) > 2 else True)
    return training is not False


def sets_generators(module: fx.GraphModule) -> bool:
    """Return whether Dynamo has cut a graph at a place where the model sets or makes a random generator."""
    return is_cut_at(module, "rng_state", "manual_seed", "fork_rng", "torch.Generator")


def is_cut_at(module: fx.GraphModule, *names: str) -> bool:
    """Return whether Dynamo has cut a graph for a reason whose text holds one of these names."""
    reason = getattr(module, "compile_subgraph_reason", None)
    said = str(getattr(reason, "reason", ""))
    return bool(getattr(reason, "graph_break", False)) and any(name in said for name in names)


def gives_no_gradients(module: fx.GraphModule, example_inputs: Sequence[Any]) -> bool:
    """Return whether a graph of Dynamo's holds a reentrant checkpoint whose inputs need no gradient.

    In eager its weights get no gradient, as its forward runs without and nothing asks for its backward: torch warns of
    it. A frozen embedding in front of the first block is enough. In a graph no checkpoint is reentrant, and the weights
    would get one. (A weight that is handed to the checkpoint as an input cannot be told from one that it holds.)
    """
    weights = {
        node
        for node, value in zip(_placeholders(module.graph), example_inputs, strict=True)
        if isinstance(value, torch.nn.Parameter)
    }
    for node in module.graph.nodes:
        if node.target is torch.ops.higher_order.tag_activation_checkpoint and node.kwargs.get("use_reentrant"):
            inputs = [each for each in node.args[1:] if isinstance(each, fx.Node) and each not in weights]
            if not any(getattr(each.meta.get("example_value"), "requires_grad", False) for each in inputs):
                return True
    return False


def writes_twice(module: fx.GraphModule) -> bool:
    """Return whether a checkpoint in a graph of Dynamo's writes into what it is given, such as a norm's statistics.

    In eager it does so once more in the backward, when its forward runs again; in compiled code it does not.
    """
    for node in module.graph.nodes:
        if node.target is torch.ops.higher_order.tag_activation_checkpoint:
            body = getattr(module, node.args[0].target)
            if any(_writes(user, each) for each in _placeholders(body.graph) for user in each.users):
                return True
    return False


def _writes(user: fx.Node, node: fx.Node) -> bool:
    is_in_place = user.op.startswith("call_") and _name(user).endswith("_") and not _name(user).endswith("__")
    return (is_in_place and user.args[:1] == (node,)) or _only_writes(user, node)


# ------------------------------------------------------------------ statistics that are written and not read


def unread_statistics(graph: fx.Graph) -> frozenset[int]:
    """Return places of inputs that a graph of Dynamo's writes into, and that none of its outputs depends on."""
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


_STATISTICS = {
    torch.nn.functional.batch_norm: ("training", 5),
    torch.nn.functional.instance_norm: ("use_input_stats", 5),
}


def num_convolutions(module: fx.GraphModule) -> int:
    """Return the number of convolutions over images, transposed ones among them, in Dynamo's graph."""
    names = ("conv2d", "conv_transpose2d")
    return sum(node.op == "call_function" and _name(node) in names for node in module.graph.nodes)
