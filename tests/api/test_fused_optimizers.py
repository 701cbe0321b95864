"""Fused forms of Adam and SGD on a CPU: the same numbers, for what we compile and where the script says nothing."""

from __future__ import annotations

import copy
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import adam as adam_module
from torch.optim import sgd as sgd_module
from transformers import LlamaConfig, LlamaForCausalLM

from deepytorch import fused_optimizers, patches
from deepytorch.switch import SWITCH


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many parameters each step of torch's fused form had."""
    steps: list[int] = []
    original = adam_module._fused_adam

    def counted(parameters: list[Any], *rest: Any, **options: Any) -> Any:
        steps.append(len(parameters))
        return original(parameters, *rest, **options)

    monkeypatch.setattr(adam_module, "_fused_adam", counted)
    return steps


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in ((40, 30), (7,), ())]


def train(given: list[nn.Parameter], optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    generator = torch.Generator().manual_seed(3)
    for _ in range(steps):
        for each in given:
            each.grad = torch.randn(each.shape, generator=generator, dtype=each.dtype)
        optimizer.step()


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize(
    "options",
    [{}, {"weight_decay": 0.3, "lr": 0.1}, {"lr": 1, "maximize": True}, {"betas": (0.5, 0.7), "eps": 1e-3}],
    ids=str,
)
def test_the_same_numbers_as_the_form_that_torch_takes(kind: Any, options: dict[str, Any], taken: list[int]) -> None:
    ours = parameters()
    theirs = copy.deepcopy(ours)
    fused_optimizers.fuse_for(ours)
    one, two = kind(ours, **options), kind(theirs, **options)
    train(ours, one, 30)
    train(theirs, two, 30)
    assert taken == [3] * 30
    for mine, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-6, atol=1e-6)
        for name, value in two.state[right].items():
            torch.testing.assert_close(one.state[mine][name], value, rtol=2e-6, atol=1e-7)
    # nothing of it is to be seen in a checkpoint
    assert one.state_dict()["param_groups"] == two.state_dict()["param_groups"]


CASES: dict[str, dict[str, Any]] = {
    "foreach": {"foreach": True},
    "no foreach": {"foreach": False},
    "not fused": {"fused": False},
    "lr in a tensor": {"lr": torch.tensor(1e-3)},
    "lr of numpy": {"lr": np.array(1e-3)},
    "lr as a fraction": {"lr": Fraction(1, 1000)},
    "maximize as a number": {"maximize": 1},
    "amsgrad": {"amsgrad": True},
    "weight decay in a tensor": {"weight_decay": torch.tensor(0.1)},
    "differentiable": {"differentiable": True},
}


@pytest.mark.parametrize("case", CASES)
def test_what_the_script_asks_for_stays(case: str, taken: list[int]) -> None:
    ours = parameters()
    fused_optimizers.fuse_for(ours)
    if case == "differentiable":
        optimizer = torch.optim.Adam([each.clone() for each in ours], differentiable=True)
        fused_optimizers.fuse_for(optimizer.param_groups[0]["params"])
    else:
        optimizer = torch.optim.Adam(ours, **CASES[case])
        train(ours, optimizer)
    assert taken == []


def test_what_we_do_not_compile_stays_to_the_last_bit(taken: list[int]) -> None:
    known, unknown = parameters(), parameters()
    fused_optimizers.fuse_for(known)
    train(unknown, torch.optim.Adam(unknown))
    mixed = [*known, *unknown]
    train(mixed, torch.optim.Adam(mixed))
    assert taken == []


def test_state_of_another_kind_stays(taken: list[int]) -> None:
    for step in (torch.tensor(7), torch.tensor(7.0, dtype=torch.float64), torch.tensor(7.0, dtype=torch.float16)):
        ours = parameters()
        fused_optimizers.fuse_for(ours)
        optimizer = torch.optim.Adam(ours)
        train(ours, optimizer)
        optimizer.state[ours[0]]["step"] = step.clone()
        train(ours, optimizer)
        assert optimizer.state[ours[0]]["step"] == 8
    optimizer.state[ours[1]]["step"] = optimizer.state[ours[2]]["step"]  # both count
    train(ours, optimizer)
    assert optimizer.state[ours[1]]["step"] == 4
    assert taken == [3, 3, 3]


