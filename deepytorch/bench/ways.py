"""The ways to train one model on several ranks: what is sharded or divided, and how a step is computed.

No torch here, so that the files of commands can name ways; `parallel` makes trainers of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

from deepytorch.bench.options import check_at_least, check_choice
from deepytorch.errors import ConfigError

SHARDINGS = ("none", "ddp", "oss", "zero1", "zero2", "zero3", "fsdp2")
PRECISIONS = ("fp32", "mixed", "fp16")
DIVIDED = ("llama", "qwen2", "bert")  # families that tensor parallelism has a plan for
STAGED = ("llama", "qwen2")  # families that can be cut into pipeline stages


@dataclass(frozen=True, kw_only=True, slots=True)
class Parallel:
    """One way to train a model. Ranks are numbered replica by replica, stage by stage, tensor rank by tensor rank.

    Attributes:
        sharding: Across replicas. none: there is one. ddp: DistributedDataParallel. oss: the same with torch's
            ZeroRedundancyOptimizer. zero1, zero2, zero3: DeepSpeed. fsdp2: torch's fully_shard, block by block.
        tensor: The ranks that the matrices of each layer are divided between.
        pipeline: The ranks that the layers are divided between. Micro-batches take turns as 1F1B has them, or GPipe if
            there are fewer of them than stages.
        precision: Of the step, over fp32 weights. mixed: bf16; fp16: with a gradient scaler. By autocast, or by the
            sharding's own setting where it has one (DeepSpeed, fully_shard).
        compile: A backend of torch.compile; "" for eager. mode: Its mode.
        recompute: Whether activations of blocks are computed again in the backward.
        offload: Whether the optimizer's state, and weights where they are sharded, are in the host's memory: DeepSpeed.
        accumulate: Micro-batches of an optimizer step.
    """

    sharding: str = "none"
    tensor: int = 1
    pipeline: int = 1
    precision: str = "fp32"
    compile: str = ""
    mode: str | None = None
    recompute: bool = False
    offload: bool = False
    accumulate: int = 1

    def __post_init__(self) -> None:
        """Raise `ConfigError` for a value that is not accepted."""
        check_choice(self, "sharding", SHARDINGS)
        check_choice(self, "precision", PRECISIONS)
        check_at_least(self, 1, "tensor", "pipeline", "accumulate")

    def replicas(self, ranks: int) -> int:
        """Return the number of replicas of the model on so many ranks. Raises `ConfigError` where they do not fit."""
        replicas, left = divmod(ranks, self.tensor * self.pipeline)
        if left or not replicas:
            raise ConfigError(
                f"tensor is {self.tensor} and pipeline {self.pipeline} on {ranks} ranks; expected a multiple of "
                f"{self.tensor * self.pipeline} ranks."
            )
        if self.sharding == "none" and replicas > 1:
            raise ConfigError(f"sharding is none with {replicas} replicas of the model; expected ddp or another.")
        return replicas

    def replica(self, rank: int) -> int:
        """Return the replica that a rank belongs to; all ranks of a replica are to get the same batches."""
        return rank // (self.tensor * self.pipeline)


def unavailable(parallel: Parallel, family: str, device: str = "cpu", ranks: int = 2) -> str | None:
    """Return why `family`, a model of `bench.models` or `bench.zoo`, cannot be trained so here; None if it can."""
    family = family.removeprefix("hf_").lower()
    deepspeed, divided = parallel.sharding.startswith("zero"), parallel.tensor > 1 or parallel.pipeline > 1
    if ranks == 1 and parallel.sharding not in ("none", "ddp"):
        return "needs several ranks: --ranks 2"
    if deepspeed and find_spec("deepspeed") is None:
        return "deepspeed is not installed"
    if divided and (deepspeed or parallel.sharding == "oss"):
        return f"{parallel.sharding} is not combined with tensor or pipeline parallelism here"
    if parallel.tensor > 1 and family not in DIVIDED:
        fused = " (its projections of queries, keys and values are one matrix)" if family == "gpt2" else ""
        return f"tensor parallelism has no plan for {family}{fused}, only for {', '.join(DIVIDED)}"
    if parallel.pipeline > 1 and family not in STAGED:
        tied = " (its head and its embedding are one weight)" if family in ("gpt2", "bert") else ""
        return f"{family} is not cut into pipeline stages{tied}, only {', '.join(STAGED)}"
    if parallel.precision == "fp16" and divided:
        return "torch's gradient scaler would find overflow in the gradients of one rank alone; mixed needs none"
    if parallel.precision == "fp16" and device == "cpu":
        return "fp16 is for GPUs"
    if parallel.offload and not deepspeed:
        return f"{parallel.sharding} has no offload here"
    return None
