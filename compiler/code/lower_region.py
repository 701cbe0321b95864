"""The lowering of one region's graphs, with gradients reduced in them if our reducer has these."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from deepytorch.compiler.code.data_parallel import (
    DdpGradients,
    Members,
    active,
    adopt,
    delays_some,
    gradients_of,
    meet,
)
from deepytorch.compiler.code.lower import GraphPasses, lower
from deepytorch.compiler.config import CompilerConfig
from deepytorch.compiler.plan import Plan
from deepytorch.ddp_modules import copies_outputs
from deepytorch.passes.graphs import copied
from deepytorch.passes.reduce_gradients import ReduceGradients
from deepytorch.torch_internals import inductor_config

# Options of Inductor that reorder a graph; off if gradients are reduced in it. The first moves reductions to the end,
# for the memory that they take, so that gradients are sent late. The second (torch 2.14) moves torch's collectives past
# ours, and ranks that send in different orders wait for each other forever.
_MOVERS = ("reorder_for_peak_memory", "aten_distributed_optimizations.enable_simple_overlap")
# Options of Inductor with which it rounds as eager does: half precision between operators that it fuses, and quotients.
_STRICT = ("emulate_precision_casts", "eager_numerics.division_rounding")


@dataclass(frozen=True, eq=False)
class RegionLowering:
    """The lowering of one region's graphs.

    gradients: those of the data-parallel module around the region, if our reducer is to reduce them. declined: the
    reason against it, if there is such a module.
    """

    config: CompilerConfig
    plan: Plan
    gradients: Members | None = None
    declined: str | None = None

    @classmethod
    def here(cls, config: CompilerConfig, plan: Plan) -> RegionLowering:
        """Return the lowering for a region in the data-parallel module whose forward runs now, if one does."""
        ddp = active()
        if ddp is not None and delays_some(ddp):  # delayed gradients need the order of eager's backward
            return cls(replace(config, lowering="eager"), plan, declined="some are delayed, which takes eager's order")
        if not _may_reduce(config):
            ddp = None
        if ddp is None or (torch.distributed.get_world_size(ddp.process_group) == 1 and not copies_outputs(ddp)):
            return cls(config, plan)
        adopted = adopt(ddp) if config.waits else gradients_of(ddp)
        return cls(config, plan, declined=adopted) if isinstance(adopted, str) else cls(config, plan, adopted)

    def compile(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile one graph of the region, as a backend of `torch.compile` does; `module` may be changed."""
        if self.gradients is None:
            return self.lower(module, example_inputs)
        spare = copied(module)
        compiled = self.lower(module, example_inputs)
        return _GraphPerParameters(compiled, spare, example_inputs, self._compile_for_others)

    def lower(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile one graph for the parameters among `example_inputs` alone."""
        if self.gradients is None:
            return lower(module, example_inputs, config=self.config, plan=self.plan)
        reduce = ReduceGradients(self.gradients.name, self.gradients.members(example_inputs))
        known = inductor_config.get_config_copy()
        still = {name: False for name in _MOVERS if name in known}
        config = replace(self.config, inductor={**still, **self.config.inductor})
        passes = GraphPasses(post_grad_pre=(reduce,))
        return lower(module, example_inputs, config=config, plan=self.plan, passes=passes)

    def strict(self, module: fx.GraphModule) -> RegionLowering | None:
        """Return the lowering of a graph with strict numerics; None if they are those that it has anyway."""
        if not _has_strict_numerics(module):
            return None
        known = inductor_config.get_config_copy()
        strict = {name: True for name in _STRICT if name in known}
        if self.config.lowering != "inductor" or strict.keys() <= self.config.inductor.keys():
            return None
        return replace(self, config=replace(self.config, inductor={**strict, **self.config.inductor}))

    def may_begin(self) -> bool:
        """Return whether code that is compiled may run: not before the takeover on all ranks, if there will be one.

        If the user waits for compiled code, it runs at once: DDP reduces its gradients until the takeover.
        """
        if self.config.waits or not isinstance(self.gradients, DdpGradients):
            return True
        ddp = active()
        found = self.gradients if ddp is None else adopt(ddp)
        if isinstance(found, str):
            return True
        takeover = found.takeover
        takeover.ready()
        return takeover.is_over or not takeover.lasts  # without one, DDP reduces what compiled code hands to autograd

    def meet(self, ddp: Any) -> None:
        """Note the data-parallel module in whose forward the region is called, see [Note: Wrapped again]."""
        if isinstance(self.gradients, DdpGradients) or (_may_reduce(self.config) and copies_outputs(ddp)):
            meet(ddp)

    def failed(self) -> None:
        """Note that the region could not be compiled on this rank."""
        if isinstance(self.gradients, DdpGradients):
            self.gradients.takeover.failed()

    def with_gradients(self, gradients: Members | None) -> RegionLowering:
        """Return the lowering with other gradients, such as none, or those of parameters in another process."""
        return replace(self, gradients=gradients)

    def _compile_for_others(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile a graph for other parameters, of this data-parallel module or of another one."""
        lowering = RegionLowering.here(self.config, self.plan)
        if not lowering.may_begin():  # the parameters of another module before its takeover: DDP's reducer has them
            return module.forward
        return lowering.compile(module, example_inputs)


def _may_reduce(config: CompilerConfig) -> bool:
    return config.reduce_gradients and config.lowering != "eager"


def _has_strict_numerics(module: fx.GraphModule) -> bool:
    """Return whether a graph may be rounded otherwise by strict numerics: on a GPU, or in half precision."""
    for node in module.graph.nodes:
        value = node.meta.get("val", node.meta.get("example_value"))
        if isinstance(value, torch.Tensor) and (value.is_cuda or value.dtype in (torch.float16, torch.bfloat16)):
            return True
        if "autocast" in str(node.target):
            return True
    return False


_Lower = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]


class _GraphPerParameters:
    """A callable that uses `compiled` for the parameters it was compiled for, and compiles anew for others.

    A graph that reduces gradients is made for certain parameters, and Dynamo treats parameters as inputs like any
    other. Modules of one class share a graph: the blocks of a model that is compiled block by block, for example, or
    two models. Their computations are the same, but their gradients are not.
    """

    def __init__(
        self, compiled: Callable[..., Any], module: fx.GraphModule, inputs: Sequence[Any], lower: _Lower
    ) -> None:
        """Note the parameters. module: an uncompiled copy of the graph. inputs: of `compiled`. lower: compiles it."""
        self._places = [place for place, each in enumerate(inputs) if isinstance(each, torch.nn.Parameter)]
        self._own = [weakref.ref(inputs[place]) for place in self._places]
        self._compiled, self._module, self._lower = compiled, module, lower
        self._others: dict[tuple[int, ...], tuple[list[weakref.ref[Any]], Callable[..., Any]]] = {}

    def __call__(self, *inputs: Any) -> Any:
        if self._are(self._own, inputs):
            return self._compiled(*inputs)
        key = tuple(id(inputs[place]) for place in self._places)
        known = self._others.get(key)
        if known is None or not self._are(known[0], inputs):
            compiled = torch.compile(copied(self._module).forward, backend=self._lower, fullgraph=True)
            known = self._others[key] = ([weakref.ref(inputs[place]) for place in self._places], compiled)
        return known[1](*inputs)

    def _are(self, known: Sequence[weakref.ref[Any]], inputs: Sequence[Any]) -> bool:
        return all(each() is inputs[place] for each, place in zip(known, self._places, strict=True))
