"""How often a training step waits for the device: never where its batch is known on the host, once elsewhere."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from deepytorch.compiler.host_copies import host_copy, remember, remembering
from deepytorch.compiler.report import LEDGER
from tests.compiler.parity import OPTIONS, Batch, batches, causal_batch, loss_of, masked_lm_batch
from tests.compiler.plain_models import Plain, sdpa_bool
from tests.device_stand_in import StandIn, counted, device

hf = pytest.importorskip("transformers")

__all__ = ["device"]  # a fixture
SIZES = [(4, 11, "right"), (3, 13, "right"), (4, 9, "right"), (3, 12, "right"), (4, 14, "right")]
WARM = 3  # steps, in which everything is compiled
Move = Callable[[Batch], Batch]


def llama() -> nn.Module:
    config = hf.LlamaConfig(
        attn_implementation="sdpa", hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=96,
    )  # fmt: skip
    return hf.LlamaForCausalLM(config).train()


def plain() -> nn.Module:
    return Plain(sdpa_bool, layers=1).train()


MODELS = [(llama, causal_batch), pytest.param(plain, masked_lm_batch, marks=pytest.mark.slow)]


class Trained:
    """A model on the device, compiled, and its twin in eager, trained side by side."""

    def __init__(self, model: nn.Module, device: StandIn) -> None:
        LEDGER.forget()
        self.steps = 0
        self.model, self.reference, self.device = model, copy.deepcopy(model), device
        for each in (*model.parameters(), *model.buffers()):
            device.mark(each.data)
        self.compiled = torch.compile(model, backend="deepytorch", options=OPTIONS)
        # not Adam: it makes steps of the rounding in a key bias, whose gradient is zero
        self.optimizers = [torch.optim.SGD(each.parameters(), 0.05, momentum=0.9) for each in (model, self.reference)]

    def step(self, batch: Batch) -> list[str]:
        """Train a step; where from the host has waited for the device in it, but for steps in which is compiled."""
        self.steps += 1
        with counted(self.device) if self.steps > WARM else contextlib.nullcontext():
            loss = loss_of(self.compiled(**batch))
            loss.backward()
            self.optimizers[0].step()
            self.optimizers[0].zero_grad()
            found = list(self.device.found)
        expected = loss_of(self.reference(**batch))
        expected.backward()
        self.optimizers[1].step()
        self.optimizers[1].zero_grad()
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
        for one, other in zip(self.model.parameters(), self.reference.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        return found


def known(device: StandIn) -> Move:
    return remembering(device.move)


def train(trained: Trained, given: Iterable[Batch], expected: int) -> None:
    waits = [trained.step(batch) for batch in given]
    for found in waits[WARM:]:
        assert len(found) <= expected, "\n\n".join(found)
    steps = LEDGER.report()
    assert steps.total("steps_packed") >= len(waits) - 1
    assert steps.total("steps_padded") == 0


@pytest.fixture(autouse=True)
def _enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches are remembered; optimizers arm nothing, so that the reference is eager's."""
    monkeypatch.setattr("deepytorch.compiler.host_copies.SWITCH", SimpleNamespace(enabled=True))


@pytest.mark.parametrize(("build", "make"), MODELS)
def test_a_plain_loop_waits_once_a_step(
    device: StandIn, build: Callable[[], nn.Module], make: Callable[..., Batch]
) -> None:
    trained = Trained(build(), device)
    train(trained, (device.move(batch) for batch in batches(make, *SIZES)), 1)
    assert LEDGER.report().total("steps_read_back") == len(SIZES) - WARM  # the device is not there before


@pytest.mark.parametrize(("build", "make"), MODELS)
def test_a_batch_that_is_known_on_the_host_is_not_waited_for(
    device: StandIn, build: Callable[[], nn.Module], make: Callable[..., Batch]
) -> None:
    trained = Trained(build(), device)
    train(trained, map(known(device), batches(make, *SIZES)), 0)
    assert LEDGER.report().total("steps_read_back") == 0


