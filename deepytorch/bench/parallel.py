"""Trainers of one model on the ranks of the default process group, each as a script would have it.

Sources: torch's own tutorials of DistributedDataParallel, fully_shard, tensor parallelism and pipelines; torchtitan for
how these are combined; DeepSpeed's. The group exists already.
"""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from importlib.util import find_spec
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from deepytorch.bench.model_parts import blocks, cut, divide, fill, inner
from deepytorch.bench.ways import Parallel
from deepytorch.errors import ConfigError
from deepytorch.torch_internals import inductor_config

Batch = dict[str, Tensor]
MakeOptimizer = Callable[[Iterable[Any]], Optimizer]
# Settings that overlap and bucket collectives in stock's graphs; `reorder_for_compute_comm_overlap` alone does nothing.
# Torch can measure compute times on GPUs only, so a formula estimates them, on GPUs and CPUs alike.
_OVERLAP = {
    "aten_distributed_optimizations.enable_overlap_scheduling": True,
    "aten_distributed_optimizations.collective_bucketing": True,
    "aten_distributed_optimizations.insert_overlap_deps": True,
    "aten_distributed_optimizations.compute_estimator": "analytical",
}
_DTYPES = {"fp32": torch.float32, "mixed": torch.bfloat16, "fp16": torch.float16}
_nothing = contextlib.nullcontext


class Trainer(ABC):
    """A model in training, on this rank.

    model: the module that holds this rank's weights, whole or in part, and their gradients after a step.
    """

    model: nn.Module

    def __init__(self, parallel: Parallel, device: torch.device) -> None:
        self.parallel, self.device = parallel, device

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context of a forward."""
        enabled = self.parallel.precision != "fp32"
        return torch.autocast(self.device.type, _DTYPES[self.parallel.precision]) if enabled else _nothing()

    @abstractmethod
    def step(self, batches: Sequence[Batch]) -> Tensor:
        """Run forward, backward and optimizer over the micro-batches, `parallel.accumulate` of them.

        Returns the mean of this replica's losses, without a graph. Gradients stay until the next step.
        """


class DataParallel(Trainer):
    """A model that is whole on every rank, or divided by tensor parallelism, and its replicas; or one of them."""

    def __init__(
        self, model: nn.Module, parallel: Parallel, make: MakeOptimizer, device: torch.device, mesh: DeviceMesh | None
    ) -> None:
        super().__init__(parallel, device)
        whole = parallel.tensor == 1 and parallel.sharding != "fsdp2"
        self.model = _replicated(model if whole else _compiled_blocks(model, parallel), parallel, device, mesh)
        compiled = whole and parallel.compile
        self._call: Callable[..., Any] = (
            torch.compile(self.model, backend=parallel.compile, mode=parallel.mode) if compiled else self.model
        )
        self.optimizer = _optimizer(self.model, parallel, make)
        self._by_policy = parallel.sharding == "fsdp2"  # has a precision of its own
        self._scaler = torch.amp.GradScaler(device.type, enabled=parallel.precision == "fp16")

    def step(self, batches: Sequence[Batch]) -> Tensor:
        self.optimizer.zero_grad()
        losses = []
        for number, batch in enumerate(batches, 1):
            with self._sync(number == len(batches)):
                with _nothing() if self._by_policy else self.autocast():
                    loss = loss_of(self._call(**batch))
                self._scaler.scale(loss / len(batches)).backward()
            losses.append(loss.detach())
        self._scaler.step(self.optimizer)
        self._scaler.update()
        return torch.stack(losses).mean()

    def _sync(self, last: bool) -> AbstractContextManager[Any]:
        """Return the context of a micro-batch: gradients are reduced with the last one's."""
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(last)
        elif isinstance(self.model, DistributedDataParallel) and not last:
            return self.model.no_sync()
        return _nothing()


class Zero(Trainer):
    """DeepSpeed's ZeRO. stages 1, 2, 3: the optimizer's state is sharded, gradients too, weights too."""

    def __init__(self, model: nn.Module, parallel: Parallel, make: MakeOptimizer, device: torch.device) -> None:
        super().__init__(parallel, device)
        os.environ.setdefault("DS_ACCELERATOR", device.type)
        import deepspeed

        config = _zero_config(parallel, device)
        if any(each.is_meta for each in model.parameters()):
            for part in (*blocks(model), model):
                fill(model, part, device)
                deepspeed.zero.Init(module=part, config_dict_or_path=config)
        self._engine, *_ = deepspeed.initialize(
            model=model, model_parameters=list(model.parameters()), optimizer=make, config=config
        )
        if parallel.compile:
            self._engine.compile(backend=parallel.compile)
        self.model = self._engine.module
        self._dtype = _DTYPES[parallel.precision]

    def step(self, batches: Sequence[Batch]) -> Tensor:
        losses = []
        for batch in batches:
            inputs = {name: each.to(self._dtype) if each.is_floating_point() else each for name, each in batch.items()}
            loss = loss_of(self._engine(**inputs))
            self._engine.backward(loss)
            self._engine.step()  # of the optimizer, at the last micro-batch
            losses.append(loss.detach())
        return torch.stack(losses).mean()


