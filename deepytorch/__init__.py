"""deepytorch: a training accelerator for PyTorch.

After `import deepytorch` a training script runs as before, but faster: see `autowrap` for the modules that are
compiled, and when. A script that uses only the name, `torch.compile(model, backend="deepytorch")`, is not changed in
any other way. The import is light on purpose: `torch` and the compiler are loaded when they are first used.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING

from wrapt import when_imported

from deepytorch.config import Environment
from deepytorch.errors import DeepytorchError
from deepytorch.log import logger
from deepytorch.version import __version__

if TYPE_CHECKING:
    from deepytorch.api import explain, report
    from deepytorch.autowrap import compile, configure, disable, enable, optimize, paused  # noqa: A004
    from deepytorch.loading import prefetch

__all__ = [
    "DeepytorchError", "__version__",
    "compile", "configure", "disable", "enable", "explain", "optimize", "paused", "prefetch", "report",
]  # fmt: skip

_HOMES = {
    **dict.fromkeys(("explain", "report"), "deepytorch.api"),
    "prefetch": "deepytorch.loading",
    **dict.fromkeys(("compile", "configure", "disable", "enable", "optimize", "paused"), "deepytorch.autowrap"),
}


def _is_asked_for_by_name() -> bool:
    """Return whether `torch.compile` looks for its backend, and nobody wrote `import deepytorch`."""
    frame = sys._getframe()
    while frame is not None:
        name = frame.f_globals.get("__name__")
        if name == "sitecustomize":  # of `deepytorch run`, whatever imports torch below it
            return False
        if name == "importlib.metadata":
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _attach(name: str) -> None:
    """Attach an integration to its host framework once the host is imported, before or after this module."""
    host, integration, attach = _HOSTS[name]
    _when_imported(host, lambda module: getattr(import_module(integration), attach)(module))


def _when_imported(host: str, attach: Callable[[object], None]) -> None:
    """Call `attach` with the module `host` once it is imported. A failure to attach never breaks the import."""

    def attach_to(module: object) -> None:
        try:
            attach(module)
        except (AttributeError, ImportError) as error:  # another version of the host
            logger.warning("%s is left as it is: %s. `deepytorch doctor` says which versions are tested.", host, error)

    when_imported(host)(attach_to)


# name -> the module of the host, ours, and the function of ours that is called with the host's
_HOSTS = {
    "training": ("torch", "deepytorch.integrations.optimizers", "attach"),
    "process groups": ("torch", "deepytorch.integrations.process_groups", "attach"),
    "accelerate": ("accelerate.utils.dataclasses", "deepytorch.integrations.accelerate", "attach"),
    "models": ("transformers.modeling_utils", "deepytorch.integrations.hf_models", "attach"),
    "deepspeed": ("deepspeed.runtime.engine", "deepytorch.integrations.deepspeed", "attach"),
    "lightning": ("lightning.pytorch.strategies.strategy", "deepytorch.integrations.lightning", "attach"),
    "pytorch_lightning": ("pytorch_lightning.strategies.strategy", "deepytorch.integrations.lightning", "attach"),
    "megatron": ("megatron.core.jit", "deepytorch.integrations.megatron", "attach"),
    "megatron (attention)": (
        "megatron.core.transformer.dot_product_attention",
        "deepytorch.integrations.megatron",
        "attach_attention",
    ),
    "megatron (BERT)": ("megatron.core.models.bert.bert_model", "deepytorch.integrations.megatron", "attach_bert"),
    "megatron (half precision)": (
        "megatron.core.transformer.module",
        "deepytorch.integrations.megatron",
        "attach_casts",
    ),
    "megatron (GPT)": ("megatron.core.models.gpt.gpt_model", "deepytorch.integrations.megatron", "attach_gpt"),
    "megatron (pipelines)": (
        "megatron.core.pipeline_parallel.schedules",
        "deepytorch.integrations.megatron",
        "attach_schedules",
    ),
    "peft": ("peft.peft_model", "deepytorch.integrations.peft", "attach"),
    "trl": ("trl.trainer.utils", "deepytorch.integrations.trl", "attach"),
    "trainer": ("transformers.trainer", "deepytorch.integrations.hf_trainer", "attach"),
    "batches (Accelerate)": ("accelerate.data_loader", "deepytorch.integrations.moved_batches", "attach"),
    "batches (Lightning)": ("lightning.pytorch.core.hooks", "deepytorch.integrations.moved_batches", "attach"),
    "batches (pytorch_lightning)": ("pytorch_lightning.core.hooks", "deepytorch.integrations.moved_batches", "attach"),
    "batches (Fabric)": ("lightning.fabric.wrappers", "deepytorch.integrations.moved_batches", "attach"),
    "batches (lightning_fabric)": ("lightning_fabric.wrappers", "deepytorch.integrations.moved_batches", "attach"),
    "batches (encodings)": (
        "transformers.tokenization_utils_base",
        "deepytorch.integrations.moved_batches",
        "attach_encodings",
    ),
}

# `init_process_group("deepytorch")` works after this import, whichever of torch and deepytorch comes first.
_when_imported(
    "torch.distributed.distributed_c10d", lambda _: import_module("deepytorch.comm.group.registration").register()
)

# `torch.compile(model, backend="deepytorch")` works from a source tree, too, which has no entry point.
_when_imported(
    "torch._dynamo.backends.registry",
    lambda registry: import_module("deepytorch.integrations.backend_name").register(registry),
)

if Environment.read().profile is not None:
    _when_imported("torch", lambda _: import_module("deepytorch.profile.recorder").attach())

if Environment.read().enabled:
    _attach("accelerate")  # this only makes a name known
    if not _is_asked_for_by_name():
        _when_imported(
            "torch.nn.parallel.distributed",
            lambda module: import_module("deepytorch.ddp_modules").number_modules(module),
        )
        for _name in _HOSTS.keys() - {"accelerate"}:
            _attach(_name)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(import_module(_HOMES[name]), name)
    except (ImportError, RuntimeError):
        if name != "report" or threading.main_thread().is_alive():
            raise
        # A process that ends and has not loaded Dynamo (torchrun's own, for example) cannot load it any more.
        return lambda reset=False: "deepytorch\nNothing was traced in this process."
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
