"""The kernels against the plain form: in Triton's interpreter, as machine code, and on a device where there is one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepytorch.passes.ops.linear_cross_entropy import linear_cross_entropy
from deepytorch.passes.ops.linear_cross_entropy_chunked import NONE, Call, LossRule, gradient_dtype
from deepytorch.passes.ops.reference import linear_cross_entropy_reference

pytest.importorskip("triton")

from deepytorch.passes.ops import linear_cross_entropy_triton as kernels
from deepytorch.passes.ops.linear_cross_entropy_kernels import VARIANTS
from tests.passes.machine_code import troubles_of

pytestmark = pytest.mark.slow

LIBRARY = kernels.Setting(16, 1, None)
TILES = kernels.Setting(16, 1, kernels.Tile(16, 16, 16, 1, 1))
SETTINGS = pytest.mark.parametrize("setting", [LIBRARY, TILES], ids=["library", "tiles"])
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="on a machine with a GPU kernels are compiled")


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr(kernels, "_PIECE_CLASSES", 16)  # of a block each, the last one smaller
        monkeypatch.setattr(kernels, "_SCRATCH_BYTES", 0)  # 16 rows, or 64 classes


def make(tokens: int, size: int, classes: int, dtype: torch.dtype, device: str = "cpu") -> list[torch.Tensor]:
    hidden, weight, bias = (torch.randn(*shape) for shape in ((tokens, size), (classes, size), (classes,)))
    given = [each.to(dtype) for each in (hidden, weight / size**0.5, bias)]
    return [each.to(device) for each in (*given, torch.randint(0, classes, (tokens,)))]


def expected(given: list[Any], class_weight: Any, rule: LossRule, upstream: torch.Tensor) -> tuple[Any, Any]:
    """(loss, gradients) in float64."""
    leaves = [None if each is None else each.detach().double().requires_grad_() for each in given[:3]]
    weighed = None if class_weight is None else class_weight.double()
    loss = linear_cross_entropy_reference(*leaves, given[3], weighed, rule)
    present = [each for each in leaves if each is not None]
    return loss.detach(), torch.autograd.grad(loss, present, upstream.double().expand_as(loss))


def found(
    given: list[Any], class_weight: Any, rule: LossRule, upstream: torch.Tensor, setting: Any
) -> tuple[Any, list[torch.Tensor]]:
    wants = [each is not None for each in given[:3]]
    call = Call(*given, class_weight, rule)
    loss, made, logsumexp = kernels.forward(call, wants, setting)
    if rule.reduction == NONE:
        assert logsumexp.shape == loss.shape
        made = kernels.backward(call, upstream, logsumexp, wants, setting)
    else:
        made = [each * upstream for each in made]
    dtype = gradient_dtype(given[0].dtype)
    assert all(each.dtype == dtype for each in made)
    return loss, [each for each, wanted in zip(made, wants, strict=True) if wanted]


def check(given: list[Any], rule: LossRule, setting: Any, class_weight: Any = None) -> None:
    rule = rule._replace(upcast=True)
    upstream = torch.linspace(0.5, 1.5, given[0].size(0)) if rule.reduction == NONE else torch.tensor(1.5)
    upstream = upstream.to(given[0].device)
    wanted, right = expected(given, class_weight, rule, upstream)
    loss, gradients = found(given, class_weight, rule, upstream, setting)
    tolerance = TOLERANCES[given[0].dtype]
    torch.testing.assert_close(loss.double(), wanted, rtol=tolerance, atol=tolerance, equal_nan=True)
    for one, other in zip(gradients, right, strict=True):
        assert one.shape == other.shape
        assert one.isfinite().all()
        distance = (one.double() - other).norm()
        assert distance <= tolerance * other.nan_to_num().norm() + 1e-7


@interpreted
@SETTINGS
@pytest.mark.parametrize("reduction", [0, 1, 2], ids=["none", "mean", "sum"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"label_smoothing": 0.2},
        {"softcap": 3.0},
        {"z_loss": 0.05},
        {"ignore_index": 5},
        {"label_smoothing": 0.1, "softcap": 2.0, "z_loss": 0.02},
    ],
    ids=str,
)
def test_every_option(setting, reduction, options):
    given = make(7, 9, 37, torch.float32)
    given[3][::3] = options.get("ignore_index", -100)
    check(given, LossRule(reduction, **options), setting)


@interpreted
@SETTINGS
@pytest.mark.parametrize("reduction", [0, 1])
@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
def test_every_dtype(setting, dtype, reduction):
    if setting is TILES and dtype == torch.float32:
        pytest.skip("in float32 the library's products alone are taken")
    given = make(9, 12, 37, dtype)
    given[3][4:7] = -100
    check(given, LossRule(reduction, z_loss=0.01), setting)
    check([*given[:2], None, given[3]], LossRule(reduction), setting)


@interpreted
@SETTINGS
@pytest.mark.parametrize(
    ("tokens", "size", "classes"), [(1, 1, 2), (1, 8, 48), (11, 3, 16), (17, 16, 17), (3, 5, 1), (0, 4, 9)]
)
@pytest.mark.parametrize("reduction", [0, 1])
def test_every_size(setting, tokens, size, classes, reduction):
    check(make(tokens, size, classes, torch.float32), LossRule(reduction), setting)


@interpreted
@SETTINGS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_more_rows_than_the_gradient_of_the_weight_has_room_for(setting, dtype):
    given = make(23, 8, 33, dtype)  # 8 places a class: 3 chunks, or 2 where places are twice as long
    given[3][:9] = -100
    check(given, LossRule(), setting)


@interpreted
@SETTINGS
@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("ignored", [slice(None), slice(0, 3), slice(-3, None), slice(1, None)], ids=str)
def test_ignored_rows(setting, reduction, ignored):
    given = make(7, 6, 20, torch.float32)
    given[0][ignored] = 1e4
    given[3][ignored] = -100
    check(given, LossRule(reduction), setting)
    check(given, LossRule(reduction, z_loss=0.1), setting)


@interpreted
@SETTINGS
@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_classes_that_count_differently(setting, reduction):
    given, class_weight = make(11, 6, 20, torch.float32), torch.rand(20)
    given[3][2:4] = -100
    check(given, LossRule(reduction, z_loss=0.1), setting, class_weight)
    check(given, LossRule(reduction), setting, class_weight)


@interpreted
@SETTINGS
@pytest.mark.parametrize("wants", [(True, False, False), (False, True, False), (False, False, True), (False,) * 3])
def test_only_what_is_asked_for_is_made(setting, wants):
    given = make(19, 6, 37, torch.float32)
    given[3][2:4] = -100
    _, right = expected(given, None, LossRule(), torch.tensor(1.0))
    loss, made, _ = kernels.forward(Call(*given, None, LossRule()), wants, setting)
    torch.testing.assert_close(loss, linear_cross_entropy_reference(*given, None, LossRule()))
    for one, other, wanted in zip(made, right, wants, strict=True):
        assert one.numel() == (other.numel() if wanted else 0)
        if wanted:
            torch.testing.assert_close(one.double(), other, rtol=2e-5, atol=2e-6)


@interpreted
@SETTINGS
def test_logits_far_apart_lose_nothing(setting):
    hidden, weight, bias, target = make(7, 6, 20, torch.float32)
    check([hidden * 300, weight, bias, target], LossRule(), setting)


@interpreted
def test_rows_and_weights_that_are_not_contiguous():
    hidden, weight, bias, target = make(7, 6, 20, torch.float32)
    check([hidden.t().contiguous().t(), weight.t().contiguous().t(), bias, target], LossRule(), LIBRARY)


def test_float16_gradients_are_scaled_before_they_are_rounded():
    """Rows count 1e-5 each, so that gradients made in float16 for a loss's gradient of 1 would be zeros."""
    given = make(13, 24, 53, torch.float16)
    leaves = [each.clone().requires_grad_() for each in given[:3]]
    loss = linear_cross_entropy(*leaves[:2], given[3], bias=leaves[2], reduction="sum", upcast=True) * 1e-5
    gradients = torch.autograd.grad(loss, leaves, torch.tensor(65536.0))
    _, right = expected(given, None, LossRule(2), torch.tensor(65536e-5))
    for one, other in zip(gradients, right, strict=True):
        assert one.dtype == torch.float16
        assert (one.double() - other).norm() <= 2e-3 * other.norm()


