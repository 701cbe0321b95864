import pytest
import torch
from torch._inductor.custom_graph_pass import CustomGraphPass

from deepytorch.passes.ops import pack
from deepytorch.passes.ops.inline_pack import inline_pack
from deepytorch.passes.ops.pack import pack_rows, unpack_rows

INDICES = torch.tensor([1, 4, 0, 6])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.bool])
@pytest.mark.parametrize("shape", [(7,), (7, 3), (7, 2, 0, 3)])
def test_packs_and_unpacks_any_dtype_and_shape(dtype, shape):
    x = (torch.randn(shape) * 4).to(dtype)
    packed = pack_rows(x, INDICES)
    assert torch.equal(packed, x[INDICES])
    expected = torch.zeros_like(x)
    expected[INDICES] = x[INDICES]
    assert torch.equal(unpack_rows(packed, INDICES, 7), expected)


def test_no_tokens_and_no_rows():
    none = torch.empty(0, dtype=torch.int64)
    assert pack_rows(torch.randn(7, 3), none).shape == (0, 3)
    assert torch.equal(unpack_rows(torch.empty(0, 3), none, 7), torch.zeros(7, 3))
    assert unpack_rows(torch.empty(0, 3), none, 0).shape == (0, 3)


def test_each_is_the_backward_of_the_other_twice():
    x = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
    y = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    for function, tensor in ((lambda t: pack_rows(t, INDICES), x), (lambda t: unpack_rows(t, INDICES, 7), y)):
        assert torch.autograd.gradcheck(function, tensor)
        assert torch.autograd.gradgradcheck(function, tensor)


def test_gradient_of_a_view_with_other_strides():
    x = torch.randn(3, 7, requires_grad=True)
    pack_rows(x.t(), INDICES).square().sum().backward()
    expected = torch.zeros(3, 7)
    expected[:, INDICES] = 2 * x.detach()[:, INDICES]
    assert torch.equal(x.grad, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_opcheck(dtype):
    x = torch.ones(7, 3, dtype=dtype, requires_grad=dtype.is_floating_point)
    torch.library.opcheck(torch.ops.deepytorch.pack_rows.default, (x, INDICES))
    y = torch.ones(4, 3, dtype=dtype, requires_grad=dtype.is_floating_point)
    torch.library.opcheck(torch.ops.deepytorch.unpack_rows.default, (y, INDICES, 7))


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        (torch.bfloat16, (7, 33)),
        (torch.float32, (7, 2, 5)),
        (torch.int64, (7,)),
        (torch.bool, (7, 16)),
        (torch.float64, (1, 1)),
    ],
    ids=str,
)
def test_the_kernel_spreads_any_dtype_and_shape(monkeypatch, dtype, shape):
    pytest.importorskip("triton")
    from deepytorch.passes.ops import pack_triton

    spread, launches = pack_triton.spread, []
    monkeypatch.setattr(pack, "_has_kernels", lambda device: True)
    monkeypatch.setattr(pack, "_LEAST_BYTES", 0)
    monkeypatch.setattr(pack_triton, "spread", lambda *given: launches.append(given) or spread(*given, 16))
    x = (torch.randn(shape) * 4).to(dtype)
    indices = torch.randperm(19)[: shape[0]]  # in no order
    expected = torch.zeros(19, *shape[1:], dtype=dtype).index_copy_(0, indices, x)
    assert torch.equal(unpack_rows(x, indices, 19), expected)
    assert len(launches) == 1


def test_small_and_strided_values_are_spread_by_torch():
    large = torch.empty(1).expand(4 << 10, 1 << 10)
    assert not pack.spreads(large, 1 << 13)
    assert not pack.spreads(torch.ones(4, 1 << 10), 8)
    assert pack.spreads(torch.empty(4 << 10, 1 << 10), 1 << 13)


