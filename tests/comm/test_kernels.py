"""The reductions of the native code: alike in every instruction set, and what torch says the numbers should be."""

from __future__ import annotations

import functools
import itertools
import math

import pytest
import torch

from deepytorch.comm.group.native import native

pytestmark = pytest.mark.timeout(120, func_only=True)

HALVES = (torch.bfloat16, torch.float16)
FLOATS = (torch.float32, torch.float64, *HALVES)
INTEGERS = (torch.int8, torch.uint8, torch.int32, torch.int64)
SUM, MIN, MAX = 0, 1, 2
OPS = {SUM: torch.add, MIN: torch.minimum, MAX: torch.maximum}
SIZES = (*range(71), 127, 511, 513, 1025, 4099, 70_001)


@pytest.fixture(scope="module")
def module():
    found = native.load()
    if found is None:
        pytest.skip("needs a C++ compiler")
    return found


@pytest.fixture(params=["portable", "avx2", "avx512"])
def kernel(request, module):
    """reduce(out, inputs, op, divisor) in one instruction set."""
    try:
        module.reduce(request.param, torch.zeros(1), [torch.zeros(1)], SUM, 1.0)
    except ValueError as error:
        pytest.skip(str(error))
    return functools.partial(module.reduce, request.param)


def numbers(dtype: torch.dtype, size: int, seed: int = 0) -> torch.Tensor:
    """Floats of many magnitudes, integers over their whole range."""
    generator = torch.Generator().manual_seed(1000 * seed + size)
    if not dtype.is_floating_point:
        limits = torch.iinfo(dtype)
        return torch.randint(limits.min, limits.max, (size,), dtype=dtype, generator=generator)
    magnitude = torch.randint(-8, 8, (size,), generator=generator)
    return torch.ldexp(torch.randn(size, generator=generator, dtype=torch.float64), magnitude).to(dtype)


def reference(inputs: list[torch.Tensor], op: int, divisor: float = 1.0) -> torch.Tensor:
    """One addition after the other, in float32 for half types, rounded once."""
    dtype = inputs[0].dtype
    wide = [part.float() if dtype in HALVES else part for part in inputs]
    result = functools.reduce(OPS[op], wide)
    return (result / divisor if divisor != 1.0 else result).to(dtype)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])


def equal_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(bits(found), bits(expected))


def fresh(dtype: torch.dtype, size: int) -> torch.Tensor:
    return torch.full((size,), 77, dtype=dtype)


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS], ids=str)
@pytest.mark.parametrize("op", [SUM, MIN, MAX], ids=["sum", "min", "max"])
def test_every_size_is_what_torch_computes(kernel, dtype, op):
    for size in SIZES:
        inputs = [numbers(dtype, size, seed) for seed in range(3)]
        out = fresh(dtype, size)
        kernel(out, inputs, op, 1.0)
        assert equal_bits(out, reference(inputs, op)), size


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS], ids=str)
def test_one_to_nine_inputs_are_added_in_their_order(kernel, dtype):
    for num_inputs, op in itertools.product(range(1, 10), OPS):
        inputs = [numbers(dtype, 333, seed) for seed in range(num_inputs)]
        out = fresh(dtype, 333)
        kernel(out, inputs, op, 1.0)
        assert equal_bits(out, reference(inputs, op)), (num_inputs, op)


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS], ids=str)
def test_views_off_the_alignment_are_read_and_written_alone(kernel, dtype):
    for size in (0, 1, 7, 16, 63, 129, 1000):
        inputs = [numbers(dtype, size + 8, seed)[1 + seed : 1 + seed + size] for seed in range(4)]
        whole = fresh(dtype, size + 2)
        kernel(whole[1 : size + 1], inputs, SUM, 1.0)
        assert equal_bits(whole[1 : size + 1], reference(inputs, SUM)), size
        assert whole[0] == 77
        assert whole[-1] == 77, size


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS], ids=str)
def test_the_output_may_be_any_of_the_inputs(kernel, dtype):
    for size, place in itertools.product((1, 17, 70, 1025), range(3)):
        inputs = [numbers(dtype, size, seed) for seed in range(3)]
        expected = reference(inputs, SUM)
        kernel(inputs[place], inputs, SUM, 1.0)
        assert equal_bits(inputs[place], expected), (size, place)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("divisor", [2, 3, 5, 8, 64])
def test_an_average_divides_before_it_rounds(kernel, dtype, divisor):
    for size in (*range(35), 1025):
        inputs = [numbers(dtype, size, seed) for seed in range(min(divisor, 9))]
        out = fresh(dtype, size)
        kernel(out, inputs, SUM, float(divisor))
        assert equal_bits(out, reference(inputs, SUM, divisor)), size


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integer_sums_wrap_around(kernel, dtype):
    limits = torch.iinfo(dtype)
    inputs = [torch.full((70,), limits.max, dtype=dtype), torch.ones(70, dtype=dtype)]
    out = fresh(dtype, 70)
    kernel(out, inputs, SUM, 1.0)
    assert torch.all(out == limits.min)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("op", [SUM, MIN, MAX], ids=["sum", "min", "max"])