def test_a_parameter_of_another_shape_than_its_state_raises_as_in_eager(taken: list[int]) -> None:
    for shape in ((132,), (10, 10)):  # more of it, or as much
        weight = nn.Parameter(torch.ones(100))
        fused_optimizers.fuse_for([weight])
        optimizer = torch.optim.AdamW([weight])
        train([weight], optimizer)
        weight.data = torch.ones(shape)
        with pytest.raises(RuntimeError, match=r"size|shape"):
            train([weight], optimizer)
    assert taken == [1, 1]


class Sub(torch.Tensor):
    pass


def test_other_tensors_stay(taken: list[int]) -> None:
    wide = parameters(torch.float64)
    turned = [nn.Parameter(torch.randn(5, 4).t())]
    for given in (wide, turned):
        fused_optimizers.fuse_for(given)
        train(given, torch.optim.Adam(given))
    plain = parameters()
    fused_optimizers.fuse_for(plain)
    for each in plain:
        each.grad = torch.zeros_like(each).as_subclass(Sub)
    torch.optim.Adam(plain).step()
    # a gradient whose layout differs from that of its parameter
    plain[0].grad = torch.zeros(30, 40).t()
    torch.optim.Adam(plain[:1]).step()
    assert taken == []


def test_neither_in_a_pause_nor_beside_other_ranks(taken: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    ours = parameters()
    fused_optimizers.fuse_for(ours)
    optimizer = torch.optim.Adam(ours)
    monkeypatch.setattr(SWITCH, "paused", 1)
    train(ours, optimizer)
    monkeypatch.setattr(SWITCH, "paused", 0)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    train(ours, optimizer)
    assert taken == []
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    train(ours, optimizer)
    assert taken == [3]
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    train(ours, optimizer)
    assert taken == [3]


def test_is_taken_back_with_the_rest(taken: list[int]) -> None:
    ours = parameters()
    fused_optimizers.fuse_for(ours)
    optimizer = torch.optim.Adam(ours)
    train(ours, optimizer)
    assert any(each.where == "torch.optim.adam.adam" and each.applied for each in patches.ledger())
    patches.undo_all()
    try:
        train(ours, optimizer)
    finally:
        patches.apply_all()
        fused_optimizers.fuse_for(ours)
    assert taken == [3]
    train(ours, optimizer)
    assert taken == [3, 3]


def test_a_backward_through_old_weights_raises_as_in_eager(taken: list[int]) -> None:
    weight = nn.Parameter(torch.randn(3, 3))
    fused_optimizers.fuse_for([weight])
    optimizer = torch.optim.Adam([weight])
    loss = (torch.randn(2, 3) @ weight @ weight).sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    assert taken == [1]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    # and through the optimizer's own state
    norm = (weight * optimizer.state[weight]["exp_avg"]).square().sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        norm.backward()


def test_under_a_gradient_scaler_and_with_gradients_that_are_not_finite(taken: list[int]) -> None:
    ours = parameters()
    fused_optimizers.fuse_for(ours)
    theirs = copy.deepcopy(ours)
    optimizers = [torch.optim.AdamW(each) for each in (ours, theirs)]
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0) for _ in range(2)]
    for finite in (True, False, True):
        for given, optimizer, scaler in zip((ours, theirs), optimizers, scalers, strict=True):
            loss = sum((each * (1.0 if finite else float("inf"))).square().sum() for each in given)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert taken == [3, 3]
    assert scalers[0].get_scale() == scalers[1].get_scale()
    for mine, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-6, atol=1e-6)


def test_a_compiled_optimizer_step_is_left_to_the_compiler(taken: list[int]) -> None:
    ours = parameters()
    fused_optimizers.fuse_for(ours)
    optimizer = torch.optim.Adam(ours)
    before = [each.detach().clone() for each in ours]
    for each in ours:
        each.grad = torch.ones_like(each)
    torch.compile(optimizer.step, backend="aot_eager")()
    for each, old in zip(ours, before, strict=True):
        torch.testing.assert_close(each.detach(), old - 1e-3, rtol=1e-4, atol=1e-6)
    assert taken == []


