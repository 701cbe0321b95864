"""The passes that carry out a Plan: one list, read top to bottom."""

from __future__ import annotations

from deepytorch.compiler.plan import Plan
from deepytorch.passes.base import Pass
from deepytorch.passes.fuse_linear_loss import FuseLinearLoss
from deepytorch.passes.unpad.strip_padding import StripPadding


def passes_for(plan: Plan) -> list[Pass]:
    """Return the passes of `plan`, in order."""
    config = plan.config
    passes: list[Pass] = [
        StripPadding(
            loss_rows=config.loss_rows, defer_outputs=config.defer_outputs, zero_outputs=config.outputs == "zeros"
        ),
        # behind StripPadding, after which only the loss reads the logits of a Hugging Face model
        FuseLinearLoss() if config.fuse_loss else FuseLinearLoss(least_bytes=None),
    ]
    unknown = set(plan.passes) - {type(each).__name__ for each in passes}
    assert not unknown, f"a plan asks for {sorted(unknown)}, which no pass is called"
    return [each for each in passes if type(each).__name__ in plan.passes]