def test_nan_wins_and_infinities_stay(kernel, dtype, op):
    special = [math.nan, math.inf, -math.inf, 0.0, 1.0, -2.5]
    pairs = list(itertools.product(special, repeat=3))
    inputs = [torch.tensor([pair[place] for pair in pairs], dtype=dtype) for place in range(3)]
    out = fresh(dtype, len(pairs))
    kernel(out, inputs, op, 1.0)
    expected = reference(inputs, op)
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(out.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_denormals_are_not_flushed(kernel, dtype):
    tiny = torch.finfo(dtype).smallest_normal
    least = tiny * torch.finfo(dtype).eps
    values = torch.tensor([least, -least, 3 * least, tiny, tiny - least, -tiny] * 7, dtype=torch.float64).to(dtype)
    inputs = [values, values.flip(0), torch.full_like(values, least)]
    for op in OPS:
        out = fresh(dtype, values.numel())
        kernel(out, inputs, op, 1.0)
        assert equal_bits(out, reference(inputs, op)), op
    assert values.count_nonzero() == values.numel()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_negative_zeros_add_up_to_a_negative_zero(kernel, dtype):
    out = fresh(dtype, 37)
    kernel(out, [torch.full((37,), -0.0, dtype=dtype)] * 3, SUM, 1.0)
    assert torch.all(out == 0)
    assert torch.all(torch.signbit(out))
    kernel(out, [torch.full((37,), value, dtype=dtype) for value in (-0.0, 0.0)], SUM, 1.0)
    assert not torch.any(torch.signbit(out))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_sums_of_halves_round_once(kernel, dtype):
    step = torch.finfo(dtype).eps  # half a step, three times: each would vanish if it were rounded when it is added
    inputs = [torch.ones(40, dtype=dtype), *[torch.full((40,), step / 2, dtype=dtype)] * 3]
    out = fresh(dtype, 40)
    kernel(out, inputs, SUM, 1.0)
    assert torch.all(out == 1 + 2 * step)  # 1.5 steps, to the even one


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_every_half_becomes_a_float_and_comes_back(kernel, dtype):
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    wide = fresh(torch.float32, every.numel())
    kernel(wide, [every], SUM, 1.0)
    assert torch.equal(wide.isnan(), every.isnan())
    numeric = ~every.isnan()
    assert equal_bits(wide[numeric], every.float()[numeric])
    back = fresh(dtype, every.numel())
    kernel(back, [wide], SUM, 1.0)
    assert torch.equal(back.isnan(), every.isnan())
    assert equal_bits(back[numeric], every[numeric])


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_cast_to_half_rounds_as_torch_does(kernel, dtype):
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).float()
    every = every[every.isfinite()]
    largest = torch.finfo(dtype).max
    values = torch.cat(
        [
            torch.nextafter(every, torch.tensor(math.inf)),
            torch.nextafter(every, torch.tensor(-math.inf)),
            (every[:-1].double().add(every[1:].double()) / 2).float(),  # ties
            torch.tensor(
                [largest, largest * (1 + torch.finfo(dtype).eps / 4), 3e38, math.inf, -math.inf, -3e38, 1e-45]
            ),
            numbers(torch.float32, 5001),
        ]
    )
    out = fresh(dtype, values.numel())
    kernel(out, [values], SUM, 1.0)
    assert equal_bits(out, values.to(dtype))


def test_all_instruction_sets_agree_to_the_bit(module):
    names = []
    for name in ("portable", "avx2", "avx512"):
        try:
            module.reduce(name, torch.zeros(1), [torch.zeros(1)], SUM, 1.0)
        except ValueError:
            continue
        names.append(name)
    assert module.kernel_name() == names[-1]
    special = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-42, 6e4, -3e38]
    for dtype, op, divisor in itertools.product((*FLOATS, *INTEGERS), OPS, (1.0, 3.0)):
        if divisor != 1.0 and (op != SUM or not dtype.is_floating_point):
            continue
        for size in (1, 13, 70, 1031):
            inputs = [numbers(dtype, size, seed) for seed in range(4)]
            if dtype.is_floating_point:
                for place, part in enumerate(inputs):
                    part[place::11] = torch.tensor(special[(size + place) % len(special)]).to(dtype)
            results = []
            for name in names:
                results.append(fresh(dtype, size))
                module.reduce(name, results[-1], inputs, op, divisor)
            assert all(equal_bits(result, results[0]) for result in results), (dtype, op, divisor, size)


def test_an_unknown_instruction_set_is_refused(module):
    with pytest.raises(ValueError, match="this CPU has no abacus kernels"):
        module.reduce("abacus", torch.zeros(1), [torch.zeros(1)], SUM, 1.0)
