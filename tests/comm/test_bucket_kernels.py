"""Gradients into buckets: the kernel (in an interpreter, or on a GPU), torch's operators, plain torch."""

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
from deepytorch.comm.kernels.buckets import Slots, is_dense, pack

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


def both(sizes, source, target, gap):
    """The bits that the kernel and torch's own casts write, gaps included."""
    gradients = drawn(sizes, source)
    views, buffer = spread(sizes, target, gap)
    expected_views, expected = spread(sizes, target, gap)
    buckets_triton.move(gradients, Slots(views))
    for view, gradient in zip(expected_views, gradients, strict=True):
        view.copy_(gradient.float())
    return bits(buffer), bits(expected)


@pytest.mark.parametrize(("source", "target"), PAIRS)
@pytest.mark.parametrize("gap", [0, 1, 3])
def test_every_pair_of_types_gives_the_bits_of_a_cast(source, target, gap):
    assert torch.equal(*both(SIZES, source, target, gap))


@pytest.mark.parametrize("size", [1, 7, 1023, 4096, 4097])
def test_one_tensor_of_any_size(size):
    assert torch.equal(*both([size], torch.bfloat16, torch.float32, 1))


def test_hundreds_of_tensors_go_in_one_launch(monkeypatch):
    launches = []
    launch = buckets_triton._move

    class Counted:
        def __getitem__(self, grid):
            launches.append(grid)
            return launch[grid]

    monkeypatch.setattr(buckets_triton, "_move", Counted())
    sizes = [1 + number * 37 % 301 for number in range(400)]
    assert torch.equal(*both(sizes, torch.float32, torch.bfloat16, 0))
    assert launches == [(400,)]


def test_nothing_to_move():
    views, _ = spread([0, 0], torch.float32)
    buckets_triton.move(views, Slots(views))
    pack([], Slots([]))


def test_tables_are_kept_until_addresses_change(monkeypatch):
    made = []
    to_device = buckets_triton._to_device
    monkeypatch.setattr(buckets_triton, "_to_device", lambda *given: made.append(1) or to_device(*given))
    views, buffer = spread(SIZES, torch.float32)
    slots = Slots(views)
    first, second = drawn(SIZES, torch.float32), drawn(SIZES, torch.float32)
    for _ in range(3):
        buckets_triton.move(first, slots)
    assert len(made) == 2  # of addresses, of blocks
    buckets_triton.move(second, slots)
    assert len(made) == 3
    assert torch.equal(buffer, torch.cat(second))
    buckets_triton.move(first, slots)  # allocators come back to addresses
    assert len(made) == 3
    for _ in range(10):
        buckets_triton.move(drawn(SIZES, torch.float32), slots)
    assert len(slots.tables.rows) <= 4


def test_permuted_layouts_fit_where_both_sides_have_them():
    kernel = torch.randn(4, 3, 5, 5, device=DEVICE).to(memory_format=torch.channels_last)
    matrix = torch.randn(8, 6, device=DEVICE).t()
    views = [torch.empty_like(kernel, dtype=torch.bfloat16), torch.empty_like(matrix, dtype=torch.bfloat16)]
    slots = Slots(views)
    assert slots.fit([kernel, matrix])
    buckets_triton.move([kernel, matrix], slots)
    assert torch.equal(views[0], kernel.bfloat16())
    assert torch.equal(views[1], matrix.bfloat16())
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
def test_the_form_of_torchs_operators_gives_the_same_bits(source, target):
    gradients = [each.cpu() for each in drawn(SIZES, source)]
    targets = [torch.empty_like(each, dtype=target) for each in gradients]
    pack(gradients, Slots(targets))
    for gradient, written in zip(gradients, targets, strict=True):
        assert torch.equal(bits(written), bits(gradient.float().to(target)))


def llama_members(hidden, key_values, inner, layers, vocabulary):
    shapes = {"q": hidden * hidden, "k": hidden * key_values, "v": hidden * key_values, "o": hidden * hidden}
    shapes |= {"gate": hidden * inner, "up": hidden * inner, "down": hidden * inner, "norm1": hidden, "norm2": hidden}
    named = [("embedding", vocabulary * hidden)]
    named += [(f"{layer}.{name}", size) for layer in range(layers) for name, size in shapes.items()]
    named += [("norm", hidden), ("head", vocabulary * hidden)]
    return [Member(name, "bfloat16", size, 2) for name, size in named]


def moved_bytes(sizes, source_bytes, target_bytes, block):
    """The bytes that a launch with new addresses reads and writes: tensors in whole sectors, and its tables."""
    ends = [size * each for size in sizes for each in (source_bytes, target_bytes)]
    sectors = sum(num_bytes + (32 if num_bytes % 32 else 0) for num_bytes in ends)
    programs = sum(-(-size // block) for size in sizes)
    row, block_row = 3 * 8, 2 * 4
    return sectors + row * len(sizes) + block_row * programs + (row + block_row) * programs


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
            of_bucket = moved_bytes(sizes, 2, 4, block)
            assert of_bucket <= 1.05 * 6 * sum(sizes)
            moved += of_bucket
            least += 6 * sum(sizes)
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


@pytest.mark.gpu
def test_a_launch_waits_for_nothing():
    gradients = drawn(SIZES, torch.bfloat16)
    views, _ = spread(SIZES, torch.float32)
    slots = Slots(views)
    pack(gradients, slots)  # launch settings are measured here
    others = [each.clone() for each in gradients]
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        pack(others, slots)
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    assert slots.tables is not None
    assert kernels._on_gpu(others, slots)
