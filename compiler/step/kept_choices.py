"""The form that was found to be the fastest for a region, kept on disk for later runs of the same region."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import fx

from deepytorch.private_files import add_to_private_json, cache_directory, read_private_json

_SECONDS = 30 * 86_400.0  # for which an outcome holds: a run that was measured on a busy machine is not final
_VERSION = 1  # of the forms and of their trials: raised when these change


class KeptChoice:
    """The outcome for one region, on this kind of machine, by its graph and sizes.

    Args:
        module: The region's graph, of Dynamo's.
        example_inputs: Tensors, numbers and sizes of the graph's first call.
        settings: Further properties that the choice depends on, such as the number of ranks.
    """

    def __init__(self, module: fx.GraphModule, example_inputs: Sequence[Any], settings: Sequence[Any] = ()) -> None:
        surroundings = (
            torch.__version__,
            torch.get_num_threads(),
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            _processor(),
            *settings,
        )
        described = "\n".join([module.code, *map(_described, example_inputs), *map(str, surroundings)])
        self._digest = hashlib.sha256(described.encode()).hexdigest()

    def read(self) -> str | None:
        """Return the form's name, or None if no run has found it lately."""
        content = read_private_json(choices_file())
        found = content.get(self._digest) if isinstance(content, dict) else None
        if not isinstance(found, dict) or not isinstance(found.get("form"), str):
            return None
        when = found.get("when")
        is_fresh = isinstance(when, (int, float)) and 0.0 <= time.time() - when < _SECONDS
        return str(found["form"]) if is_fresh else None

    def write(self, form: str) -> None:
        """Keep a form's name, if the disk takes it."""
        add_to_private_json(choices_file(), self._digest, {"form": form, "when": time.time()})


def choices_file() -> Path:
    """Return the file of all regions' choices."""
    return cache_directory() / "tuned" / f"forms-{_VERSION}.json"


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(map(str, value.shape))} {value.requires_grad}"
    return type(value).__name__


@lru_cache
def _processor() -> str:
    """Return the processor's name, where the operating system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