def test_a_model_that_is_packed_has_it_and_another_has_not(taken: list[int]) -> None:
    def model() -> nn.Module:
        torch.manual_seed(1)
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_hidden_layers": 1}
        return LlamaForCausalLM(LlamaConfig(vocab_size=50, max_position_embeddings=32, **sizes))

    ours, twin, theirs = model(), model(), model()
    step, again = (
        torch.compile(each, backend="deepytorch", options={"lowering": "aot_eager"}) for each in (ours, twin)
    )
    one, other, two = (torch.optim.AdamW(each.parameters(), lr=1e-3) for each in (ours, twin, theirs))
    for index in range(4):
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, 50, (4, 16), generator=generator)
        real = torch.arange(16) < torch.tensor([16, 3, 9, 1]).unsqueeze(1)
        batch = {"input_ids": tokens, "attention_mask": real.long(), "labels": tokens.where(real, -100)}
        losses = []
        for run, optimizer in ((step, one), (again, other), (theirs, two)):  # the twin has the first one's graph
            loss = run(**batch).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        torch.testing.assert_close(losses[0], losses[2], rtol=1e-5, atol=1e-6)
    assert taken == [len(list(ours.parameters()))] * 7  # in the first step the graph is only being made
    for mine, right in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------- SGD


@pytest.fixture
def taken_by_sgd(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many parameters each step of torch's fused form had."""
    steps: list[int] = []
    original = sgd_module._fused_sgd

    def counted(parameters: list[Any], *rest: Any, **options: Any) -> Any:
        steps.append(len(parameters))
        return original(parameters, *rest, **options)

    monkeypatch.setattr(sgd_module, "_fused_sgd", counted)
    return steps


@pytest.mark.parametrize(
    "options",
    [
        {"lr": 0.1},
        {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4},
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.3},
        {"lr": 0.1, "momentum": 0.7, "dampening": 0.2, "maximize": True},
    ],
    ids=str,
)
def test_sgd_has_the_numbers_of_the_form_that_torch_takes(options: dict[str, Any], taken_by_sgd: list[int]) -> None:
    ours = parameters()
    theirs = copy.deepcopy(ours)
    fused_optimizers.fuse_for(ours)
    one, two = torch.optim.SGD(ours, **options), torch.optim.SGD(theirs, **options)
    train(ours, one, 30)
    train(theirs, two, 30)
    assert taken_by_sgd == [3] * 30
    for mine, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-6)
    for mine, right in zip(one.state_dict()["state"].values(), two.state_dict()["state"].values(), strict=True):
        assert mine.keys() == right.keys()
        if right.get("momentum_buffer") is not None:
            torch.testing.assert_close(mine["momentum_buffer"], right["momentum_buffer"], rtol=1e-5, atol=1e-6)


def test_a_weight_whose_momentum_begins_later_stays_with_the_loop(taken_by_sgd: list[int]) -> None:
    ours = parameters()
    theirs = copy.deepcopy(ours)
    fused_optimizers.fuse_for(ours)
    for given in (ours, theirs):
        optimizer = torch.optim.SGD(given, lr=0.1, momentum=0.9)
        train(given[:2], optimizer, 2)
        optimizer.zero_grad()
        train(given, optimizer, 2)
    assert taken_by_sgd == [2, 2, 3]  # the loop makes the late buffer, and has both after that
    for mine, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", [{"foreach": False}, {"fused": False}, {"lr": torch.tensor(0.1)}], ids=str)
def test_sgd_with_what_is_not_plain_stays_with_the_loop(options: dict[str, Any], taken_by_sgd: list[int]) -> None:
    ours = parameters()
    fused_optimizers.fuse_for(ours)
    train(ours, torch.optim.SGD(ours, **{"lr": 0.1, "momentum": 0.9, **options}), 2)
    assert not taken_by_sgd


def test_a_backward_through_values_that_sgd_has_changed_is_refused() -> None:
    weight = nn.Parameter(torch.randn(3))
    fused_optimizers.fuse_for([weight])
    loss = (weight**2).sum()
    optimizer = torch.optim.SGD([weight], lr=0.1)
    weight.grad = torch.ones(3)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
