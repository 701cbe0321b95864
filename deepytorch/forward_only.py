"""Calls without gradients of an armed module (evaluation, log-probabilities of a policy), packed at model entry.

Nothing is compiled for them. The first calls run padded, and are timed; packing goes on as long as it saves time. A
call that generates is never touched: it hands over a key-value cache without labels, or asks for one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from deepytorch.compiler.budget import BUDGET
from deepytorch.first_steps import ASK_SECONDS, FirstEntry, batch_of

_TRIED = 6  # calls before packing that does not pay is given up; the first three of them are profiled


class ForwardOnly:
    """The calls without gradients of one module. waits: whether packing may begin with the first call."""

    def __init__(self, *, waits: bool) -> None:
        self._waits = waits
        self._entry: FirstEntry | None = None  # that was asked
        self._gave_up = False
        self._seconds_a_position = math.inf  # of padded calls
        self._packed, self._saved = 0, 0.0

    def call(self, entry: FirstEntry | None, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a call, through `entry` if packing is possible and pays."""
        if entry is None or self._gave_up or not may_have_padding(kwargs):
            return module._call_impl(*args, **kwargs)
        is_new = entry is not self._entry
        if is_new and not self._waits and (math.isinf(self._seconds_a_position) or not BUDGET.affords(ASK_SECONDS)):
            return self._padded(module, args, kwargs)
        run = partial(entry.call, module._call_impl, args, kwargs)
        if is_new:  # the entry is proved in this call, which runs padded to see how its outputs are used
            self._entry, self._packed, self._saved = entry, 0, 0.0
            with BUDGET.pause():
                outputs = run()
            BUDGET.account(self._padded_seconds(args, kwargs))
            return outputs
        started = time.perf_counter()
        outputs = run()
        self._account(time.perf_counter() - started, args, kwargs)
        return outputs

    def _padded(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        started = time.perf_counter()
        outputs = module._call_impl(*args, **kwargs)
        batch = batch_of(args, kwargs)
        if batch is not None:
            seconds = (time.perf_counter() - started) / (batch.shape[0] * batch.shape[1])
            self._seconds_a_position = min(self._seconds_a_position, seconds)
        return outputs

    def _padded_seconds(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
        """Return an estimate of the seconds that a call takes padded; 0 if none was timed."""
        batch = batch_of(args, kwargs)
        if batch is None or batch.device.type != "cpu" or math.isinf(self._seconds_a_position):
            return 0.0
        return self._seconds_a_position * batch.shape[0] * batch.shape[1]

    def _account(self, seconds: float, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        padded = self._padded_seconds(args, kwargs)
        if padded:  # on other devices a call returns before it is computed
            self._packed, self._saved = self._packed + 1, self._saved + padded - seconds
            BUDGET.account(min(padded - seconds, 0.0))
            self._gave_up = self._packed > _TRIED and self._saved < 0


def may_have_padding(kwargs: Mapping[str, Any]) -> bool:
    """Return whether the arguments of a call hold a mask over several positions, and no cache is filled or read."""
    mask = kwargs.get("attention_mask")
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2 or mask.shape[1] < 2:
        return False
    if kwargs.get("use_cache") or kwargs.get("logits_to_keep"):
        return False
    is_cached = any(kwargs.get(name) is not None for name in ("past_key_values", "cache"))
    return not is_cached or kwargs.get("labels") is not None  # with labels: the prefix of an evaluation