def test_machine_code_for_gpus_that_need_not_be_there():
    found = troubles_of("deepytorch.passes.ops.linear_cross_entropy_kernels")
    assert len(found) == 3 * len(VARIANTS)
    assert {name: each for name, each in found.items() if each} == {}


# ---------------------------------------------------------------- on a device


@pytest.mark.gpu
@pytest.mark.parametrize("setting", kernels.SETTINGS, ids=str)
@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize("reduction", [0, 1])
def test_on_a_device(setting, dtype, reduction):
    if setting.tile is not None and dtype == torch.float32:
        pytest.skip("in float32 the library's products alone are taken")
    for tokens, size, classes in ((515, 264, 10007), (300, 512, 20480), (1, 64, 9000)):
        given = make(tokens, size, classes, dtype, "cuda")
        given[3][::3] = -100 if tokens > 1 else 0
        check(given, LossRule(reduction), setting)
        check(given, LossRule(reduction, label_smoothing=0.1, softcap=5.0, z_loss=0.01), setting)


@pytest.mark.gpu
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_the_operator_on_a_device_does_not_wait(reduction):
    given = make(515, 256, 10000, torch.bfloat16, "cuda")
    leaves = [each.requires_grad_() for each in given[:3]]

    def step() -> list[torch.Tensor]:
        loss = linear_cross_entropy(*leaves[:2], given[3], bias=leaves[2], reduction=reduction, upcast=True)
        return list(torch.autograd.grad(loss.sum(), leaves))

    first = step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        second = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)  # sums have one order


@pytest.mark.gpu
def test_memory_beyond_gradients_on_a_device():
    hidden, weight, _, target = make(4096, 1024, 128256, torch.bfloat16, "cuda")
    for setting in (kernels.SETTINGS[0], kernels.SETTINGS[2]):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call = Call(hidden, weight, None, target, None, LossRule())
        _, made, _ = kernels.forward(call, (True, True, False), setting)
        gradients = sum(each.numel() * each.itemsize for each in made)
        sums = 4 * (weight.numel() + hidden.numel())  # 4 chunks of rows: the weight's gradient is summed
        assert torch.cuda.max_memory_allocated() - before <= gradients + sums + (256 << 20)
