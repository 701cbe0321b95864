"""The choice of a module's calls that may be compiled: training steps into which nobody looks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_modules

from deepytorch.switch import SWITCH
from deepytorch.torch_internals import (
    DeviceContext,
    DispatchKey,
    dispatch_tls_is_dispatch_key_included,
    forward_ad_level,
    get_function_stack_at,
    len_torch_dispatch_stack,
    len_torch_function_stack,
    top_saved_tensors_default_hooks,
)

# Hooks on every module of the process, which Dynamo does not look for.
_HOOKS_ON_ALL = (
    "_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks", "_global_backward_pre_hooks",
)  # fmt: skip


def trains(module: nn.Module) -> bool:
    """Return whether a call of `module` that begins now may be compiled."""
    return module.training and torch.is_grad_enabled() and not is_traced() and not is_transformed() and is_ours_to_run()


def is_ours_to_run() -> bool:
    """Return whether armed modules are not paused, and no hook is on every module of the process."""
    return not SWITCH.paused and not any(map(vars(torch_modules).get, _HOOKS_ON_ALL))


def is_traced() -> bool:
    """Return whether this code is being traced, and does not run."""
    return torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting() or torch.jit.is_tracing()


def is_transformed() -> bool:
    """Return whether something intercepts this call that could not intercept compiled code.

    That is a transform of `torch.func`, forward mode, a mode that takes calls of operators or functions, or hooks on
    tensors saved for the backward; but not a checkpoint's hooks, since the code it runs again is compiled as well.
    """
    # The dispatcher is asked: a call of functorch's own would make state that each backward node then copies, for good.
    if dispatch_tls_is_dispatch_key_included(DispatchKey.FuncTorchDynamicLayerFrontMode) or forward_ad_level() >= 0:
        return True
    if len_torch_dispatch_stack() or any(
        not isinstance(get_function_stack_at(place), DeviceContext)  # of `torch.set_default_device`
        for place in range(len_torch_function_stack())
    ):
        return True
    hooks = top_saved_tensors_default_hooks(False)
    return hooks is not None and getattr(hooks[0], "__module__", "") != "torch.utils.checkpoint"


def is_of_a_subclass(value: Any) -> bool:
    """Return whether `value` is a tensor of a class derived from `torch.Tensor`: a deferred output, a parameter."""
    return type(value) is not torch.Tensor and isinstance(value, torch.Tensor)


def is_of_the_scripts(value: Any) -> bool:
    """Return whether `value` is a tensor of a script's own class, which may treat functions as it likes."""
    return is_of_a_subclass(value) and not type(value).__module__.startswith(("torch.", "deepytorch."))
