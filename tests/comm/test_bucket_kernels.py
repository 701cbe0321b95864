"""Gradients into buckets and back: the kernel (in an interpreter, or on a GPU), torch's operators, plain torch."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from deepytorch.comm.gradients.buckets import NOMINAL, Member, expected_arrivals, plan_buckets
from deepytorch.comm.kernels import buckets as kernels
from deepytorch.comm.kernels.buckets import Slots, is_dense, pack, reference_move, unpack

pytest.importorskip("triton")
from deepytorch.comm.kernels import buckets_triton

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("rounds_to_nearest")]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PAIRS = list(itertools.product(DTYPES, DTYPES))
SIZES = (0, 1, 7, 1023, 4096, 4097, 0, 8192, 12289)


def spread(sizes, dtype, gap=0):
    """Views of one buffer, `gap` elements apart, and the buffer."""
    buffer = torch.full((sum(sizes) + gap * (len(sizes) + 1),), -7.0, dtype=dtype, device=DEVICE)
    views, end = [], gap
    for size in sizes:
        views.append(buffer[end : end + size])
        end += size + gap
    return views, buffer


def drawn(sizes, dtype):
    return [torch.randn(size, device=DEVICE).mul_(3).to(dtype) for size in sizes]


def bits(tensor):
    return tensor.view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


def both(sizes, source, target, scale, gap, norm=False):
    """What the kernel and the plain form write, gaps included, and the sums of squares."""
    gradients = drawn(sizes, source)
    views, buffer = spread(sizes, target, gap)
    expected_views, expected = spread(sizes, target, gap)
    squares = buckets_triton.move(gradients, views, Slots(views), scale, norm=norm)
    return (buffer, squares), (expected, reference_move(gradients, expected_views, scale, norm))


@pytest.mark.parametrize(("source", "target"), PAIRS)
@pytest.mark.parametrize(("scale", "gap"), [(1.0, 0), (1.0, 3), (1 / 3, 0), (0.125, 1)])
def test_every_pair_of_types_gives_the_bits_of_the_plain_form(source, target, scale, gap):
    (buffer, _), (expected, _) = both(SIZES, source, target, scale, gap)
    assert torch.equal(bits(buffer), bits(expected))


@pytest.mark.parametrize("size", [1, 7, 1023, 4096, 4097])
def test_one_tensor_of_any_size(size):
    (buffer, _), (expected, _) = both([size], torch.bfloat16, torch.float32, 0.5, 1)
    assert torch.equal(bits(buffer), bits(expected))


def test_hundreds_of_tensors_go_in_one_launch(monkeypatch):
    launches = []
    launch = buckets_triton._move

    class Counted:
        def __getitem__(self, grid):
            launches.append(grid)
            return launch[grid]

    monkeypatch.setattr(buckets_triton, "_move", Counted())
    sizes = [1 + number * 37 % 301 for number in range(400)]
    (buffer, _), (expected, _) = both(sizes, torch.float32, torch.bfloat16, 0.25, 0)
    assert torch.equal(bits(buffer), bits(expected))
    assert launches == [(400,)]


@pytest.mark.parametrize("source", DTYPES)
def test_sums_of_squares_are_those_of_the_values_before_rounding(source):
    (buffer, squares), (expected, plain) = both(SIZES, source, torch.bfloat16, 1 / 3, 0, norm=True)
    assert torch.equal(bits(buffer), bits(expected))
    assert squares.dtype == torch.float32
    torch.testing.assert_close(squares, plain, rtol=1e-5, atol=0.0)


def test_nothing_beside_an_infinite_scale_is_counted():
    (_, squares), _ = both([3], torch.float32, torch.float32, float("inf"), 0, norm=True)
    assert squares.item() == float("inf")


def test_sums_of_squares_have_the_same_bits_in_every_run():
    torch.manual_seed(1)
    gradients = drawn(SIZES, torch.bfloat16)
    views, _ = spread(SIZES, torch.float32)
    slots = Slots(views)
    sums = {buckets_triton.move(gradients, views, slots, 0.1, norm=True).item() for _ in range(3)}
    assert len(sums) == 1


def test_nothing_to_move():
    views, _ = spread([0, 0], torch.float32)
    assert buckets_triton.move(views, views, Slots(views), 1.0) is None
    assert buckets_triton.move(views, views, Slots(views), 1.0, norm=True).item() == 0.0
    assert pack([], Slots([]), norm=True).item() == 0.0
    assert pack([], Slots([])) is None


def test_there_and_back_gives_the_gradients():
    sizes = (5, 4096, 70)
    gradients = drawn(sizes, torch.bfloat16)
    views, _ = spread(sizes, torch.float32, 2)
    slots = Slots(views)
    buckets_triton.move(gradients, views, slots, 8.0)
    back = [torch.empty_like(each) for each in gradients]
    buckets_triton.move(views, back, slots, 0.125)
    assert all(map(torch.equal, gradients, back))


def test_tables_are_kept_until_addresses_change(monkeypatch):
    made = []
    to_device = buckets_triton._to_device
    monkeypatch.setattr(buckets_triton, "_to_device", lambda *given: made.append(1) or to_device(*given))
    views, buffer = spread(SIZES, torch.float32)
    slots = Slots(views)
    first, second = drawn(SIZES, torch.float32), drawn(SIZES, torch.float32)
    for _ in range(3):
        buckets_triton.move(first, views, slots, 1.0)
    assert len(made) == 2  # of addresses, of blocks
    buckets_triton.move(second, views, slots, 1.0)
    assert len(made) == 3
    assert torch.equal(buffer, torch.cat(second))
    buckets_triton.move(first, views, slots, 1.0)  # allocators come back to addresses
    assert len(made) == 3
    for _ in range(10):
        buckets_triton.move(drawn(SIZES, torch.float32), views, slots, 1.0)
    assert len(slots.tables.rows) <= 4


def test_permuted_layouts_fit_where_both_sides_have_them():
    kernel = torch.randn(4, 3, 5, 5, device=DEVICE).to(memory_format=torch.channels_last)
    matrix = torch.randn(8, 6, device=DEVICE).t()
    views = [torch.empty_like(kernel, dtype=torch.bfloat16), torch.empty_like(matrix, dtype=torch.bfloat16)]
    slots = Slots(views)
    assert slots.fit([kernel, matrix])
    buckets_triton.move([kernel, matrix], views, slots, 2.0)
    assert torch.equal(views[0], (kernel * 2).bfloat16())
    assert torch.equal(views[1], (matrix * 2).bfloat16())
    assert not slots.fit([kernel.contiguous(), matrix])
    assert not slots.fit([kernel, matrix.contiguous()])


@pytest.mark.parametrize(
    ("gradients", "views"),
    [
        ([torch.ones(3), torch.ones(2)[:1]], [torch.ones(3), torch.ones(2)]),  # another shape
        ([torch.ones(3), torch.ones(2).half()], [torch.ones(3), torch.ones(2)]),  # two types
        ([torch.ones(3)], [torch.ones(3).double()]),
        ([torch.ones(3).double()], [torch.ones(3)]),
        ([torch.ones(3)], [torch.ones(1).expand(3)]),
        ([torch.ones(6)[::2]], [torch.ones(6)[::2]]),
        ([torch.ones(3)], [torch.ones(3), torch.ones(3)]),
    ],
)
def test_what_the_kernel_does_not_take(gradients, views):
    assert not Slots(views).fit(gradients)


def test_dense_layouts():
    for tensor in (torch.ones(()), torch.ones(3, 4).t(), torch.ones(0, 3), torch.ones(2, 3, 4).permute(1, 2, 0)):
        assert is_dense(tensor)
    for tensor in (torch.ones(4)[::2], torch.ones(1).expand(4), torch.ones(3, 4)[:, :2]):
        assert not is_dense(tensor)


@pytest.mark.parametrize(("source", "target"), PAIRS)
@pytest.mark.parametrize("scale", [1.0, 1 / 3])
def test_the_form_of_torchs_operators_gives_the_same_bits(source, target, scale):
    gradients = [each.cpu() for each in drawn(SIZES, source)]
    targets, expected = ([torch.empty_like(each, dtype=target) for each in gradients] for _ in range(2))
    squares = pack(gradients, Slots(targets), scale, norm=True)
    plain = reference_move(gradients, expected, scale, norm=True)
    assert all(torch.equal(bits(one), bits(other)) for one, other in zip(targets, expected, strict=True))
    torch.testing.assert_close(squares, plain)
    slots, back, other = Slots(targets), gradients, [each.clone() for each in gradients]
    unpack(slots, back, scale)
    reference_move(targets, other, scale)
    assert all(torch.equal(bits(one), bits(other)) for one, other in zip(back, other, strict=True))


def llama_members(hidden, key_values, inner, layers, vocabulary):
    shapes = {"q": hidden * hidden, "k": hidden * key_values, "v": hidden * key_values, "o": hidden * hidden}
    shapes |= {"gate": hidden * inner, "up": hidden * inner, "down": hidden * inner, "norm1": hidden, "norm2": hidden}
    named = [("embedding", vocabulary * hidden)]
    named += [(f"{layer}.{name}", size) for layer in range(layers) for name, size in shapes.items()]
    named += [("norm", hidden), ("head", vocabulary * hidden)]
    return [Member(name, "bfloat16", size, 2) for name, size in named]


@pytest.mark.parametrize("bucket_bytes", [1 << 20, 25 << 20, None])
@pytest.mark.parametrize(
    "model", [(4096, 1024, 14336, 32, 128256), (2048, 512, 8192, 16, 128256), (896, 128, 4864, 24, 151936)]
)
def test_a_bucket_of_a_llama_moves_little_more_than_its_gradients(model, bucket_bytes):
    members = llama_members(*model)
    plan = plan_buckets(members, expected_arrivals(members, 1e6), NOMINAL, 1e6, bucket_bytes=bucket_bytes)
    least = moved = 0
    for bucket in plan.buckets:
        sizes = [members[member].num_elements for member in bucket.members]
        for block, _ in buckets_triton.SETTINGS:
            of_bucket = buckets_triton.moved_bytes(sizes, 2, 4, block, norm=True)
            assert of_bucket <= 1.05 * buckets_triton.least_bytes(sizes, 2, 4)
            moved += of_bucket
            least += buckets_triton.least_bytes(sizes, 2, 4)
    assert least < moved <= 1.01 * least


def test_the_table_names_every_block_once():
    sizes = [0, 5, 8, 17, 0, 1]
    table = buckets_triton.block_table(sizes, 8)
    assert table.tolist() == [[1, 0], [2, 0], [3, 0], [3, 1], [3, 2], [5, 0]]
    assert table.dtype == torch.int32


COMPILE = """
import re, sys
from importlib import import_module
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from deepytorch.machine_code import CAPABILITIES, compile_for, troubles
found = import_module(sys.argv[1])
assert found.VARIANTS
for variant in found.VARIANTS:
    for capability in CAPABILITIES:
        code = compile_for(variant, capability)
        wrong = troubles(variant, code)
        assert wrong == [], (variant.label, capability, wrong)
        assert "atom" not in code.instructions and "red.global" not in code.instructions or "symmetric" in sys.argv[1]
        print(variant.kernel, "|", variant.label, "|", capability, code.registers, code.shared_bytes)
    source = ASTSource(variant.function(), signature=dict(variant.signature), constexprs=dict(variant.constants))
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    wide = re.search(r"ld\\.global\\S*\\.v[48]", ptx) and re.search(r"st\\.global\\S*\\.v[48]", ptx)
    assert wide or "misaligned" in variant.label, (variant.label, "16 bytes at once")
"""


def compile_variants(module, folder):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(folder), "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", COMPILE, module]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=550, check=False)
    assert found.returncode == 0, found.stderr[-3000:]
    return found.stdout.splitlines()


def test_machine_code_for_every_gpu_is_sound(tmp_path):
    lines = compile_variants("deepytorch.comm.kernels.buckets_triton", tmp_path)
    assert len(lines) == 3 * len(buckets_triton.VARIANTS)


def test_gradients_without_elements_lie_in_no_slot():
    views, _ = spread(SIZES, torch.float32)
    assert not kernels.moves_onto_itself(drawn(SIZES, torch.float32), views)
    assert kernels.moves_onto_itself(views, views)


@pytest.mark.gpu
def test_a_launch_waits_for_nothing():
    gradients = drawn(SIZES, torch.bfloat16)
    views, _ = spread(SIZES, torch.float32)
    slots = Slots(views)
    pack(gradients, slots, 0.5, norm=True)  # launch settings are measured here
    others = [each.clone() for each in gradients]
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        pack(others, slots, 0.5, norm=True)
        unpack(slots, others, 2.0)
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    assert slots.tables is not None
    assert kernels._on_gpu(others, views, slots, plain=False)
