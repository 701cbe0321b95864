"""The kernel of masks and labels against plain torch, bit for bit: in Triton's interpreter, on a GPU; machine code."""

from __future__ import annotations

import pytest
import torch

from deepytorch.passes.ops import pack_facts as facts
from deepytorch.passes.ops.pack_facts import LABELS, READINGS, TOKENS, Packing, Target, takes
from deepytorch.passes.ops.reference import pack_facts_reference
from deepytorch.passes.unpad import masks
from tests.passes.machine_code import troubles_of

pytest.importorskip("triton")
from deepytorch.passes.ops import pack_facts_triton as kernels
from deepytorch.passes.ops import pack_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IGNORED = -100
SIZES = [(1, 1), (5, 1), (2, 16), (3, 33), (19, 7)]


def grids(rows: int, positions: int) -> dict[str, torch.Tensor]:
    """Masks of every kind that batches have."""
    lengths = torch.randint(0, positions + 1, (rows, 1))
    lengths[-1] = positions
    columns = torch.arange(positions)
    one = torch.zeros(rows, positions, dtype=torch.bool)
    one[rows // 2, positions // 2] = True
    return {
        "right": columns < lengths,
        "left": columns >= positions - lengths,
        "holes": torch.rand(rows, positions) < 0.6,
        "all real": torch.ones(rows, positions, dtype=torch.bool),
        "empty": torch.zeros(rows, positions, dtype=torch.bool),
        "one token": one,
    }


def check(found: Packing, expected: Packing, case: str = "") -> None:
    tokens, labels = (int(expected.counts[each].sum()) for each in (TOKENS, LABELS))
    lengths = {"flat": tokens, "labelled_flat": labels, "labelled_ranks": labels}
    for name in Packing.__slots__:
        one, other = getattr(found, name), getattr(expected, name)
        if other is None:
            assert one is None
            continue
        one = one[: lengths[name]].cpu() if name in lengths else one.cpu()
        assert one.dtype == other.dtype, (case, name)
        assert torch.equal(one, other), (case, name)


def launched(mask: torch.Tensor, reading: str, target: Target | None) -> Packing:
    target = None if target is None else Target(target.values.to(DEVICE), target.ignore_index, target.offset)
    return kernels.launch(mask.to(DEVICE), READINGS.index(reading), target, 16)


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("launches", [1, 2])
def test_masks_of_every_kind_give_the_references_indices(size, launches, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(kernels, "_ONE_LAUNCH", 1 << 20 if launches == 1 else 0)
    for name, mask in grids(*size).items():
        values = torch.where(torch.rand(size) < 0.4, IGNORED, 7)
        check(launched(mask, "nonzero", Target(values, IGNORED)), pack_facts_reference(mask, values != IGNORED), name)


@pytest.mark.slow
@pytest.mark.parametrize(("offset", "cut"), [(0, 1), (1, 1), (1, 3), (0, 5)])
def test_labels_stand_where_their_loss_puts_them(offset, cut):
    torch.manual_seed(1)
    mask = torch.rand(4, 37) < 0.7
    values = torch.where(torch.rand(4, 37 - cut) < 0.4, 3, 7).int()
    labelled = torch.zeros(4, 37, dtype=torch.bool)
    labelled[:, offset : offset + 37 - cut] = values != 3
    check(launched(mask, "nonzero", Target(values, 3, offset)), pack_facts_reference(mask, labelled))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", sorted(facts._MASK_DTYPES, key=str), ids=str)
@pytest.mark.parametrize("reading", READINGS)
def test_every_dtype_is_read_as_torch_reads_it(dtype, reading):
    values = torch.tensor([0.0, 1.0, 2.0, 3e-7, 255.0, 0.0, 1.0, 0.0, 5.0, 0.0, 1.0, 1.0] * 3).view(2, 18)
    if dtype.is_signed:
        values[:, ::4] *= -1
    if dtype.is_floating_point:
        values[0, 3:6] = torch.tensor([torch.nan, -torch.inf, torch.finfo(dtype).min])
        values[1, 3] = torch.finfo(dtype).smallest_normal
    mask = values.to(dtype)
    check(launched(mask, reading, None), pack_facts_reference(masks.READINGS[reading](mask), None, mask))


@pytest.mark.slow
def test_grids_of_any_strides_are_read():
    torch.manual_seed(2)
    wide, ids = torch.rand(5, 3, 40) < 0.5, torch.randint(-3, 3, (41, 5))
    for mask in (wide[:, 1], wide[:, 1, ::2], wide[:, 1].t().contiguous().t(), wide[:1, 1].expand(5, 40)):
        target = Target(ids.t()[:, 1 : mask.shape[1]], -1)
        labelled = torch.zeros_like(mask)
        labelled[:, :-1] = target.values != -1
        check(launched(mask, "nonzero", target), pack_facts_reference(mask, labelled))


def test_readings_are_those_of_masks():
    assert set(READINGS) == set(masks.READINGS)


@pytest.mark.parametrize(
    ("mask", "reading", "target"),
    [
        (torch.ones(2, 3, 4), "nonzero", None),
        (torch.ones(0, 3), "nonzero", None),
        (torch.ones(2, 3, dtype=torch.complex64), "nonzero", None),
        (torch.ones(2, 3), "some other", None),
        (torch.ones(2, 3), "nonzero", Target(torch.ones(2, 3), -100)),
        (torch.ones(2, 3), "nonzero", Target(torch.ones(2, 4).long(), -100)),
        (torch.ones(2, 3), "nonzero", Target(torch.ones(2, 2).long(), -100, 2)),
        (torch.ones(2, 3), "nonzero", Target(torch.ones(1, 3).long(), -100)),
        (torch.ones(2, 3), "nonzero", Target(torch.ones(6).long(), -100)),
        (torch.ones(2, 3), "nonzero", Target(torch.ones(2, 3).int(), 1 << 40)),
    ],
)
def test_what_it_was_not_made_for_is_left_to_torch(monkeypatch, mask, reading, target):
    assert not takes(torch.ones(2, 3), "nonzero")  # no kernels on a CPU
    monkeypatch.setattr(facts, "_has_kernels", lambda device: True)
    assert takes(torch.ones(2, 3), "nonzero", Target(torch.ones(2, 2).long(), -100, 1))
    assert not takes(mask, reading, target)


@pytest.mark.slow
def test_kernels_compile_for_every_gpu_without_spills():
    found = troubles_of(kernels.__name__, pack_triton.__name__)
    assert len(found) == 3 * (len(kernels.VARIANTS) + len(pack_triton.VARIANTS))
    assert {name: each for name, each in found.items() if each} == {}
