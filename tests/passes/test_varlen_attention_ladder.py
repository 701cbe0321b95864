"""The forms of packed attention that call torch's kernels on GPUs, beside stand-ins for these; and the choice of one.

A stand-in is called with what the schema of the operator in this torch makes of the arguments, computes what the kernel
is documented to, on its layouts, and trusts what it is given: a wrong logsumexp makes a wrong gradient.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import deepytorch.passes.ops.varlen_attention  # noqa: F401  (registers the operator)
from deepytorch import tuning
from deepytorch.passes.ops import varlen_attention_cuda as cuda
from deepytorch.passes.ops import varlen_attention_dense as dense
from deepytorch.passes.ops import varlen_attention_efficient as efficient
from deepytorch.passes.ops import varlen_attention_flash as flash
from deepytorch.passes.ops.attention_tile import Call, Rule, Saved
from deepytorch.passes.ops.reference import varlen_attention_reference

LENGTHS = [5, 1, 40, 33]
PLAIN = Rule(0.25)
INFINITY = float("inf")


def cumulative(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def call_of(lengths: list[int] = LENGTHS, rule: Rule = PLAIN, **given: Any) -> Call:
    rows = cumulative(lengths)
    return Call(rows, rows, max(lengths), max(lengths), rule)._replace(**given)


def make(heads: int = 4, heads_k: int = 4, dim: int = 16, dim_v: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((heads, dim), (heads_k, dim), (heads_k, dim_v))
    query, key, value = (torch.randn(sum(LENGTHS), *shape, requires_grad=True) for shape in shapes)
    return query, key, value


def by_schema(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments by name, as the operator of this torch takes them; a TypeError where it does not."""
    arguments = operator.default._schema.arguments
    positional = [each.name for each in arguments if not each.kwarg_only]
    assert len(args) <= len(positional)
    named = dict(zip(positional, args, strict=False)) | kwargs
    assert set(named) <= {each.name for each in arguments}
    for each in arguments:
        value = named.setdefault(each.name, each.default_value)
        kinds = {"Tensor": Tensor, "int": int, "SymInt": int, "float": float, "bool": bool}
        kind = kinds[str(each.type).removeprefix("Optional[").removesuffix("]")]
        optional = str(each.type).startswith("Optional[")
        assert type(value) is kind or (kind is Tensor and isinstance(value, Tensor)) or (optional and value is None), (
            f"{each.name} is {value!r}, and {each.type} is asked for"
        )
    return named


def scores_of(query: Tensor, key: Tensor, rows: Tensor, scale: float, left: int, right: int) -> Tensor:
    """(heads, tokens, tokens), -inf where a query does not see a key; rows: cumulative lengths."""
    token = torch.arange(query.shape[0])
    row = torch.searchsorted(rows[1:].contiguous(), token, right=True)
    distance = token[None] - token[:, None]
    hidden = row[None] != row[:, None]
    hidden = hidden | (distance < -left) if left >= 0 else hidden
    hidden = hidden | (distance > right) if right >= 0 else hidden
    keys = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    return torch.einsum("qhd,khd->hqk", query, keys).mul(scale).masked_fill(hidden, -INFINITY)


