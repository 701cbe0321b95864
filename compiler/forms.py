"""The forms of a region that is not packed, and what the choice among them goes by: see [Note: Tuning]."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from deepytorch.compiler.code.data_parallel import active, takeover_of
from deepytorch.compiler.code.lower_region import RegionLowering
from deepytorch.compiler.config import CompilerConfig
from deepytorch.compiler.dynamo.capture import capture, saving_for_nobody
from deepytorch.compiler.dynamo.graph_traits import communicates, num_convolutions
from deepytorch.compiler.manager import run_passes
from deepytorch.compiler.report import RegionRecord
from deepytorch.compiler.step.kept_choices import KeptChoice
from deepytorch.compiler.step.regions import Compared, Tuning
from deepytorch.compiler.step.turns import AmongRanks, OneProcess
from deepytorch.config import Environment
from deepytorch.log import logger
from deepytorch.passes.base import Context
from deepytorch.passes.channels_last import ChannelsLast
from deepytorch.torch_internals import TensorifyScalarRestartAnalysis


def tuning_for(
    module: fx.GraphModule, example_inputs: Sequence[Any], lowering: RegionLowering, record: RegionRecord
) -> Tuning | None:
    """Return what the choice among a region's forms goes by; None if it is not to be measured, as on a GPU."""
    config = lowering.config
    if config.activation_memory < 1:  # eager would hold all of them
        return None
    if not config.tune or config.lowering != "inductor" or torch.are_deterministic_algorithms_enabled():
        return None
    tensors = [each for each in example_inputs if isinstance(each, torch.Tensor)]
    trains = torch.is_grad_enabled() and any(each.requires_grad for each in tensors)
    if not trains or any(each.device.type != "cpu" for each in tensors):
        return None
    if not may_run_apart(module, example_inputs):
        return None
    ddp, num_ranks = active(), 1
    turns = OneProcess()
    if ddp is not None and torch.distributed.get_world_size(ddp.process_group) > 1:
        store, rank, num_ranks = takeover_of(ddp).ranks
        code = hashlib.sha256(module.code.encode()).hexdigest()[:16]
        turns = AmongRanks(store, rank, num_ranks, f"{takeover_of(ddp).name}/{record.name}/{code}")
    return Tuning(
        turns,
        KeptChoice(module, example_inputs, (num_ranks, config.waits, sorted(config.inductor_options().items()))),
        _channels_last(module, example_inputs, config, record),
    )


def comparison_for(
    module: fx.GraphModule, example_inputs: Sequence[Any], lowering: RegionLowering, tuning: Tuning | None
) -> Compared | None:
    """Return the comparison of a region's forms with eager; None if there is to be none.

    There is none for one form for which steps wait, as with `torch.compile`, unless it is asked for.
    """
    environment = Environment.read()
    wanted = environment.verify or not lowering.config.waits
    if tuning is None and not (wanted and may_run_apart(module, example_inputs)):
        return None
    return Compared(lowering.gradients is not None, environment.verify_every if environment.verify else None)


def may_run_apart(module: fx.GraphModule, example_inputs: Sequence[Any]) -> bool:
    """Return whether a region may run once more on one rank, to be compared with eager: no other rank waits for it."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return True
    if torch.distributed.get_world_size() == 1:
        return True
    is_plain = all(
        type(each) in (torch.Tensor, torch.nn.Parameter) or not isinstance(each, torch.Tensor)
        for each in example_inputs
    )
    return active() is not None and is_plain and not communicates(module)


def _channels_last(
    module: fx.GraphModule, example_inputs: Sequence[Any], config: CompilerConfig, record: RegionRecord
) -> fx.GraphModule | None:
    """Return the graph with the channels of images last, to run operator by operator; None if there is no such form."""
    if num_convolutions(module) < 2:
        return None
    try:
        with saving_for_nobody():
            captured = capture(module, example_inputs)
        context = Context(captured.shape_env)
        found = run_passes(captured.module, [ChannelsLast()], context, dump_dir=config.dump_graphs)
    except TensorifyScalarRestartAnalysis:  # see [Note: Restarts]
        raise
    except Exception as error:
        logger.debug("%s has no form with channels last: %s", record.name, error)
        return None
    record.declined += found.reasons
    captured.module.recompile()
    return captured.module if found.fired else None
