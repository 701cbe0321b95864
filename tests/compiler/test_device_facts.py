"""A batch that a device alone knows: what the kernel finds is what torch's operators find, to the same reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from deepytorch.compiler.step import batch_facts, device_facts
from deepytorch.compiler.step.batch_facts import Facts, Indices, Refusal, read_facts
from deepytorch.compiler.step.device_facts import OnDevice
from deepytorch.passes.ops import pack_facts as kernel
from deepytorch.passes.unpad.program import (
    Assumption,
    IndexInput,
    IndexSet,
    LossFacts,
    PickFacts,
    Program,
    SpaceFacts,
)
from tests.device_stand_in import patch_reads

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")


@triton.jit
def _count(found, n):
    for _ in range(n):
        tl.store(found, tl.load(found) + 1)


@pytest.fixture(autouse=True, scope="module")
def _loops_run() -> None:
    found = torch.zeros(1, dtype=torch.int64)
    try:
        _count[(1,)](found, 3)
    except Exception as error:  # Triton 3.6's interpreter with NumPy 2.4
        if "only 0-dimensional arrays" not in str(error):
            raise
        pytest.skip("this interpreter of Triton cannot read the bounds of a loop with this NumPy")
    assert found.item() == 3


TOKENS, NARROWED, LABELS = IndexSet(0), IndexSet(0, offset=1, cut=1), IndexSet(0, loss=0)
INDICES = (
    *(IndexInput("flat", each) for each in (TOKENS, NARROWED, LABELS)),
    *(IndexInput("rank", each, TOKENS) for each in (NARROWED, LABELS)),
    IndexInput("rank", LABELS, NARROWED),
    IndexInput("cu_seqlens", TOKENS),
    IndexInput("longest", TOKENS),
)
PICKED = IndexInput("picked", TOKENS, pick=0)
OF_A_DECODER = (
    *(IndexInput(kind, IndexSet(1)) for kind in ("flat", "cu_seqlens", "longest")),
    IndexInput("rank", IndexSet(1, loss=0), IndexSet(1)),
)


class _Given(torch.nn.Module):
    def forward(self, mask: Any, labels: Any) -> Any:
        return mask, labels


def program(indices: tuple[IndexInput, ...] = INDICES, reading: str = "nonzero", **changes: Any) -> Program:
    """Of a region that takes a mask and labels; one loss, of the tokens from the second position on."""
    given: dict[str, Any] = {
        "spaces": (SpaceFacts("tokens", 0, reading, prefix=True, contiguous=True),),
        "losses": (LossFacts(0, 1, -100, 1, 1),),
        "picks": (),
        "assumptions": (),
        "sizes": ((0, 0, 1),),
    }
    return Program(
        fx.symbolic_trace(_Given()), (0, 1), indices=indices, outputs=(), epilogues=(), **{**given, **changes}
    )


def batch(rows: int = 4, positions: int = 19, side: str = "right") -> list[torch.Tensor]:
    lengths = torch.randint(2, positions + 1, (rows, 1))
    columns = torch.arange(positions)
    mask = (columns < lengths if side == "right" else columns >= positions - lengths).long()
    labels = torch.where(torch.rand(rows, positions - 1) < 0.5, 5, -100)
    return [mask, labels.masked_fill(mask[:, 1:] == 0, -100)]


def read(given: Program, inputs: list[torch.Tensor]) -> tuple[Facts | Refusal, dict[IndexInput, torch.Tensor]]:
    found = read_facts(given, inputs)
    if isinstance(found, Refusal):
        return found, {}
    indices = Indices(found)
    return found, {index: indices.get(index) for index in given.indices}


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Tensors on the CPU are taken for a device's, whose kernels run in the interpreter; the masks of its launches."""
    patch_reads(monkeypatch, lambda tensor: True)
    monkeypatch.setattr(kernel, "_has_kernels", lambda device: True)
    found: list[torch.Tensor] = []

    def launched(mask: torch.Tensor, *rest: Any) -> Any:
        found.append(mask)
        return kernel.pack_facts(mask, *rest)

    monkeypatch.setattr(device_facts, "pack_facts", launched)
    return found