def gradients(
    scores: Tensor,
    logsumexp: Tensor,
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """As kernels compute them: probabilities from `logsumexp` (heads, tokens), the inner product from `output`."""
    group = query.shape[1] // key.shape[1]
    keys, values = (each.repeat_interleave(group, 1) for each in (key, value))
    probabilities = (scores - logsumexp[..., None]).exp()
    inner = (grad * output).sum(-1).t()[..., None]
    of_scores = probabilities * (torch.einsum("qhd,khd->hqk", grad, values) - inner) * scale
    return (
        torch.einsum("hqk,khd->qhd", of_scores, keys),
        torch.einsum("hqk,qhd->khd", of_scores, query).unflatten(1, (-1, group)).sum(2),
        torch.einsum("hqk,qhd->khd", probabilities, grad).unflatten(1, (-1, group)).sum(2),
    )


class Flash:
    """`aten::_flash_attention_forward` and `_backward` for rows of different lengths."""

    @staticmethod
    def _scores(given: dict[str, Any], rows_q: str, rows_k: str) -> Tensor:
        assert torch.equal(given[rows_q], given[rows_k])
        right = 0 if given["is_causal"] else given["window_size_right"]
        return scores_of(given["query"], given["key"], given[rows_q], given["scale"], given["window_size_left"], right)

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        given = by_schema(torch.ops.aten._flash_attention_forward, args, kwargs)
        assert given["dropout_p"] == 0.0
        scores = self._scores(given, "cum_seq_q", "cum_seq_k")
        values = given["value"].repeat_interleave(given["query"].shape[1] // given["value"].shape[1], 1)
        output = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
        nothing = torch.empty(0)
        return output, scores.logsumexp(-1), nothing, nothing, nothing

    def backward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        given = by_schema(torch.ops.aten._flash_attention_backward, args, kwargs)
        scores = self._scores(given, "cum_seq_q", "cum_seq_k")
        names = ("logsumexp", "grad_out", "query", "key", "value", "out", "scale")
        return gradients(scores, *(given[name] for name in names))


class Efficient:
    """`aten::_efficient_attention_forward` and `_backward`, which have their own layout of logsumexp."""

    @staticmethod
    def _scores(given: dict[str, Any]) -> Tensor:
        assert given["bias"] is None
        assert given["window_size"] is None
        assert torch.equal(given["cu_seqlens_q"], given["cu_seqlens_k"])
        query, key, value = (given[name] for name in ("query", "key", "value"))
        assert query.shape[0] == key.shape[0] == value.shape[0] == 1
        assert query.shape[2] == key.shape[2] == value.shape[2], "these kernels know no groups of heads"
        for each in (query, key, value):
            assert each.stride(3) == 1
            assert not any(stride % 4 for stride in each.stride()[1:3])
        right = {0: -1, 1: 0}[given["custom_mask_type"]]
        return scores_of(query[0], key[0], given["cu_seqlens_q"], given["scale"], -1, right)

    @staticmethod
    def _padded(given: dict[str, Any], logsumexp: Tensor) -> Tensor:
        rows = given["cu_seqlens_q"].tolist()
        width = (given["max_seqlen_q"] + 31) // 32 * 32
        padded = torch.full((len(rows) - 1, logsumexp.shape[0], width), INFINITY)
        for row, (begin, end) in enumerate(itertools.pairwise(rows)):
            padded[row, :, : end - begin] = logsumexp[:, begin:end]
        return padded

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        given = by_schema(torch.ops.aten._efficient_attention_forward, args, kwargs)
        assert given["dropout_p"] == 0.0
        assert given["compute_log_sumexp"]
        scores = self._scores(given)
        output = torch.einsum("hqk,khd->qhd", scores.softmax(-1), given["value"][0])[None]
        nothing = torch.empty(())
        return output, self._padded(given, scores.logsumexp(-1)), nothing, nothing, given["max_seqlen_q"], 0

    def backward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        given = by_schema(torch.ops.aten._efficient_attention_backward, args, kwargs)
        scores = self._scores(given)
        logsumexp = scores.logsumexp(-1)
        torch.testing.assert_close(given["logsumexp"], self._padded(given, logsumexp))
        tensors = (given[name][0] for name in ("grad_out_", "query", "key", "value", "out"))
        found = gradients(scores, logsumexp, *tensors, given["scale"])
        return *(each[None] for each in found), torch.empty(())


@pytest.fixture
def _stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, stand_in in ((flash, "flash", Flash()), (efficient, "efficient", Efficient())):
        monkeypatch.setattr(module, f"{name}_attention_forward", stand_in.forward)
        monkeypatch.setattr(module, f"{name}_attention_backward", stand_in.backward)


@pytest.mark.usefixtures("_stand_ins")
@pytest.mark.parametrize("heads_k", [4, 2, 1])
@pytest.mark.parametrize(
    ("form", "window", "dim_v"),
    [
        (flash, (-1, -1), 16),
        (flash, (-1, 0), 16),
        (flash, (3, 0), 16),
        (flash, (3, 2), 16),
        (efficient, (-1, -1), 16),
        (efficient, (-1, 0), 16),
        (efficient, (-1, 0), 8),
    ],
    ids=lambda each: getattr(each, "__name__", str(each)).rpartition("_")[2],
)
def test_a_form_gives_what_the_reference_does(form: Any, window: tuple[int, int], dim_v: int, heads_k: int) -> None:
    torch.manual_seed(0)
    rule = Rule(0.25, *window)
    call, (query, key, value) = call_of(rule=rule), make(heads_k=heads_k, dim_v=dim_v)
    expected = varlen_attention_reference(query, key, value, call.cu_seqlens_q, call.cu_seqlens_k, rule=rule)
    grad = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, (query, key, value), grad)
    with torch.no_grad():
        output, logsumexp = form.forward(query, key, value, call)
        torch.testing.assert_close(output, expected)
        other_output, other_logsumexp = dense.forward(query, key, value, call)
        torch.testing.assert_close(logsumexp, other_logsumexp)  # all forms mean the same: backward may be another's
        found = form.backward(Saved(query, key, value, other_output, other_logsumexp, call), grad, False)
    for each, one in zip(found, wanted, strict=False):
        assert each.is_contiguous()
        torch.testing.assert_close(each, one, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("_stand_ins")
def test_tokens_that_are_not_aligned_are_copied_for_the_efficient_kernels() -> None:
    rule = Rule(0.25, -1, 0)
    packed = torch.randn(sum(LENGTHS), 4, 3 * 16 + 1)
    query, key, value = packed[..., 1:].unflatten(-1, (3, 16)).unbind(-2)
    call = call_of(rule=rule)
    with torch.no_grad():
        found, _ = efficient.forward(query, key, value, call)
    torch.testing.assert_close(found, varlen_attention_reference(query, key, value, *call[:2], rule=rule))


def why_not(form: Any, call: Call, capability: tuple[int, int] = (9, 0), **tensors: Any) -> str | None:
    query, key, value = (each.detach() for each in make(**tensors))
    if form is flash:
        return flash.why_not_flash(query.half(), value.half(), call, capability)
    return efficient.why_not_efficient(query, key, value, call, capability)


@pytest.mark.parametrize("form", [flash, efficient], ids=["flash", "efficient"])
def test_what_a_form_refuses(form: Any) -> None:
    assert why_not(form, call_of(rule=Rule(0.25, -1, 0))) is None
    assert "a bias" in str(why_not(form, call_of(bias=torch.zeros(1, 1, 40, 40))))
    assert "softcap" in str(why_not(form, call_of(rule=Rule(0.25, softcap=2.0))))
    assert "would draw anew" in str(why_not(form, call_of(rule=Rule(0.25, dropout_p=0.1))))
    assert "head_dim 18" in str(why_not(form, call_of(), dim=18, dim_v=18))
    assert "no tokens" in str(why_not(form, call_of(max_q=0)))
    crossed = call_of(rule=Rule(0.25, -1, 0), cu_seqlens_k=cumulative(LENGTHS))
    assert "two token spaces" in str(why_not(form, crossed))
    assert why_not(form, call_of(), (4, 0)) is not None


def test_what_one_form_takes_and_the_other_does_not() -> None:
    windowed = call_of(rule=Rule(0.25, 3, 0))
    assert why_not(flash, windowed) is None
    assert why_not(efficient, windowed) == "a window"
    assert "head_dim 16 of keys and 8 of values" in str(why_not(flash, call_of(), dim_v=8))
    assert why_not(efficient, call_of(), dim_v=8) is None
    assert why_not(flash, call_of(), (7, 0)) == "a device older than Ampere"
    assert why_not(efficient, call_of(), (7, 0)) is None


@pytest.mark.parametrize(
    ("name", "capability", "dim", "reason"),
    [
        ("FA3", (9, 0), 128, None),
        ("FA3", (8, 0), 64, "FA3, which stands in their place, is not for compute capability 8.0"),
        ("FA4", (10, 0), 128, None),
        ("FA4", (10, 0), 256, "head_dim 256"),
        ("mine", (9, 0), 64, "an implementation that nobody has read, mine"),
    ],
)
def test_an_implementation_that_was_activated_has_limits_of_its_own(
    name: str, capability: tuple[int, int], dim: int, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: name)
    found = why_not(flash, call_of(), capability, dim=dim, dim_v=dim)
    assert found is None if reason is None else reason in str(found)


class Device:
    """As on a machine with one, whose forms take so many milliseconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cost: dict[str, float]) -> None:
        self.ran: list[str] = []
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(cuda, "_capability", lambda _: (9, 0))
        monkeypatch.setattr(cuda, "_triton", lambda: None)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(tuning, "_device_name", lambda _: "stand-in")
        self._monkeypatch = monkeypatch
        self.in_another_process()

        def milliseconds(launch: Callable[[str], object], setting: str) -> float:
            launch(setting)
            self.ran.append(setting)
            return cost[setting]

        monkeypatch.setattr(tuning, "_milliseconds", milliseconds)

    def in_another_process(self) -> None:
        """Nothing but what is on disk is known."""
        for module, name in ((tuning, "_FILES"), (tuning, "_CHOSEN"), (cuda, "_FORMS")):
            self._monkeypatch.setattr(module, name, {})


@pytest.mark.usefixtures("_stand_ins")
@pytest.mark.parametrize("faster", ["flash", "efficient"])
def test_the_faster_form_is_found_once_and_kept(faster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch, {"flash": 2.0, "efficient": 2.0, faster: 1.0})
    query, key, value = (each.detach().bfloat16() for each in make())
    call = call_of(rule=Rule(0.25, -1, 0))
    before = cuda.choose_form(query, key, value, call)
    assert before.reasons[-1] == "efficient: not measured on this device yet"
    for _ in range(2):
        output, logsumexp = cuda.forward(query, key, value, call)
        cuda.backward(Saved(query, key, value, output, logsumexp, call), output, False)
    assert device.ran == ["flash", "efficient"]
    found = cuda.choose_form(query, key, value, call)
    other = {"flash": "efficient", "efficient": "flash"}[faster]
    assert found.form == faster
    assert found.reasons[-1] == f"{other}: slower where it was measured"
    device.in_another_process()
    cuda.forward(query, key, value, call)
    assert device.ran == ["flash", "efficient"]
    kept = tuning.cache_directory() / "tuned" / "stand-in-1.json"
    assert kept.stat().st_mode & 0o777 == 0o600
    assert list(json.loads(kept.read_text()).values()).count(["flash", "efficient"].index(faster)) >= 1
    kept.unlink()


@pytest.mark.usefixtures("_stand_ins")
def test_a_form_that_was_found_is_not_looked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    Device(monkeypatch, {"flash": 2.0, "efficient": 1.0})
    query, key, value = (each.detach().bfloat16() for each in make())
    cuda.forward(query, key, value, call_of())
    looked: list[Any] = []
    ladder = cuda._ladder
    monkeypatch.setattr(cuda, "_ladder", lambda *given: looked.append(given) or ladder(*given))
    cuda.forward(query, key, value, call_of([20, 2, 40, 17]))  # lengths alone tell nothing
    assert len(looked) == 0
    cuda.forward(query, key, value, call_of(rule=Rule(0.25, 3, 0)))
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: "FA3")
    cuda.forward(query, key, value, call_of())
    assert len(looked) == 2
    (tuning.cache_directory() / "tuned" / "stand-in-1.json").unlink()


@pytest.mark.usefixtures("_stand_ins")
def test_what_is_taken_while_a_graph_is_recorded_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch, {"flash": 2.0, "efficient": 1.0})
    query, key, value = (each.detach().bfloat16() for each in make())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert cuda._form(query, key, value, call_of()) is flash
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert cuda._form(query, key, value, call_of()) is efficient
    assert device.ran == ["flash", "efficient"]
    (tuning.cache_directory() / "tuned" / "stand-in-1.json").unlink()


@pytest.mark.usefixtures("_stand_ins")
@pytest.mark.parametrize(("efficient_takes", "chosen"), [(1.85, flash), (1.75, efficient)])
def test_the_likeliest_form_stays_where_another_is_hardly_faster(
    efficient_takes: float, chosen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    Device(monkeypatch, {"flash": 2.0, "efficient": efficient_takes})
    query, key, value = (each.detach().bfloat16() for each in make())
    assert cuda._form(query, key, value, call_of()) is chosen
    (tuning.cache_directory() / "tuned" / "stand-in-1.json").unlink()


@pytest.mark.usefixtures("_stand_ins")
def test_nothing_is_measured_where_deterministic_algorithms_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch, {"flash": 2.0, "efficient": 1.0})
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    query, key, value = (each.detach().bfloat16() for each in make())
    cuda.forward(query, key, value, call_of())
    found = cuda.choose_form(query, key, value, call_of())
    assert (device.ran, found.form) == ([], "flash")
    assert "deterministic" in found.reasons[-1]


def test_a_class_of_shapes_tells_apart_what_is_measured_apart() -> None:
    query, key, value = (each.detach() for each in make())
    taking = ("flash", "triton")
    classes = {
        cuda._shape_class(query, key, value, call_of(rule=Rule(0.25, *window)), taking)
        for window in ((-1, -1), (-1, 0), (3, 0))
    }
    classes |= {cuda._shape_class(query, key, value, call_of(max_k=longest), taking) for longest in (300, 2000, 9000)}
    classes |= {cuda._shape_class(query, key[:, :2], value[:, :2], call_of(), taking)}
    classes |= {cuda._shape_class(query.half(), key, value, call_of(), taking)}
    classes |= {cuda._shape_class(query, key, value, call_of(), ("flash", "efficient"))}
    assert len(classes) == 9
    assert cuda._shape_class(query, key, value, call_of([5, 1]), taking) in classes  # lengths alone tell nothing


@pytest.mark.gpu
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (3, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads_k", [4, 2])
def test_forms_on_a_device_agree_with_the_reference(heads_k: int, dtype: torch.dtype, window: tuple[int, int]) -> None:
    rule = Rule(0.25, *window)
    query, key, value = (each.detach().to("cuda", dtype).requires_grad_() for each in make(heads_k=heads_k))
    call = call_of(rule=rule)
    rows = call.cu_seqlens_q.cuda()
    call = call._replace(cu_seqlens_q=rows, cu_seqlens_k=rows)
    exact = [each.detach().double().requires_grad_() for each in (query, key, value)]
    expected = varlen_attention_reference(*exact, rows, rows, rule=rule)
    wanted = torch.autograd.grad(expected, exact, torch.ones_like(expected))
    tolerance = 1e-4 if dtype == torch.float32 else 3e-2
    taking, _ = cuda._ladder(query, key, value, call)
    assert taking
    for name in taking:
        form = cuda._module(name)
        with torch.no_grad():
            output, logsumexp = form.forward(query, key, value, call)
            found = form.backward(Saved(query, key, value, output, logsumexp, call), torch.ones_like(output), False)
        for each, one in zip((output, *found), (expected, *wanted), strict=False):
            torch.testing.assert_close(each.double(), one, rtol=tolerance, atol=tolerance)
