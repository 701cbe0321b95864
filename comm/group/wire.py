"""Policies of sending fewer bits: what values are sent as, which values, and where. Only on request.

| policy | asked for by | sent as | where |
| --- | --- | --- | --- |
| `COMPRESS` | `comm.all_reduce(compress=...)` | bf16, fp16, fp8 | between hosts |
| `COMPRESS_IF_FASTER` | `Options(compress=...)`, for all_reduce | bf16, fp16 | between hosts, if faster |
| `QUANTIZE` | `comm.quantize(model)`, for FSDP2 | int8, fp8 | between hosts |
| `QUANTIZE_GROUP` | `Options(quantize=...)`, for ZeRO | int8, fp8 | between hosts, of tensors on the CPU |
| `BF16` | `comm.send_bf16(model)`, `comm.all_reduce_bf16`, ... | bf16 | everywhere, on any backend |

`algorithms.base.can_compress` and `compressed_cost` say what `COMPRESS_IF_FASTER` is predicted to gain.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepytorch.errors import ConfigError


@dataclass(frozen=True)
class WirePolicy:
    """One policy: the types that values may be sent as, and which values are, in sums and averages.

    Attributes:
        argument: what users set, for errors.
        types: what it may be set to; None sends exact values.
        dtypes: of the values that are sent so.
        contiguous, on_cpu: whether their tensors have to be.
        note: added to what is expected.
    """

    argument: str
    types: tuple[str | None, ...]
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
    contiguous: bool = False
    on_cpu: bool = False
    note: str = ""

    def check_type(self, wanted: object) -> None:
        """Raise `ConfigError` for a type that values are not sent as."""
        if wanted not in self.types:
            raise ConfigError(f"{self.argument}={wanted!r}; expected {_one_of(map(repr, self.types))}{self.note}")

    def takes(self, op: Any, *tensors: Tensor) -> bool:
        """Return whether the values of these tensors are sent so."""
        return op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG) and all(map(self._takes_values_of, tensors))

    def check(self, op: Any, tensor: Tensor) -> None:
        """Raise `ConfigError` for a tensor whose values are not sent so."""
        if not self.takes(op, tensor):
            raise ConfigError(
                f"{self.argument} with {op} of a tensor of {tensor.dtype} on {tensor.device}"
                f"{'' if _is_contiguous(tensor) else ', not contiguous'}; expected SUM or AVG of "
                f"{_one_of(str(each).removeprefix('torch.') for each in self.dtypes)}, contiguous"
                f"{' and on the CPU' if self.on_cpu else ''}"
            )

    def _takes_values_of(self, tensor: Tensor) -> bool:
        placed = tensor.device.type == "cpu" or not self.on_cpu
        return placed and tensor.dtype in self.dtypes and (_is_contiguous(tensor) or not self.contiguous)


COMPRESS = WirePolicy("compress", (None, "bf16", "fp16", "fp8"), contiguous=True, on_cpu=True)
COMPRESS_IF_FASTER = WirePolicy(
    "compress",
    (None, "bf16", "fp16"),
    note=" (fp8 needs error feedback: deepytorch.comm.all_reduce(tensor, compress='fp8', key=...))",
)
QUANTIZE = WirePolicy("wire", ("int8", "fp8"))
QUANTIZE_GROUP = WirePolicy("quantize", (None, "int8", "fp8"))
# Not of fp16, which has mantissa bits that bf16 lacks, nor of fp64, whose users want no rounding.
BF16 = WirePolicy("a sum as bf16", ("bf16",), (torch.float32, torch.bfloat16), contiguous=True)


class Fsdp2Collective:
    """The common part of collectives that FSDP2 calls in place of its own."""

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate memory for the collective, as FSDP2 itself does."""
        return torch.empty(*size, dtype=dtype, device=device)


def fsdp2_modules(model: nn.Module, caller: str, expected: str) -> list[Any]:
    """Return the modules of a model that `fully_shard` was applied to. Raise `ConfigError` if there is none."""
    from torch.distributed.fsdp import FSDPModule

    found = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not found:
        raise ConfigError(
            f"{caller}() of a {type(model).__name__}, without modules that fully_shard was applied to; expected "
            f"{expected}"
        )
    return found


def _is_contiguous(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and tensor.is_contiguous()


def _one_of(names: Iterable[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last
