"""The training loops of `deepytorch bench hosts`: each host's own way to run steps and to keep checkpoints.

The loops are written as users write them; nothing in them refers to deepytorch.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepytorch.bench.channel import Turns
from deepytorch.bench.model_parts import blocks

Batch = dict[str, Tensor]
LEARNING_RATE = 1e-3


@dataclass(frozen=True, slots=True)
class Step:
    """One training step of one rank."""

    loss: float
    seconds: float


class Loop(ABC):
    """One host, with a model and this rank's batches. turns: each step takes one, if another script runs in turns."""

    turns: Turns | None = None

    def __init__(self, model: Any, batches: Sequence[Batch], folder: Path) -> None:
        self.model: Any = model
        self.batches, self.folder = batches, folder

    @abstractmethod
    def train(self, first: int, save_at: int | None, save: Path, resume: Path | None) -> list[Step]:
        """Train from step `first` to the last batch; save before step `save_at`, and start from checkpoint `resume`."""

    def begin(self) -> float:
        """Return the clock's time at the beginning of a step."""
        if self.turns is not None:
            self.turns.take()
        return time.perf_counter()

    def end(self, began: float) -> float:
        """Return the seconds that a step took."""
        seconds = time.perf_counter() - began
        if self.turns is not None:
            self.turns.hand_on()
        return seconds


class OwnLoop(Loop):
    """A loop written in the script itself."""

    def __init__(self, model: nn.Module, batches: Sequence[Batch], folder: Path) -> None:
        super().__init__(model, batches, folder)
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), LEARNING_RATE)

    def train(self, first: int, save_at: int | None, save: Path, resume: Path | None) -> list[Step]:
        """Train batch after batch."""
        if resume is not None:
            self.load(resume)
        steps = []
        for number in range(first, len(self.batches)):
            if number == save_at:
                self.save(save)
            if dist.is_initialized():
                dist.barrier()
            steps.append(self.timed(number))
        return steps

    def timed(self, number: int) -> Step:
        """Run the step on the batch of a number, in its turn."""
        began = self.begin()
        loss = float(self.step(self.batches[number]).detach())
        return Step(loss, self.end(began))

    def step(self, batch: Batch) -> Tensor:
        """Run one optimizer step; return the loss."""
        return self.stepped(self.model(**batch).loss)

    def stepped(self, loss: Tensor) -> Tensor:
        """Run the backward pass of a loss and an optimizer step; return the loss."""
        self.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass."""
        loss.backward()  # type: ignore[no-untyped-call]

    def _inner(self) -> nn.Module:
        return self.model.module if isinstance(self.model, nn.parallel.DistributedDataParallel) else self.model

    def save(self, path: Path) -> None:
        """Write a checkpoint."""
        path.mkdir(parents=True, exist_ok=True)
        inner = self._inner()
        if not dist.is_initialized() or dist.get_rank() == 0:
            torch.save({"model": inner.state_dict(), "optimizer": self.optimizer.state_dict()}, path / "state.pt")
        if dist.is_initialized():
            dist.barrier()

    def load(self, path: Path) -> None:
        """Continue from a checkpoint."""
        inner = self._inner()
        state = torch.load(path / "state.pt", weights_only=True)
        inner.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


class DataParallel(OwnLoop):
    """`DistributedDataParallel`."""

    def __init__(self, model: nn.Module, batches: Sequence[Batch], folder: Path) -> None:
        dist.init_process_group("gloo")
        super().__init__(nn.parallel.DistributedDataParallel(model), batches, folder)


class FullyShard(OwnLoop):
    """FSDP2: `fully_shard` on every block and on the model."""

    def __init__(self, model: Any, batches: Sequence[Batch], folder: Path) -> None:
        from torch.distributed.fsdp import fully_shard

        dist.init_process_group("gloo")
        for block in blocks(model):
            fully_shard(block)
        super().__init__(fully_shard(model), batches, folder)

    def _state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model_state_dict": model, "optim_state_dict": optimizer}

    def save(self, path: Path) -> None:
        import torch.distributed.checkpoint as checkpoint

        checkpoint.save(self._state(), checkpoint_id=path)

    def load(self, path: Path) -> None:
        import torch.distributed.checkpoint as checkpoint
        from torch.distributed.checkpoint.state_dict import set_state_dict

        state = self._state()
        checkpoint.load(state, checkpoint_id=path)
        set_state_dict(self.model, self.optimizer, **state)


class LowRank(OwnLoop):
    """PEFT: LoRA adapters on the attention's projections."""

    def __init__(self, model: Any, batches: Sequence[Batch], folder: Path) -> None:
        targets = {"llama": ["q_proj", "v_proj"], "bert": ["query", "value"], "t5": ["q", "v"]}
        super().__init__(with_adapters(model, targets[model.config.model_type]), batches, folder)

    def save(self, path: Path) -> None:
        self.model.save_pretrained(path)
        torch.save(self.optimizer.state_dict(), path / "optimizer.pt")

    def load(self, path: Path) -> None:
        from peft import load_peft_weights, set_peft_model_state_dict

        set_peft_model_state_dict(self.model, load_peft_weights(str(path), device="cpu"))
        self.optimizer.load_state_dict(torch.load(path / "optimizer.pt", weights_only=True))