def test_prefetched_batches_are_not_waited_for(device: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    from deepytorch import loading

    monkeypatch.setattr(loading, "_copied", lambda tensor, _: device.move(tensor))
    trained = Trained(llama(), device)
    train(trained, loading.prefetch(batches(causal_batch, *SIZES), "meta"), 0)


@pytest.mark.slow
def test_accelerates_batches_are_not_waited_for(device: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("accelerate")
    from accelerate import Accelerator, data_loader

    monkeypatch.setattr(data_loader, "send_to_device", remembering(lambda batch, *_, **__: device.move(batch)))
    loader = Accelerator(cpu=True).prepare(torch.utils.data.DataLoader(batches(causal_batch, *SIZES), batch_size=None))
    train(Trained(llama(), device), loader, 0)


class Watching(hf.TrainerCallback):
    """Counts what each step of a Trainer waits for."""

    def __init__(self, device: StandIn) -> None:
        self.device, self.steps = device, [[]]

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.steps.append([])
        self.steps[-2] += self.device.found
        self.device.found.clear()


def test_the_trainers_batches_are_not_waited_for(
    device: StandIn, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    pytest.importorskip("accelerate")
    from accelerate import data_loader

    LEDGER.forget()
    monkeypatch.setattr(data_loader, "send_to_device", remembering(lambda batch, *_, **__: device.move(batch)))
    model, watching = llama(), Watching(device)
    for each in (*model.parameters(), *model.buffers()):
        device.mark(each.data)
    rows = [{name: each[0] for name, each in batch.items()} for batch in batches(causal_batch, *[(1, 8, "none")] * 24)]
    arguments = hf.TrainingArguments(
        str(tmp_path), per_device_train_batch_size=4, max_steps=6, logging_strategy="no", save_strategy="no",
        report_to=[], use_cpu=True, logging_nan_inf_filter=False, disable_tqdm=True,
    )  # fmt: skip
    model.compile(backend="deepytorch", options=OPTIONS)
    trainer = hf.Trainer(model, arguments, train_dataset=rows, data_collator=_padded, callbacks=[watching])
    with counted(device):
        trainer.train()
    steps = watching.steps[:6]
    for found in steps[WARM:]:
        ours = [each for each in found if "/compiler/" in each or "/passes/" in each or "sparse_rows" in each]
        assert ours == []
    assert LEDGER.report().total("steps_packed") >= 4
    assert LEDGER.report().total("steps_read_back") == 0


def _padded(rows: list[Batch]) -> Batch:
    """Rows cut to lengths of 8, 7, 6, ... and padded."""
    made = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    for number in range(1, len(rows)):
        made["attention_mask"][number, -number - 1 :] = 0
        made["labels"][number, -number - 1 :] = -100
    return made


# ---------------------------------------------------------------------- what is known of a tensor, and for how long


def moved(device: StandIn) -> tuple[Batch, Batch]:
    [batch] = batches(causal_batch, (4, 11, "right"))
    return known(device)(batch), batch


def test_a_write_to_what_was_moved_ends_it(device: StandIn) -> None:
    there, _ = moved(device)
    assert host_copy(there["labels"]) is not None
    there["labels"][0, 0] = 3
    assert host_copy(there["labels"]) is None
    there["attention_mask"][:, :2].zero_()  # through a view
    assert host_copy(there["attention_mask"]) is None
    assert host_copy(there["input_ids"]) is not None


def test_a_write_to_the_origin_does_not_reach_it(device: StandIn) -> None:
    """A loader fills the same memory again, through numpy too."""
    there, batch = moved(device)
    batch["labels"].numpy()[:] = 5
    batch["attention_mask"].zero_()
    for name in ("labels", "attention_mask"):
        held = host_copy(there[name])
        assert held is not None
        assert torch.equal(held, there[name])


def test_nothing_is_known_of_parts_and_copies(device: StandIn) -> None:
    there, _ = moved(device)
    labels = there["labels"]
    assert all(host_copy(each) is None for each in (labels[:2], labels[:], labels.clone(), labels.view(-1)))


def test_what_is_gone_is_forgotten(device: StandIn) -> None:
    from deepytorch.compiler import host_copies

    there, _ = moved(device)
    names = [id(each) for each in there.values()]
    assert all(name in host_copies.KNOWN for name in names)
    del there
    assert not any(name in host_copies.KNOWN for name in names)


def test_other_shapes_and_dtypes_are_not_taken() -> None:
    origin = torch.arange(6)
    for other in (origin.float(), origin.view(2, 3).clone(), origin):
        remember(other, origin)
        assert host_copy(other) is None


def test_batches_that_are_changed_on_the_device_train_as_in_eager(device: StandIn) -> None:
    """Labels and masks written in place after the move: what is read is what is there."""
    trained = Trained(plain(), device)

    def changed() -> Iterator[Batch]:
        for number, batch in enumerate(map(known(device), batches(masked_lm_batch, *SIZES))):
            if number % 2:
                batch["labels"][1, :2] = -100
                batch["attention_mask"][1, -1] = 0
                batch["labels"][1, -1] = -100
            yield batch

    for number, batch in enumerate(changed()):
        found = trained.step(batch)
        assert number < WARM or len(found) <= number % 2, found


def test_labels_at_pads_are_seen_on_the_host(device: StandIn) -> None:
    trained = Trained(plain(), device)
    given = batches(masked_lm_batch, *SIZES[:3])
    given[1]["labels"] = given[1]["input_ids"].clone()
    for batch in map(known(device), given):
        trained.step(batch)
    [region] = LEDGER.report().regions
    assert region.padded_because == {"a label at a padded position is not ignored": 1}