@pytest.mark.parametrize(
    "call",
    [
        lambda: pack_rows(torch.randn(7, 3), INDICES.int()),
        lambda: pack_rows(torch.randn(7, 3), INDICES.view(2, 2)),
        lambda: pack_rows(torch.tensor(1.0), INDICES),
        lambda: unpack_rows(torch.randn(3, 3), INDICES, 7),
        lambda: unpack_rows(torch.randn(4, 3), INDICES, -1),
    ],
)
def test_wrong_arguments_say_what_was_expected(call):
    with pytest.raises(ValueError, match=r"found .* expected"):
        call()


class _Inlining(CustomGraphPass):
    def __init__(self):
        self.replaced = 0
        self.targets = []

    def __call__(self, graph):
        self.replaced += inline_pack(graph)
        graph.lint()
        self.targets += [node for node in graph.nodes if node.op == "call_function"]

    def uuid(self):
        return f"inline_pack in {__name__}"


def _model(x, weight, indices):
    rows = x.size(0) * x.size(1)
    packed = pack_rows(torch.nn.functional.silu(x).view(rows, -1), indices)
    return unpack_rows(torch.sin(packed @ weight) + packed, indices, rows).view_as(x).cos()


@pytest.mark.slow
def test_inlined_under_inductor_without_operators_or_recompiles():
    torch._dynamo.reset()
    inlining = _Inlining()
    compiled = torch.compile(
        _model, fullgraph=True, options={"post_grad_custom_pre_pass": inlining, "fx_graph_cache": False}
    )
    weight = torch.randn(16, 16).mul_(0.2).requires_grad_()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (13, 9, 20):
            x = torch.randn(4, 5, 16, requires_grad=True)
            indices = torch.randperm(20)[:tokens].sort().values
            for dim in (0, 1):
                torch._dynamo.mark_dynamic(x, dim)
            torch._dynamo.mark_dynamic(indices, 0)
            output, expected = compiled(x, weight, indices), _model(x, weight, indices)
            torch.testing.assert_close(output, expected)
            grad = torch.randn_like(output)
            for ours, theirs in zip(
                *(torch.autograd.grad(y, (x, weight), grad) for y in (output, expected)), strict=True
            ):
                torch.testing.assert_close(ours, theirs)
    assert inlining.replaced == 4
    for node in inlining.targets:
        assert "deepytorch" not in str(node.target)
        assert "val" in node.meta
        if node.target is torch.ops.aten.index_put.default:
            assert node.args[3] is False


@pytest.mark.slow
def test_an_embedding_of_packed_ids_is_one_kernel_under_inductor():
    """So none of ours gathers ids and their embeddings: it would keep what follows out of the compiler's."""
    from torch._inductor.utils import run_and_get_code

    def embedded(ids, table, indices):
        return torch.nn.functional.embedding(pack_rows(ids.flatten(), indices), table).cos()

    options = {"post_grad_custom_pre_pass": _Inlining(), "fx_graph_cache": False}
    compiled = torch.compile(embedded, fullgraph=True, dynamic=True, options=options)
    given = torch.randint(0, 50, (4, 5)), torch.randn(50, 16), torch.randperm(20)[:13].sort().values
    output, (code,) = run_and_get_code(compiled, *given)
    torch.testing.assert_close(output, embedded(*given))
    assert code.count('extern "C"') == 1


def test_inlining_keeps_symbolic_sizes():
    from torch.fx.experimental.proxy_tensor import make_fx

    def unpack(x, indices, like):
        return unpack_rows(x, indices, like.size(0)) * 2

    graph = make_fx(unpack, tracing_mode="symbolic")(torch.randn(4, 3), INDICES, torch.randn(7)).graph
    [before] = [node.meta["val"] for node in graph.nodes if node.target == torch.ops.deepytorch.unpack_rows.default]
    assert inline_pack(graph) == 1
    graph.lint()
    [after] = [node.meta["val"] for node in graph.nodes if node.target == torch.ops.aten.index_put.default]
    assert [str(size) for size in after.shape] == [str(size) for size in before.shape]
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    x = torch.randn(4, 3)
    assert torch.equal(module(x, INDICES, torch.randn(9)), unpack_rows(x, INDICES, 9) * 2)
    assert inline_pack(graph) == 0