class Accelerated(OwnLoop):
    """Accelerate: `Accelerator.prepare`."""

    def __init__(self, model: nn.Module, batches: Sequence[Batch], folder: Path) -> None:
        from accelerate import Accelerator

        self.accelerator = Accelerator(cpu=True)
        super().__init__(model, batches, folder)
        self.model, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)

    def backward(self, loss: Tensor) -> None:
        self.accelerator.backward(loss)

    def save(self, path: Path) -> None:
        self.accelerator.save_state(str(path))

    def load(self, path: Path) -> None:
        self.accelerator.load_state(str(path))


class Zero(OwnLoop):
    """DeepSpeed's ZeRO at one stage: 1 shards the optimizer's state, 2 gradients as well, 3 weights as well.

    offload: the parts of its state that are in the host's memory.
    """

    def __init__(
        self, model: nn.Module, batches: Sequence[Batch], folder: Path, stage: int, offload: tuple[str, ...] = ()
    ) -> None:
        import deepspeed

        deepspeed.init_distributed("gloo", verbose=False)
        config = {
            "train_micro_batch_size_per_gpu": batches[0]["input_ids"].shape[0],
            "zero_optimization": {"stage": stage, **{part: {"device": "cpu"} for part in offload}},
            "zero_force_ds_cpu_optimizer": False,  # DeepSpeed's own optimizer would have to be built
            "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "torch_adam": True}},
            "gradient_clipping": 0.0,  # the default is 1.0
            "steps_per_print": 10**9,
        }
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        Loop.__init__(self, engine, batches, folder)

    def stepped(self, loss: Tensor) -> Tensor:
        self.model.backward(loss)
        self.model.step()
        return loss

    def save(self, path: Path) -> None:
        self.model.save_checkpoint(str(path), tag="bench")

    def load(self, path: Path) -> None:
        self.model.load_checkpoint(str(path), tag="bench")