class Pipeline(Trainer):
    """A model whose layers are divided between stages, each of which may be divided and replicated once more."""

    def __init__(
        self, model: nn.Module, parallel: Parallel, make: MakeOptimizer, device: torch.device, mesh: DeviceMesh
    ) -> None:
        super().__init__(parallel, device)
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

        self._group, stages = mesh["pp"].get_group(), parallel.pipeline
        index = mesh["pp"].get_local_rank()
        self._first, self._last = index == 0, index == stages - 1
        autocast = _nothing if parallel.sharding == "fsdp2" else self.autocast
        stage = _replicated(_compiled_blocks(Stage(model, autocast), parallel), parallel, device, mesh)
        self.model = stage
        self.optimizer = _optimizer(stage, parallel, make)

        def loss(logits: Tensor, labels: Tensor) -> Tensor:
            return cast(Any, model).loss_function(logits=logits, labels=labels, vocab_size=logits.shape[-1])

        kind: Any = Schedule1F1B if parallel.accumulate >= stages else ScheduleGPipe
        piped = PipelineStage(stage, index, stages, device, group=self._group)
        self._schedule = kind(piped, n_microbatches=parallel.accumulate, loss_fn=loss)

    def step(self, batches: Sequence[Batch]) -> Tensor:
        """See `Trainer`. All batches have the shapes of the first ones: stages agree on them once."""
        self.optimizer.zero_grad()
        rows = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
        ids, labels = rows.pop("input_ids"), rows.pop("labels")
        losses: list[Tensor] = []
        inputs, target = (ids,) if self._first else (), labels if self._last else None
        self._schedule.step(*inputs, target=target, losses=losses, return_outputs=False, **rows)
        self.optimizer.step()
        loss = torch.stack(losses).mean().detach() if self._last else torch.zeros((), device=self.device)
        dist.broadcast(loss, group=self._group, group_src=self.parallel.pipeline - 1)
        return loss


class Stage(nn.Module):
    """The part of a decoder that one stage has: `model`, of which other stages' layers are already taken out."""

    def __init__(self, model: nn.Module, autocast: Callable[[], AbstractContextManager[Any]]) -> None:
        super().__init__()
        self.model, self._autocast = model, autocast

    def forward(self, given: Tensor, **batch: Tensor) -> Tensor:
        """Return hidden states (rows, positions, hidden) of the stage's last layer; logits, if it is the last stage.

        given: token ids, or hidden states of the stage before.
        """
        name = "inputs_embeds" if given.is_floating_point() else "input_ids"
        with self._autocast():
            return self.model(**{name: given}, **batch).logits


def trainer(
    model: nn.Module | Callable[[], nn.Module], parallel: Parallel, *, optimizer: MakeOptimizer, device: torch.device
) -> Trainer:
    """Return a trainer of the model, which is taken over, on this rank.

    Args:
        model: Its forward returns the loss, or something with `.loss`; equal on all ranks. Where weights are sharded
            (zero3, fsdp2) and a function is given that makes it, it is made without memory; weights are then drawn and
            sharded block by block, so that no rank ever holds all of them. That is for models of transformers 5.
        parallel: The way; `ways.unavailable` says whether it can be.
        optimizer: Makes the optimizer, of parameters or of groups of them.
        device: Of this rank.

    Raises `ConfigError` if the way does not fit the ranks or the model.
    """
    replicas = parallel.replicas(dist.get_world_size() if dist.is_initialized() else 1)
    if parallel.compile == "inductor" and dist.is_initialized():
        known = inductor_config.get_config_copy()
        inductor_config.load_config({name: value for name, value in _OVERLAP.items() if name in known})
    divided = parallel.tensor > 1 or parallel.pipeline > 1
    made = _made(model, without_memory=parallel.sharding in ("zero3", "fsdp2") and not divided)
    if parallel.recompute:
        _recompute(made)
    if parallel.sharding in ("zero1", "zero2", "zero3", "fsdp2"):
        made = inner(made)  # what scripts shard is the model of transformers, not what holds it
    if parallel.sharding.startswith("zero"):
        return Zero(made, parallel, optimizer, device)
    if not divided:
        return DataParallel(made, parallel, optimizer, device, None)
    made = inner(made)
    sizes = {"dp": replicas, "one": 1, "pp": parallel.pipeline, "tp": parallel.tensor}
    mesh = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    if parallel.pipeline > 1:
        cut(made, mesh["pp"].get_local_rank(), parallel.pipeline)
    if parallel.tensor > 1:
        divide(made, mesh["tp"])
    kind = Pipeline if parallel.pipeline > 1 else DataParallel
    return kind(made, parallel, optimizer, device, mesh)


