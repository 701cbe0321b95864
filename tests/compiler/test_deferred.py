"""A deferred output computes nothing until it is used, and is then what eager would have shown, or an error."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch.nn import functional

from deepytorch.compiler.step import kept_weights
from deepytorch.compiler.step.kept_weights import PastWeights
from deepytorch.compiler.step.outputs.deferred import computed, defer, is_deferred, see_autograd_functions
from deepytorch.compiler.step.past import Past
from deepytorch.errors import DeferredError
from deepytorch.passes import samples
from deepytorch.passes.samples import Sampler
from tests.calls import Calls, Elements

VOCAB, HIDDEN = 11, 6


@pytest.fixture(autouse=True)
def functions_are_seen() -> None:
    see_autograd_functions()


def past_weights(weights: list[torch.Tensor]) -> PastWeights:
    versions = {place: each._version for place, each in enumerate(weights) if not each.is_inference()}
    return PastWeights(
        Past(lambda *_: (), weights, versions, {}), range(len(weights)), (), "logits", Sampler(spread=True)
    )


def held() -> list[Past]:
    """The pasts whose weights are kept at present."""
    return [each.past for each in kept_weights._HOLDERS]


class Head:
    """A linear head whose output is deferred, and the count of its computations."""

    def __init__(self, dtype: torch.dtype = torch.float32, device: str = "cpu") -> None:
        torch.manual_seed(0)
        self.weight = torch.nn.Parameter(torch.randn(VOCAB, HIDDEN, dtype=dtype, device=device))
        self.bias = torch.nn.Parameter(torch.randn(VOCAB, dtype=dtype, device=device))
        self.hidden = torch.randn(2, 3, HIDDEN, dtype=dtype, device=device, requires_grad=True)
        self.count = 0

    @property
    def parameters(self) -> list[torch.Tensor]:
        return [self.weight, self.bias]

    def eager(self) -> torch.Tensor:
        return functional.linear(self.hidden, *self.parameters)

    def defer(self, requires_grad: bool = True, dtype: torch.dtype | None = None) -> torch.Tensor:
        weights = past_weights(self.parameters)

        def compute() -> torch.Tensor:
            given = weights.then()
            self.count += 1
            return functional.linear(self.hidden, *given)

        return defer(
            (2, 3, VOCAB),
            compute,
            dtype=dtype or self.weight.dtype,
            device=self.weight.device,
            requires_grad=requires_grad,
            name="logits",
        )

    def gradients(self) -> list[torch.Tensor | None]:
        found = [tensor.grad for tensor in (self.hidden, *self.parameters)]
        for tensor in (self.hidden, *self.parameters):
            tensor.grad = None
        return found


@pytest.fixture
def head() -> Head:
    return Head()


DESCRIPTIONS = {
    "shape": lambda x: x.shape,
    "size": lambda x: x.size(),
    "size of one": lambda x: x.size(-1),
    "dtype": lambda x: x.dtype,
    "device": lambda x: x.device,
    "layout": lambda x: x.layout,
    "ndim": lambda x: (x.ndim, x.dim(), x.ndimension()),
    "numel": lambda x: (x.numel(), x.nelement(), torch.numel(x)),
    "len": len,
    "requires_grad": lambda x: x.requires_grad,
    "kind": lambda x: (x.is_floating_point(), torch.is_floating_point(x), x.is_complex(), x.is_signed()),
    "place": lambda x: (x.is_cpu, x.is_cuda, x.is_mps, x.is_meta, x.get_device()),
    "storage kind": lambda x: (x.is_sparse, x.is_quantized, x.is_nested, x.is_mkldnn),
    "bytes": lambda x: (x.itemsize, x.nbytes, x.element_size()),
    "is a tensor": lambda x: (torch.is_tensor(x), isinstance(x, torch.Tensor), isinstance(x, torch.nn.Parameter)),
}


@pytest.mark.parametrize("describe", DESCRIPTIONS.values(), ids=DESCRIPTIONS.keys())
def test_description_computes_nothing(head, describe):
    logits = head.defer()
    assert describe(logits) == describe(head.eager())
    assert head.count == 0
    assert is_deferred(logits)


def test_hash_is_identity_and_computes_nothing(head):
    logits = head.defer()
    assert {logits: 1}[logits] == 1
    assert head.count == 0


USES = {
    "arithmetic": lambda x: 2 * x + 1 - x / 3,
    "reflected arithmetic": lambda x: torch.ones(VOCAB) - x,
    "matmul": lambda x: x @ torch.ones(VOCAB, 2),
    "indexing": lambda x: x[:, -1, ::2],
    "indexing with a mask": lambda x: x[torch.tensor([[True, False, True], [False, False, True]])],
    "argmax": lambda x: x.argmax(-1),
    "torch function": lambda x: torch.softmax(x, -1),
    "nn.functional": lambda x: functional.cross_entropy(x.flatten(0, 1), torch.arange(6)),
    "in a list": lambda x: torch.cat([x, torch.zeros(2, 3, VOCAB), x]),
    "out argument": lambda x: torch.mul(x.detach(), 2, out=torch.empty(2, 3, VOCAB)),
    "numpy": lambda x: x.detach().cpu().numpy(),
    "numpy of detached": lambda x: x.detach().numpy(),
    "tolist": lambda x: x.tolist(),
    "float of an element": lambda x: float(x.detach()[0, 0, 0]),
    "item": lambda x: x.sum().item(),
    "comparison": lambda x: x > 0,
    "to": lambda x: x.to(torch.float64),
    "half": lambda x: x.half(),
    "clone": lambda x: x.clone(),
    "contiguous": lambda x: x.contiguous(),
    "data": lambda x: x.data,
    "stride": lambda x: x.stride(),
    "transpose": lambda x: x.transpose(0, 1).reshape(-1),
    "iteration": lambda x: torch.stack(list(x)),
    "str": str,
    "repr": repr,
    "format": lambda x: f"{x}",
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "deepcopy": lambda x: copy.deepcopy(x.detach()),
    "new_zeros": lambda x: x.new_zeros(3),
    "in a pytree": lambda x: torch.utils._pytree.tree_map(torch.sum, {"a": [x]})["a"][0],
    "below torch functions": lambda x: _below_torch_functions(x),
}


def _below_torch_functions(x: torch.Tensor) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return x * 3


@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
def test_use_equals_eager_and_computes_once(head, use):
    logits = head.defer()
    found, expected = use(logits), use(head.eager())
    if isinstance(expected, torch.Tensor):
        assert type(found) is torch.Tensor
        assert torch.equal(found, expected)
        assert found.requires_grad == expected.requires_grad
    else:
        assert str(found) == str(expected)
    use(logits)
    assert head.count == 1
    assert not is_deferred(logits)


def test_equal_and_save(head):
    logits = head.defer()
    assert torch.equal(logits, head.eager())
    assert torch.equal(head.eager(), head.defer())
    file = io.BytesIO()
    torch.save({"logits": head.defer()}, file)
    file.seek(0)
    loaded = torch.load(file)["logits"]
    assert type(loaded) is torch.Tensor
    assert torch.equal(loaded, head.eager())


def test_deepcopy_of_a_result_refuses_as_eager_does(head):
    with pytest.raises(RuntimeError, match="deepcopy"):
        copy.deepcopy(head.eager())
    with pytest.raises(RuntimeError, match="deepcopy"):
        copy.deepcopy(head.defer())


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.mul_(2),
        lambda x: x.__setitem__((0, 1), 5.0),
        lambda x: x.masked_fill_(x < 0, -1.0),
        lambda x: torch.relu_(x),
    ],
)
def test_change_in_place_is_seen_by_later_uses(head, change):
    logits, expected = head.defer(), head.eager()
    change(logits)
    change(expected)
    assert torch.equal(logits, expected)
    logits.sum().backward()
    found = head.gradients()
    expected.sum().backward()
    for mine, theirs in zip(found, head.gradients(), strict=True):
        assert torch.equal(mine, theirs)


def test_computed_is_the_plain_tensor(head):
    logits = head.defer()
    assert type(computed(logits)) is torch.Tensor
    assert computed(logits) is computed(logits)
    plain = torch.ones(2)
    assert computed(plain) is plain
    assert head.count == 1


def test_detach_and_float_stay_deferred():
    head = Head(torch.bfloat16)
    logits = head.defer()
    single, detached = logits.float(), logits.detach()
    assert (single.dtype, single.requires_grad, detached.requires_grad) == (torch.float32, True, False)
    assert single.float() is single
    assert head.count == 0
    assert torch.equal(single, head.eager().float())
    assert torch.equal(detached, head.eager().detach())
    single.sum().backward()
    assert head.weight.grad is not None
    assert head.count == 1
    with torch.no_grad():
        assert not head.defer().float().requires_grad


# gradients

LOSSES = {
    "arithmetic": lambda x: (x * x).sum(),
    "loss": lambda x: functional.cross_entropy(x.flatten(0, 1), torch.arange(6)),
    "autograd.Function": lambda x: _Square.apply(x).sum(),
    "below torch functions": lambda x: _below_torch_functions(x).square().sum(),
    "two uses": lambda x: x.sum() + _Square.apply(x + 0).sum() + x.logsumexp(-1).sum(),
    "deferred cast": lambda x: x.float().square().sum(),
}


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
def test_gradients_equal_eager(head, loss):
    loss(head.eager()).backward()
    expected = head.gradients()
    loss(head.defer()).backward()
    for mine, theirs in zip(head.gradients(), expected, strict=True):
        torch.testing.assert_close(mine, theirs)
    assert head.count == 1


def test_backward_from_the_tensor_itself(head):
    gradient = torch.randn(2, 3, VOCAB)
    head.eager().backward(gradient)
    expected = head.gradients()
    head.defer().backward(gradient)
    for mine, theirs in zip(head.gradients(), expected, strict=True):
        assert torch.equal(mine, theirs)
    torch.autograd.backward(head.defer(), gradient)
    for mine, theirs in zip(head.gradients(), expected, strict=True):
        assert torch.equal(mine, theirs)
    (found,) = torch.autograd.grad(head.defer(), head.weight, gradient)
    assert torch.equal(found, expected[1])


def test_an_ordinary_use_and_an_autograd_function_give_the_gradients_of_both(head):
    logits = head.defer()
    (_Square.apply(logits).sum() + logits.square().sum()).backward()
    found = head.gradients()
    (2 * head.eager().square().sum()).backward()
    for one, other in zip(found, head.gradients(), strict=True):
        torch.testing.assert_close(one, other)


def test_hooks_wait_for_the_value(head):
    logits = head.defer()
    seen = []
    handle = logits.register_hook(lambda gradient: seen.append("removed"))
    logits.register_hook(lambda gradient: seen.append(tuple(gradient.shape)))
    logits.register_hook(lambda gradient: 2 * gradient)
    assert head.count == 0
    handle.remove()
    logits.sum().backward()
    assert seen == [(2, 3, VOCAB)]
    assert torch.equal(head.bias.grad, torch.full((VOCAB,), 12.0))


def test_retain_grad_says_what_it_cannot_do(head, caplog):
    logits = head.defer()
    logits.retain_grad()
    assert "loss of its step was not computed from it" in caplog.text
    logits.sum().backward()
    assert torch.equal(logits.grad, torch.ones(2, 3, VOCAB))


# modes


def test_grad_mode_of_creation_is_used(head):
    logits = head.defer()
    with torch.no_grad():
        assert logits.argmax(-1).shape == (2, 3)
    logits.sum().backward()
    assert head.weight.grad is not None
    with torch.no_grad():
        logits = head.defer()
    assert not logits.requires_grad
    assert not (logits * 2).requires_grad
    assert not head.defer(requires_grad=False).cos().requires_grad


def test_inference_mode_of_creation_is_used(head):
    with torch.inference_mode():
        logits = head.defer()
    assert computed(logits).is_inference()
    logits = head.defer()
    with torch.inference_mode():
        logits.argmax(-1)
    assert not computed(logits).is_inference()
    logits.sum().backward()
    assert head.weight.grad is not None


def test_autocast_of_creation_is_used(head):
    with torch.autocast("cpu", torch.bfloat16):
        logits, expected = head.defer(dtype=torch.bfloat16), head.eager()
    assert torch.equal(logits, expected)
    logits = head.defer()
    with torch.autocast("cpu", torch.bfloat16):
        assert logits.abs().dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        functional.linear(head.hidden, head.weight)  # fills autocast's cache with a cast that has no gradient
        with torch.enable_grad():
            logits = head.defer(dtype=torch.bfloat16)
            logits.sum().backward()
    assert head.weight.grad is not None


# weights that change


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.AdamW(p, lr=0.1),
        lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
        lambda p: torch.optim.Adam(p, lr=0.1, foreach=True),
    ],
    ids=["sgd", "adamw", "fused", "foreach"],
)
def test_use_after_optimizer_step_shows_the_values_before(head, make):
    optimizer = make(head.parameters)
    for _ in range(3):
        logits, expected = head.defer(), head.eager()
        expected.square().sum().backward()
        before = head.weight.detach().clone()
        optimizer.step()
        optimizer.zero_grad()
        assert not torch.equal(head.weight, before)
        assert torch.equal(logits.argmax(-1), expected.argmax(-1))
        assert torch.equal(logits, expected)


def test_use_after_a_compiled_step_shows_the_values_before(head):
    optimizer = torch.optim.SGD(head.parameters, lr=0.1)
    step = torch.compile(optimizer.step, backend="eager")
    for _ in range(2):
        logits, expected = head.defer(), head.eager()
        expected.square().sum().backward()
        step()
        assert torch.equal(logits, expected)


def test_use_after_several_steps_shows_the_values_of_its_own_step(head):
    optimizer = torch.optim.SGD(head.parameters, lr=0.1)
    steps = []
    for _ in range(3):
        steps.append((head.defer(), head.eager()))
        steps[-1][1].square().sum().backward()
        optimizer.step()
    for logits, expected in steps:
        assert torch.equal(logits, expected)


def test_one_clone_serves_all_and_dies_with_them(head):
    optimizer = torch.optim.SGD(head.parameters, lr=0.1)
    first, second = head.defer(), head.defer()
    head.eager().sum().backward()
    optimizer.step()
    mine, theirs = held()
    assert list(mine.copies) == [0, 1]
    assert all(mine.copies[place] is theirs.copies[place] for place in mine.copies)
    watched = [weakref.ref(copy) for copy in mine.copies.values()]
    del mine, theirs
    first.sum()
    assert all(reference() is not None for reference in watched)
    del first, second
    gc.collect()
    assert all(reference() is None for reference in watched)


def test_only_what_the_optimizer_updates_is_cloned(head):
    logits = head.defer()
    other = torch.nn.Parameter(torch.ones(2))
    for parameters in ([other], [head.bias]):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        torch.optim.SGD(parameters, lr=0.1).step()
    assert logits is not None
    [past] = held()
    assert list(past.copies) == [1]  # the bias alone


def test_nothing_is_cloned_for_what_is_computed_or_dead(head):
    optimizer = torch.optim.SGD(head.parameters, lr=0.1)
    logits, gone = head.defer(), head.defer()
    value = logits.clone()
    pending = weakref.ref(gone._pending)
    del gone
    assert pending() is None
    assert not held()
    value.sum().backward()
    optimizer.step()
    assert torch.equal(logits, value)


def test_flat_parameters_that_alias_the_weights_count(head):
    flat = torch.nn.Parameter(torch.randn(VOCAB * HIDDEN))
    head.weight = flat.detach().view(VOCAB, HIDDEN)
    logits, expected = head.defer(), head.eager()
    flat.grad = torch.ones_like(flat)
    torch.optim.SGD([flat], lr=0.1).step()
    assert torch.equal(logits, expected)


def test_a_gradient_to_a_weight_that_an_optimizer_changed_is_that_of_the_old_value(head):
    optimizer = torch.optim.SGD(head.parameters, lr=0.1)
    (2 * head.eager()).square().sum().backward()
    wanted = head.gradients()
    logits = head.defer()
    head.eager().sum().backward()
    optimizer.step()
    head.gradients()
    (2 * logits).square().sum().backward()
    for found, each in zip(head.gradients(), wanted, strict=True):
        torch.testing.assert_close(found, each)


CHANGES = {
    "in place": lambda weight: weight.add_(1),
    "copy": lambda weight: weight.copy_(torch.zeros_like(weight)),
    "data": lambda weight: weight.data.mul_(1.5),
    "data then version": lambda weight: (weight.data.mul_(1.5), weight.mul_(2)),
    "other memory": lambda weight: setattr(weight, "data", torch.randn_like(weight)),
    "freed": lambda weight: weight.untyped_storage().resize_(0),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_change_without_an_optimizer_raises(head, change):
    logits = head.defer()
    with torch.no_grad():
        change(head.weight)
    with pytest.raises(DeferredError, match="defer_outputs") as error:
        logits.argmax(-1)
    assert "'logits'" in str(error.value)
    assert "(11, 6)" in str(error.value)
    assert head.count == 0


@pytest.mark.parametrize("change", ["version", "data"])
def test_change_between_use_and_step_raises_after_the_step_too(head, change):
    logits = head.defer()
    with torch.no_grad():
        (head.weight.data if change == "data" else head.weight).add_(1)
    head.eager().sum().backward()
    torch.optim.SGD(head.parameters, lr=0.1).step()
    with pytest.raises(DeferredError):
        logits.sum()


def test_change_after_the_use_is_as_in_eager(head):
    logits, expected = head.defer(), head.eager()
    logits.cos()
    with torch.no_grad():
        head.weight.zero_()
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("shape", [(), (1,), (300,), (257, 3), (1000, 512), (4, 5, 6, 7)])
def test_sample_sees_a_change_of_all_values_in_any_layout(shape):
    for tensor in (torch.randn(shape), torch.randn(shape).t() if len(shape) == 2 else torch.randn(shape)):
        before = samples.sample(tensor)
        assert 1 <= before.numel() <= 1024
        assert samples.same_bits(before, samples.sample(tensor))
        tensor.data.add_(1)
        assert not samples.same_bits(before, samples.sample(tensor))


def test_sample_walks_over_columns():
    weight = torch.arange(8192 * 512).view(8192, 512)
    assert len((samples.sample(weight) % 512).unique()) > 200


def test_weights_with_nan_are_unchanged_weights(head):
    with torch.no_grad():
        head.weight.fill_(float("nan"))
    assert head.defer().isnan().all()


# errors and ownership


def test_failed_computation_can_be_tried_again():
    attempts = []

    def compute() -> torch.Tensor:
        attempts.append(1)
        if len(attempts) == 1:
            raise MemoryError("no room")
        return torch.ones(2)

    tensor = defer((2,), compute, dtype=torch.float32, device="cpu")
    with pytest.raises(MemoryError):
        tensor.sum()
    assert tensor.sum() == 2


@pytest.mark.parametrize("value", [torch.ones(3), torch.ones(2, dtype=torch.float64)])
def test_value_unlike_its_description_raises(value):
    tensor = defer((2,), lambda: value, dtype=torch.float32, device="cpu")
    with pytest.raises(DeferredError, match="announced"):
        tensor.sum()


def test_in_place_below_torch_functions_raises(head):
    logits = head.defer()
    with pytest.raises(DeferredError, match="in place"), torch._C.DisableTorchFunctionSubclass():
        logits.mul_(2)
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        torch.empty(2, 3, VOCAB).copy_(logits)


def test_closure_is_released_when_computed(head):
    class Held:
        pass

    held = Held()
    watched = weakref.ref(held)
    tensor = defer((2,), lambda held=held: torch.ones(2), dtype=torch.float32, device="cpu")
    del held
    assert watched() is not None
    tensor.sum()
    assert watched() is None


@pytest.mark.parametrize("use", [lambda x: None, lambda x: x.sum(), lambda x: x.float(), lambda x: x.sum().backward()])
def test_everything_dies_with_the_tensor_without_the_collector(head, use):
    gc.collect()
    gc.disable()
    try:
        logits = head.defer()
        pending = weakref.ref(logits._pending)
        use(logits)
        del logits
        assert pending() is None
    finally:
        gc.enable()


def test_use_inside_compiled_code(head):
    def loss(x: torch.Tensor, scale: int) -> torch.Tensor:
        return (x * scale).logsumexp(-1).sum() * x.shape[0] + x.softmax(-1).max()

    loss(head.eager(), 2).backward()
    expected = head.gradients()
    compiled = torch.compile(loss, backend="eager")
    frames = None
    for step in range(6):
        logits = head.defer()
        compiled(logits, 2).backward()
        for mine, theirs in zip(head.gradients(), expected, strict=True):
            torch.testing.assert_close(mine, theirs)
        assert head.count == step + 1
        if step == 1:
            frames = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == frames


@pytest.mark.gpu
def test_on_a_gpu():
    head = Head(device="cuda")
    optimizer = torch.optim.AdamW(head.parameters, lr=0.1, fused=True)
    for loss in (torch.Tensor.sum, lambda x: _Square.apply(x).sum()):
        with torch.autocast("cuda", torch.bfloat16):
            expected, logits, late = head.eager(), *(head.defer(dtype=torch.bfloat16) for _ in range(2))
        assert (logits.is_cuda, logits.get_device(), logits.device) == (True, 0, expected.device)
        assert is_deferred(logits)
        loss(logits).backward()
        found = head.gradients()
        loss(expected).backward()
        for one, other in zip(found, head.gradients(), strict=True):
            torch.testing.assert_close(one, other)
        head.eager().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(late, expected)


def test_accelerate_gathers_and_casts():
    accelerate = pytest.importorskip("accelerate.utils.operations")
    head = Head(torch.bfloat16)
    outputs = accelerate.convert_to_fp32({"logits": head.defer()})
    assert head.count == 0  # or mixed precision would compute the logits of every step
    assert torch.equal(outputs["logits"], head.eager().float())
    head = Head()
    assert torch.equal(accelerate.concatenate([head.defer(), head.defer()]), torch.cat([head.eager()] * 2))
    (found,) = accelerate.honor_type([0], accelerate.pad_across_processes([head.defer()]))
    assert torch.equal(found, head.eager())
    assert torch.equal(accelerate.send_to_device(head.defer(), "cpu"), head.eager())


def test_creation_is_cheap(head):
    head.weight = torch.nn.Parameter(torch.randn(8192, 512))

    head.defer()  # the first one looks at the weights
    with Calls() as made:
        head.defer()
    assert 0 < made.count < 120  # 25 us on an idle machine
    with Elements() as read:
        head.defer()
    assert 0 < read.count < head.weight.numel() / 100  # of 4 million


@pytest.mark.parametrize("place", range(4))
def test_a_write_through_data_to_any_one_of_the_weights_is_noticed(place):
    weights = [torch.randn(5, 5) for _ in range(4)]
    past = past_weights(weights)
    tensor = defer((5, 5), lambda: sum(past.then()), dtype=torch.float32, device="cpu")
    weights[place].data.mul_(2)
    with pytest.raises(DeferredError, match="written through"):
        tensor + 1


def test_frameworks_that_look_for_a_history_and_hook_gradients_compute_nothing() -> None:
    weight = torch.ones(3, requires_grad=True)
    made = []

    def compute() -> torch.Tensor:
        made.append(1)
        return weight * 2

    deferred = defer((3,), compute, dtype=torch.float32, device="cpu", requires_grad=True)
    assert deferred.grad_fn is not None  # what DeepSpeed asks of every output
    assert not deferred.is_leaf
    seen = []
    deferred.register_hook(seen.append)
    assert made == []
    deferred.sum().backward()
    assert made == [1]
    assert len(seen) == 1
    assert weight.grad is not None
    assert weight.grad.tolist() == [2.0, 2.0, 2.0]
    plain = defer((3,), compute, dtype=torch.float32, device="cpu")
    assert plain.grad_fn is None
    assert plain.is_leaf


def test_a_node_that_passes_every_output_on_gives_no_gradient_to_what_the_loss_is_not_made_of() -> None:
    weight = torch.ones(3, requires_grad=True)

    class Sink(torch.autograd.Function):  # as DistributedDataParallel's for unused parameters
        __module__ = "torch.nn.parallel.distributed"

        @staticmethod
        def forward(ctx: Any, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            ctx.set_materialize_grads(False)
            return tuple(each.clone() for each in inputs)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return gradients

    hidden = weight * 3
    deferred = defer((3,), lambda: hidden * 2, dtype=torch.float32, device="cpu", requires_grad=True)
    loss, _ = Sink.apply(hidden.sum(), deferred)
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [3.0, 3.0, 3.0]
