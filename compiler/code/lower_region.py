"""How the graphs of one region are compiled: with gradients reduced in them, where those are ours to reduce."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from deepytorch.compiler.code.data_parallel import Members, Prospect, active, adopt, delays_some, prospect
from deepytorch.compiler.code.graph_per_parameters import GraphPerParameters
from deepytorch.compiler.code.lower import GraphPasses, lower
from deepytorch.compiler.config import CompilerConfig
from deepytorch.compiler.manager import copied
from deepytorch.compiler.plan import Plan
from deepytorch.passes.reduce_gradients import ReduceGradients
from deepytorch.torch_internals import inductor_config

# Options of Inductor's that move what is in a graph, off where gradients are reduced in it. The first puts them off to
# the end, for the memory that they take, and then they leave late; the second (torch 2.14) moves torch's collectives
# past ours, and ranks that send in other orders wait for each other without end.
_MOVERS = ("reorder_for_peak_memory", "aten_distributed_optimizations.enable_simple_overlap")


@dataclass(frozen=True, eq=False)
class RegionLowering:
    """What one region's graphs are compiled with.

    gradients: those of the data-parallel module around the region, if they are ours to reduce. declined: why they are
    not, where there is such a module.
    """

    config: CompilerConfig
    plan: Plan
    gradients: Members | None = None
    declined: str | None = None

    @classmethod
    def here(cls, config: CompilerConfig, plan: Plan) -> RegionLowering:
        """For a region in the data-parallel module whose forward runs now, if one does."""
        ddp = active()
        if ddp is not None and delays_some(ddp):  # in the order in which eager's backward comes to them
            return cls(replace(config, lowering="eager"), plan, declined="some are delayed, which takes eager's order")
        if not config.reduce_gradients or config.lowering == "eager":
            ddp = None
        if ddp is None or torch.distributed.get_world_size(ddp.process_group) == 1:
            return cls(config, plan)
        adopted = adopt(ddp) if config.waits else prospect(ddp)
        return cls(config, plan, declined=adopted) if isinstance(adopted, str) else cls(config, plan, adopted)

    def compile(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile one graph of the region, as a backend of `torch.compile` does; `module` may be changed."""
        if self.gradients is None:
            return self.lower(module, example_inputs)
        spare = copied(module)
        compiled = self.lower(module, example_inputs)
        return GraphPerParameters(compiled, spare, example_inputs, self._compile_for_others)

    def lower(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile one graph for these very parameters."""
        if self.gradients is None:
            return lower(module, example_inputs, config=self.config, plan=self.plan)
        reduce = ReduceGradients(self.gradients.name, self.gradients.members(example_inputs))
        known = inductor_config.get_config_copy()
        still = {name: False for name in _MOVERS if name in known}
        config = replace(self.config, inductor={**still, **self.config.inductor})
        passes = GraphPasses(post_grad_pre=(reduce,))
        return lower(module, example_inputs, config=config, plan=self.plan, passes=passes)

    def may_begin(self) -> bool:
        """Whether compiled code, which is there, may run: not before gradients are ours on all ranks, if they will be.

        Where the user waits for it, it runs at once: DDP reduces what comes of it until then.
        """
        if self.config.waits or not isinstance(self.gradients, Prospect):
            return True
        self.gradients.change_over.ready()
        return self.gradients.change_over.is_over

    def failed(self) -> None:
        """The region could not be compiled on this rank."""
        if isinstance(self.gradients, Prospect):
            self.gradients.change_over.failed()

    def with_gradients(self, gradients: Members | None) -> RegionLowering:
        """The same, for parameters of another process."""
        return replace(self, gradients=gradients)

    def _compile_for_others(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """A graph for other parameters than it was compiled for, of this data-parallel module or of another one."""
        lowering = RegionLowering.here(self.config, self.plan)
        if not lowering.may_begin():  # another module's, which has not come so far: it stays with its own reducer
            return module.forward
        return lowering.compile(module, example_inputs)