class Trainer(Loop):
    """Hugging Face Trainer."""

    def train(self, first: int, save_at: int | None, save: Path, resume: Path | None) -> list[Step]:
        """Train with a new Trainer for every run, as a restarted script has."""
        trainer = self._trainer(save, save_at or len(self.batches) + 1)
        steps: list[Step] = []
        trainer.add_callback(_recorder(self, steps))
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume / f"checkpoint-{first}"))
        return steps

    def arguments(self, save: Path, save_steps: int) -> dict[str, Any]:
        """Return the arguments of its TrainingArguments."""
        return {
            "output_dir": str(save),
            "per_device_train_batch_size": 1,  # batches come collated
            "max_steps": len(self.batches),
            "learning_rate": LEARNING_RATE,
            "logging_steps": 1,
            "logging_nan_inf_filter": False,
            "save_steps": save_steps,
            "report_to": [],
            "use_cpu": True,
            "disable_tqdm": True,
            "remove_unused_columns": False,
            "ddp_backend": "gloo",
            "train_sampling_strategy": "sequential",
            "dataloader_pin_memory": False,
        }

    def _trainer(self, save: Path, save_steps: int) -> Any:
        from transformers import Trainer as HfTrainer
        from transformers import TrainingArguments

        arguments = TrainingArguments(**self.arguments(save, save_steps))
        return HfTrainer(self.model, arguments, _only, train_dataset=self._dataset())

    def _dataset(self) -> list[Batch]:
        """Return the batches of all ranks, in the order in which the Trainer distributes them."""
        ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
        dealt: list[Batch] = [{}] * (len(self.batches) * ranks)
        dealt[rank::ranks] = self.batches
        return dealt


class SupervisedTrainer(Trainer):
    """TRL's SFTTrainer."""

    def _trainer(self, save: Path, save_steps: int) -> Any:
        from datasets import Dataset
        from trl import SFTConfig, SFTTrainer

        dataset = self._dataset()
        settings = self.arguments(save, save_steps) | {"dataset_kwargs": {"skip_prepare_dataset": True}, "bf16": False}
        return SFTTrainer(
            self.model,
            SFTConfig(**settings),
            lambda rows: dataset[rows[0]["number"]],
            train_dataset=Dataset.from_dict({"number": list(range(len(dataset)))}),
            processing_class=tokenizer_of_ids(),
        )


class Lightning(Loop):
    """Lightning: a LightningModule around the model, data-parallel if there are several ranks."""

    def train(self, first: int, save_at: int | None, save: Path, resume: Path | None) -> list[Step]:
        """Train with a new Trainer for every run."""
        import lightning

        steps: list[Step] = []
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=ranks,
            strategy="ddp" if ranks > 1 else "auto",
            max_steps=len(self.batches),
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            default_root_dir=self.folder,
            callbacks=[_lightning_recorder(self, steps, save_at, save)],
        )
        loader: Any = torch.utils.data.DataLoader(list(self.batches), batch_size=1, collate_fn=_only)  # type: ignore[arg-type]
        path = None if resume is None else str(resume / "state.ckpt")
        trainer.fit(_lightning_module(self.model), loader, ckpt_path=path, weights_only=False)
        return steps[-(len(self.batches) - first) :]


def with_adapters(model: Any, layers: str | list[str], **given: Any) -> Any:
    """Return a model with PEFT's LoRA adapters on layers of these names, equal in every process."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    return get_peft_model(model, LoraConfig(r=8, lora_dropout=0.0, target_modules=layers, **given))


def tokenizer_of_ids() -> Any:
    """Return a tokenizer for packages that ask for one, though batches hold ids already."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


def _only(batches: list[Batch]) -> Batch:
    return batches[0]


def _recorder(loop: Loop, steps: list[Step]) -> Any:
    from transformers import TrainerCallback

    class Recorder(TrainerCallback):
        began = 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.began = loop.begin()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            steps.append(Step(float("nan"), loop.end(self.began)))

        def on_log(self, *_: Any, logs: Any = None, **__: Any) -> None:
            if "loss" in logs:
                steps[-1] = Step(float(logs["loss"]), steps[-1].seconds)

    return Recorder()


def _lightning_module(model: nn.Module) -> Any:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Batch, index: int) -> Tensor:
            loss = self.model(**batch).loss
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), LEARNING_RATE)

    return Module()


def _lightning_recorder(loop: Loop, steps: list[Step], save_at: int | None, save: Path) -> Any:
    import lightning

    class Recorder(lightning.Callback):
        began = 0.0

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
            if trainer.global_step == save_at:
                trainer.save_checkpoint(save / "state.ckpt")
            self.began = loop.begin()

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
            steps.append(Step(float(outputs["loss"]), loop.end(self.began)))

    return Recorder()