def loss_of(found: Any) -> Tensor:
    """Return the loss of what a forward returned: it, or its `loss`."""
    return found if isinstance(found, Tensor) else found.loss


def _made(model: nn.Module | Callable[[], nn.Module], without_memory: bool) -> nn.Module:
    if isinstance(model, nn.Module):
        return model
    if without_memory and find_spec("transformers.initialization") is not None:
        with torch.device("meta"):
            made = model()
        if hasattr(inner(made), "_init_weights"):
            return made
    return model()


def _recompute(model: nn.Module) -> None:
    """Let blocks keep no activations."""
    if hasattr(inner(model), "gradient_checkpointing_enable"):
        cast(Any, inner(model)).gradient_checkpointing_enable({"use_reentrant": False})
        return
    found = blocks(model)
    if not found:
        raise ConfigError(f"{type(model).__name__} has no blocks that are alike, so that nothing can be recomputed.")
    for block in found:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def _compiled_blocks(model: nn.Module, parallel: Parallel) -> nn.Module:
    if parallel.compile:
        for block in blocks(model) or [model]:
            block.compile(backend=parallel.compile, mode=parallel.mode)
    return model


def _replicated(model: nn.Module, parallel: Parallel, device: torch.device, mesh: DeviceMesh | None) -> nn.Module:
    """Return the model as this rank has it, tied to the other replicas."""
    if parallel.sharding == "none":
        return model.to(device)
    if parallel.sharding == "fsdp2" or mesh is not None:  # DDP takes no divided weights, and fails in pipelines
        return _shard(model, parallel, device, mesh)
    return _ddp(model, device)


def _ddp(model: nn.Module, device: torch.device) -> nn.Module:
    return DistributedDataParallel(
        model.to(device),
        device_ids=[device] if device.type == "cuda" else None,
        broadcast_buffers=False,
        gradient_as_bucket_view=True,
    )


def _shard(model: nn.Module, parallel: Parallel, device: torch.device, mesh: DeviceMesh | None) -> nn.Module:
    """Shard a model over its replicas; or, with `ddp`, keep a shard of everything on each."""
    options: dict[str, Any] = {}
    if mesh is not None:
        options["mesh"] = mesh["dp"] if parallel.sharding == "fsdp2" else mesh["dp", "one"]
    if parallel.sharding == "fsdp2" and parallel.precision != "fp32":
        options["mp_policy"] = MixedPrecisionPolicy(_DTYPES[parallel.precision], torch.float32)
    for part in (*blocks(model), model):
        fill(model, part, device)
        fully_shard(part, **options)
    return model


def _optimizer(model: nn.Module, parallel: Parallel, make: MakeOptimizer) -> Optimizer:
    if parallel.sharding == "oss":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(model.parameters(), optimizer_class=cast(Any, make))
    groups: dict[Any, list[nn.Parameter]] = {}
    for each in model.parameters():  # an optimizer updates a group at once, which is to be of one mesh
        groups.setdefault(getattr(each, "device_mesh", None), []).append(each)
    return make(model.parameters() if len(groups) == 1 else [{"params": each} for each in groups.values()])


def _zero_config(parallel: Parallel, device: torch.device) -> dict[str, Any]:
    """Return DeepSpeed's configuration."""
    stage, host = int(parallel.sharding[-1]), {"device": "cpu", "pin_memory": device.type != "cpu"}
    parts = ("offload_optimizer", "offload_param")[: 2 if stage == 3 else 1] if parallel.offload else ()
    config = {
        "train_micro_batch_size_per_gpu": 1,  # for what it logs only
        "gradient_accumulation_steps": parallel.accumulate,
        "zero_optimization": {"stage": stage, **dict.fromkeys(parts, host)},
        "gradient_clipping": 0.0,  # the default is 1.0
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # which would have to be built
        "steps_per_print": 10**9,
    }
    halves = {"mixed": "bf16", "fp16": "fp16"}
    return config | ({halves[parallel.precision]: {"enabled": True}} if parallel.precision in halves else {})
