"""All-reduce of CUDA tensors through torch's symmetric memory: what the algorithms of `nvlink` run.

Not yet run on several GPUs.
"""

from __future__ import annotations

from typing import Any

import torch

from deepytorch.comm.algorithms.nvlink import Multimem, OneShot, TwoShot
from deepytorch.torch_internals import get_symm_mem_workspace

NAMES = (OneShot.name, TwoShot.name, Multimem.name)


def all_reduce(name: str, tensor: torch.Tensor, group_name: Any) -> None:
    """Sum `tensor` (contiguous, on a GPU) in place over the group by the algorithm `name`, on the current stream.

    The values go through the group's workspace, which torch sets up at its first use and keeps.
    """

    workspace = get_symm_mem_workspace(group_name, tensor.nbytes)
    buffer = workspace.get_buffer(workspace.rank, tensor.shape, tensor.dtype)
    buffer.copy_(tensor)
    if name == OneShot.name:
        tensor.copy_(torch.ops.symm_mem.one_shot_all_reduce(buffer, "sum", group_name))
    elif name == TwoShot.name:
        tensor.copy_(torch.ops.symm_mem.two_shot_all_reduce_(buffer, "sum", group_name))
    else:
        tensor.copy_(torch.ops.symm_mem.multimem_all_reduce_(buffer, "sum", group_name))
