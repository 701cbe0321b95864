"""The lowering of a graph to a callable: Inductor with our passes in its slots, under cache keys of their own.

[Note: caches]
Inductor keeps compiled graphs on disk, keyed by the graph and its own configuration. A pass that rewrites a graph after
the key is made has to be part of the key, or a warm cache hands out code that was rewritten otherwise, or not at all.
So there is always a pass of ours in a slot, and its `uuid()` covers our version, each pass's source and fields, and the
plan.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, is_dataclass
from types import FunctionType
from typing import Any, cast

from torch import fx

from deepytorch.compiler.code import inductor_faults, recompute
from deepytorch.compiler.config import CompilerConfig
from deepytorch.compiler.dynamo.graph_forms import eager_graph
from deepytorch.compiler.plan import Plan
from deepytorch.passes.ops.inline_pack import inline_pack
from deepytorch.torch_internals import CustomGraphPass, custom_graph_pass
from deepytorch.version import __version__

GraphPass = Callable[[fx.Graph], object]  # a frozen dataclass that can be called, or a plain function

_ALWAYS = (inline_pack, recompute.hold_reads_before_writes)  # passes that run over each graph

# The class of passes that are told whether a graph is for inference; some versions of torch do not have it.
_InferenceAware: Any = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", None)


@dataclass(frozen=True)
class GraphPasses:
    """The passes over graphs of AOTAutograd, by the place where Inductor calls them.

    The joint passes see forward and backward in one graph (or the forward alone, without gradients); the post-grad
    passes see each compiled graph, functional and decomposed.
    """

    joint_pre: tuple[GraphPass, ...] = ()
    joint_post: tuple[GraphPass, ...] = ()
    post_grad_pre: tuple[GraphPass, ...] = ()
    post_grad_post: tuple[GraphPass, ...] = ()

    def uuid(self, plan_digest: str = "") -> str | None:
        """Return the passes' key in the compile caches; None if a pass cannot be told from another one."""
        slots = [self.joint_pre, self.joint_post, self.post_grad_pre, self.post_grad_post]
        prints = [[fingerprint(each) for each in slot] for slot in slots]
        if any(each is None for slot in prints for each in slot):
            return None
        inputs = ["deepytorch", __version__, inductor_faults.digest(), *map(fingerprint, _ALWAYS), prints, plan_digest]
        return hashlib.sha256(json.dumps(inputs).encode()).hexdigest()


def lower(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    config: CompilerConfig,
    plan: Plan | None = None,
    passes: GraphPasses | None = None,
) -> Callable[..., Any]:
    """Compile a graph, as a backend of `torch.compile` does; return a callable for inputs like `example_inputs`.

    `module` may be changed and must not be used afterwards. The passes may depend on `plan`, which is part of the cache
    keys. With gradients, the backward may be compiled only when it is first run.
    """
    passes = passes or GraphPasses()
    if config.lowering == "eager":
        if passes != GraphPasses():
            raise ValueError("passes run on the graphs of AOTAutograd, which the lowering 'eager' has none of")
        return eager_graph(module).forward
    if config.lowering == "aot_eager":
        return _lower_aot_eager(module, example_inputs, passes, config.activation_memory)
    from deepytorch.torch_internals import compile_fx, inductor_config

    inductor_faults.mend()
    options = config.inductor_options()
    patches = {**options, **_slots(passes, options, plan)}
    theirs = options.get("custom_partitioner_fn") or inductor_config.custom_partitioner_fn
    if recompute.is_used(config.activation_memory) and theirs is None:
        patches["custom_partitioner_fn"] = recompute.HeldShare(
            config.activation_memory, fingerprint(recompute.partition)
        )
    return cast("Callable[..., Any]", compile_fx(module, list(example_inputs), config_patches=patches))


def fingerprint(graph_pass: Callable[..., object]) -> str | None:
    """Return a hash of a pass's source and of its fields, equal in any process.

    The source is the whole module of the pass's class, since the functions that it calls are part of its behaviour.
    None, "do not cache", for passes that have no source or may hold anything: lambdas typed at a prompt, closures,
    objects that are no dataclasses.
    """
    if isinstance(graph_pass, FunctionType):
        if graph_pass.__closure__:
            return None
        kind, fields = graph_pass, ""
    elif is_dataclass(graph_pass) and not isinstance(graph_pass, type):
        kind, fields = type(graph_pass), repr(graph_pass)
    else:
        return None
    try:
        source = _module_source(kind)
    except (OSError, TypeError):
        return None
    return hashlib.sha256(json.dumps([kind.__qualname__, fields, source]).encode()).hexdigest()