def both(
    make: Any, inputs: list[torch.Tensor], launches: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> Facts | Refusal:
    """What is found with the kernel, which is what is found without."""
    found, indices = read(make(), inputs)
    assert launches
    with monkeypatch.context() as patch:
        patch.setattr(batch_facts, "pack_on_device", lambda *_: None)
        expected, others = read(make(), inputs)
    assert type(found) is type(expected)
    if isinstance(expected, Refusal):
        assert found == expected
        return expected
    assert isinstance(found, Facts)
    assert isinstance(found.packed, OnDevice)
    assert expected.packed is None
    for name in ("sizes", "lengths", "labels", "device", "narrowed", "waited"):
        assert getattr(found, name) == getattr(expected, name), name
    for name in ("masks", "labelled", "picks"):
        assert all(map(torch.equal, getattr(found, name), getattr(expected, name))), name
    for index, other in others.items():
        assert indices[index].dtype == other.dtype, index
        assert torch.equal(indices[index], other), index
    return found


@pytest.mark.parametrize("side", ["right", "left"])
def test_a_decoders_batch(launches: Any, monkeypatch: Any, side: str) -> None:
    torch.manual_seed(0)
    loose = (SpaceFacts("tokens", 0, "nonzero", contiguous=True),)
    picks = (PickFacts(0, 0 if side == "right" else -1, None),)
    found = both(
        lambda: program((*INDICES, PICKED), spaces=loose, picks=picks), batch(side=side), launches, monkeypatch
    )
    assert isinstance(found, Facts)
    assert len(launches) == 1


def test_a_mask_of_other_shape_and_meaning(launches: Any, monkeypatch: Any) -> None:
    torch.manual_seed(1)
    mask, labels = batch()
    additive = ((1.0 - mask) * -1e9).to(torch.bfloat16)[:, None, None]
    changes = {"reading": "not negative", "sizes": ((1, 0, 1),)}
    changes["sizes"] = ((0, 0, 3),)
    assert isinstance(both(lambda: program(**changes), [additive, labels], launches, monkeypatch), Facts)


def test_two_spaces_of_which_labels_trim_one(launches: Any, monkeypatch: Any) -> None:
    torch.manual_seed(2)
    spaces = (SpaceFacts("encoder", 0, "nonzero"), SpaceFacts("decoder", None, None, trimmed_by=(0,)))
    losses = (LossFacts(1, 1, -100, 0, 0),)
    changes = {"spaces": spaces, "losses": losses, "sizes": ((0, 0, 1), (1, 0, 1))}
    mask, labels = batch()[0], torch.where(batch(4, 12)[0] == 1, 7, -100)
    indices = (INDICES[0], INDICES[1], *OF_A_DECODER)
    assert isinstance(both(lambda: program(indices, **changes), [mask, labels], launches, monkeypatch), Facts)
    assert len(launches) == 2


def test_without_a_loss(launches: Any, monkeypatch: Any) -> None:
    torch.manual_seed(3)
    indices = (INDICES[0], INDICES[6])
    assert isinstance(both(lambda: program(indices, losses=()), batch(), launches, monkeypatch), Facts)


REASONS = {
    "a label at a padded position is not ignored": lambda mask, labels: labels[1].fill_(3),
    "tokens after pads under a causal attention without a key mask": lambda mask, labels: mask[1, 0].fill_(0),
    "a row without a token": lambda mask, labels: (mask[2].fill_(0), labels[2].fill_(-100)),
    "fewer than two tokens or labels": lambda mask, labels: labels.fill_(-100),
    "a mask holds numbers besides 0 and 1": lambda mask, labels: mask[0, 0].fill_(2),
}


@pytest.mark.parametrize("reason", REASONS)
def test_batches_are_refused_for_the_same_reason(launches: Any, monkeypatch: Any, reason: str) -> None:
    torch.manual_seed(4)
    inputs = batch()
    inputs[0][1, 5:] = 0
    inputs[1][1, 4:] = -100
    REASONS[reason](*inputs)
    refused = both(lambda: program(assumptions=(Assumption("binary", 0),)), inputs, launches, monkeypatch)
    assert refused == Refusal(reason)


def test_holes_are_refused_under_a_window(launches: Any, monkeypatch: Any) -> None:
    torch.manual_seed(5)
    inputs = batch()
    inputs[0][:, :6] = torch.tensor([1, 1, 0, 1, 1, 1])
    inputs[1][:, 1] = -100
    spaces = (SpaceFacts("tokens", 0, "nonzero", contiguous=True),)
    refused = both(lambda: program(spaces=spaces), inputs, launches, monkeypatch)
    assert refused == Refusal("holes between the tokens of a row under a sliding window")


def test_where_the_kernel_fails_torch_reads_the_batch(
    launches: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> Any:
        launches.append(torch.empty(0))
        raise RuntimeError("no compiler")

    monkeypatch.setattr(device_facts, "_FAILURE", device_facts._Failure())
    monkeypatch.setattr(device_facts, "pack_facts", broken)
    for _ in range(2):
        found, _ = read(program(), batch())
        assert isinstance(found, Facts)
        assert found.packed is None
    assert len(launches) == 1  # it is not tried again


def test_batches_on_the_host_are_not_packed_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_facts, "pack_on_device", lambda *_: pytest.fail("a launch for a batch on the host"))
    found, _ = read(program(), batch())
    assert isinstance(found, Facts)
    assert not found.waited