def _module_source(kind: Any) -> str:
    """Return the source of the module of `kind`, and of the modules of the same package whose names it uses."""
    home = inspect.getmodule(kind)
    if home is None:
        raise OSError(f"{kind} belongs to no module")
    package = home.__name__.rpartition(".")[0]
    named = {getattr(value, "__module__", None) for value in vars(home).values()}
    beside = sorted(name for name in named if isinstance(name, str) and name != home.__name__)
    used = [sys.modules[name] for name in beside if package and name.startswith(f"{package}.") and name in sys.modules]
    return "".join(inspect.getsource(module) for module in [home, *used])


def _slots(passes: GraphPasses, options: dict[str, Any], plan: Plan | None) -> dict[str, CustomGraphPass]:
    """Return Inductor's slots to patch: in each our passes, chained behind the user's."""
    from deepytorch.torch_internals import inductor_config

    ours = {
        "joint_custom_pre_pass": passes.joint_pre,
        "joint_custom_post_pass": (*passes.joint_post, recompute.hold_reads_before_writes),
        "post_grad_custom_pre_pass": (*passes.post_grad_pre, inline_pack),  # never empty: see [Note: caches]
        "post_grad_custom_post_pass": passes.post_grad_post,
    }
    uuid = passes.uuid(plan.digest() if plan else "")
    slots = {}
    for slot, graph_passes in ours.items():
        theirs = options[slot] if slot in options else getattr(inductor_config, slot)
        if graph_passes:
            slots[slot] = _chain(graph_passes, theirs, uuid)
    return slots


def _chain(ours: tuple[GraphPass, ...], theirs: Any, uuid: str | None) -> CustomGraphPass:
    if theirs is None:
        theirs = ()
    elif not isinstance(theirs, (list, tuple)):  # newer versions take several
        theirs = (theirs,)
    kind = _InferenceAwareChain if any(_is_inference_aware(each) for each in theirs) else _Chain
    return kind(ours, tuple(theirs), uuid)


def _is_inference_aware(graph_pass: GraphPass) -> bool:
    return _InferenceAware is not None and isinstance(graph_pass, _InferenceAware)


class _Chain(CustomGraphPass):
    """One pass made of several, since torch 2.11 takes one a slot.

    The user's passes come first, and see the graphs that they would see without us.
    """

    def __init__(self, ours: tuple[GraphPass, ...], theirs: tuple[GraphPass, ...], uuid: str | None) -> None:
        self._ours = ours
        self._theirs = theirs
        self._uuid = uuid

    def __call__(self, graph: fx.Graph, **told: Any) -> None:
        for each in self._theirs:
            each(graph, **(told if _is_inference_aware(each) else {}))
        for each in self._ours:
            each(graph)

    def uuid(self) -> str | None:
        """Return the chain's key in the caches; None, "do not cache", unless each pass has a key."""
        if self._uuid is None:
            return None
        names = [self._uuid]
        for each in self._theirs:
            name = each.uuid() if isinstance(each, CustomGraphPass) else None
            if not name:
                return None
            names.append(repr(name))
        return hashlib.sha256(json.dumps(names).encode()).hexdigest()


# A chain that is told whether a graph is for inference, and passes this on.
_InferenceAwareChain: Any = (
    _Chain if _InferenceAware is None else type("_InferenceAwareChain", (_Chain, _InferenceAware), {})
)


def _lower_aot_eager(
    module: fx.GraphModule, example_inputs: Sequence[Any], passes: GraphPasses, held_share: float
) -> Callable[..., Any]:
    from deepytorch.torch_internals import aot_autograd

    # This partitioner honours the tags of activation checkpointing, which the default one does not.
    compiler = functools.partial(_run_as_is, passes)
    return aot_autograd(
        fw_compiler=compiler,
        bw_compiler=compiler,
        partition_fn=functools.partial(_partition, passes, held_share),
        keep_inference_input_mutations=True,
    )(module, list(example_inputs))


def _partition(
    passes: GraphPasses, held_share: float, joint: fx.GraphModule, joint_inputs: Sequence[Any], **settings: Any
) -> recompute.Parts:
    _rewrite(joint, (*passes.joint_pre, *passes.joint_post, recompute.hold_reads_before_writes))
    return recompute.partition(joint, joint_inputs, share=held_share, **settings)


def _run_as_is(passes: GraphPasses, module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    from deepytorch.torch_internals import make_boxed_func

    _rewrite(module, (*passes.post_grad_pre, *passes.post_grad_post))
    return make_boxed_func(module.forward)


def _rewrite(module: fx.GraphModule, graph_passes: tuple[GraphPass, ...]) -> None:
    for each in graph_passes:
        each(module.graph)
    if graph_passes:
        module.graph.lint()
        module.recompile()
