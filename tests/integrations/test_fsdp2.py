"""FSDP2 with nothing but the import: each block is compiled, and trains as it does in eager."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cold import run_cold

SCRIPT = """
import deepytorch
deepytorch.configure(options={"lowering": "aot_eager"})
import copy
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from deepytorch import handles

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.one, self.two = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
    def forward(self, x):
        return x + self.two(torch.relu(self.one(self.norm(x))))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(16, 4)
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()

dist.init_process_group("gloo")
torch.manual_seed(0)
model = Net()
same = copy.deepcopy(model)
def sharded(net):
    for block in net.blocks:
        fully_shard(block)
    return fully_shard(net)
model, same = sharded(model), sharded(same)
keys = list(same.state_dict())
def train(net):
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    losses = []
    for step in range(5):
        x = torch.randn(3 + step % 2, 16, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        loss = net(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)
ours = train(model)
with deepytorch.paused():
    theirs = train(same)
torch.testing.assert_close(ours, theirs)
for one, other in zip(model.parameters(), same.parameters()):
    torch.testing.assert_close(one.full_tensor(), other.full_tensor())
assert [block._compiled_call_impl is not None for block in model.blocks] == [True] * 3
assert model._compiled_call_impl is None and not handles.armed(same)
assert list(model.state_dict()) == keys
assert deepytorch.report().to_json()["compiles"] >= 1
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_blocks_are_compiled_and_train_alike() -> None:
    run_cold(SCRIPT, num_ranks=2)


FAILS = """
import sys
from pathlib import Path
from types import FunctionType
import deepytorch
deepytorch.configure(options={"lowering": "aot_eager"})
import torch
import torch.distributed as dist
import transformers
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
torch.manual_seed(0)
config = transformers.LlamaConfig(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=64, use_cache=False
)
model = transformers.LlamaForCausalLM(config)
state = {"failing": False, "calls": 0}
def norm(hidden):
    state["calls"] += 1
    if state["failing"]:
        raise RuntimeError("this rank fails")
    return own(hidden)
there = {"__name__": "transformers", "state": state, "own": model.model.norm.forward}  # the script's is not packed
model.model.norm.forward = FunctionType(norm.__code__, there)
for layer in model.model.layers:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), 1e-2)
ids = torch.randint(5, 64, (4, 12), generator=torch.Generator().manual_seed(dist.get_rank()))
mask = torch.ones_like(ids)
mask[1:, 5 + dist.get_rank():] = 0
for step in range(4):
    if step == 2:
        [entry] = [each for each in deepytorch.report().to_json()["regions"] if each["name"].startswith("model entry")]
        assert (entry["steps_profiled"], entry["steps_packed"], entry["steps_padded"]) == (1, 1, 0), entry
        state.update(failing=dist.get_rank() == 1, calls=0)
    try:
        loss = model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss
    except RuntimeError as error:
        Path(sys.argv[1], f"rank{dist.get_rank()}").write_text(f"{error}; {state['calls']} call")
        raise
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
def test_a_rank_that_fails_in_a_packed_forward_does_not_run_it_again(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    done = run_cold(FAILS, str(tmp_path), num_ranks=2, fails=True)
    assert (tmp_path / "rank1").read_text() == "this rank fails; 1 call", done.stderr[-3000:]


BEGIN = """
import sys
from datetime import timedelta
import deepytorch
deepytorch.configure(options={"lowering": "aot_eager"})
import copy
import torch
import torch.distributed as dist
import transformers
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo", timeout=timedelta(seconds=40))
torch.manual_seed(0)
rank = dist.get_rank()
"""

LLAMA = (
    BEGIN
    + """
config = transformers.LlamaConfig(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=64, use_cache=False
)
draws = torch.Generator().manual_seed(rank)
def batch(length):
    ids = torch.randint(5, 64, (4, length), generator=draws)
    mask = torch.ones_like(ids)
    mask[1:, 5 + rank:] = 0
    return dict(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100))
"""
)

KEYWORDS = (
    LLAMA
    + """
def sharded(net):
    for layer in net.model.layers:
        fully_shard(layer)
    return fully_shard(net)
model = transformers.LlamaForCausalLM(config)
model, same = sharded(copy.deepcopy(model)), sharded(model)
data = batch(12)
def train(net):
    optimizer = torch.optim.SGD(net.parameters(), 1e-2)
    losses = []
    for step in range(5):
        more = {"output_hidden_states": True} if rank == 0 and step in map(int, sys.argv[1]) else {}
        loss = net(**data, **more).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)
ours = train(model)
[entry] = [each for each in deepytorch.report().to_json()["regions"] if each["name"].startswith("model entry")]
with deepytorch.paused():
    torch.testing.assert_close(ours, train(same), rtol=1e-4, atol=1e-5)
steps = " ".join(str(entry[f"steps_{each}"]) for each in ("profiled", "packed", "padded"))
sys.stdout.write(f"{rank} {steps} {list(entry['padded_because'])}" + chr(10))  # in one piece
dist.destroy_process_group()
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("steps", ["0", "12"])
def test_a_keyword_of_one_rank_alone_makes_no_rank_wait(steps: str) -> None:
    """In the first call none is packed, as ranks begin unlike; later the one that has it runs padded beside others."""
    pytest.importorskip("transformers")
    done = run_cold(KEYWORDS, steps, num_ranks=2)
    said = sorted(done.stdout.strip().splitlines()[-2:])
    if steps == "0":
        assert all("0 0 5 ['ranks that share weights begin unlike" in each for each in said), said
    else:
        assert said[0].startswith("0 1 2 2 ['another kind of call"), said
        assert said[1].startswith("1 1 4 0"), said


TWICE = (
    BEGIN
    + """
config = transformers.BertConfig(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=64,
    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)
def sharded(net):
    for layer in net.encoder.layer:
        fully_shard(layer)
    return fully_shard(net)
model = transformers.BertModel(config, add_pooling_layer=False)
model, same = sharded(copy.deepcopy(model)), sharded(model)
draws = torch.Generator().manual_seed(rank)
def batch(length, full=False):
    ids = torch.randint(5, 64, (4, length), generator=draws)
    mask = torch.ones_like(ids)
    if not full:
        mask[1:, 5 + rank:] = 0
    return dict(input_ids=ids, attention_mask=mask)
data = [(batch(12, full=rank == 0 and step == 0), batch(9)) for step in range(4)]  # one rank's first batch has no pads
def pooled(hidden, given):
    if sys.argv[1] == "positions":
        return hidden.mean(1)
    mask = given["attention_mask"].unsqueeze(-1)
    return (hidden * mask).sum(1) / mask.sum(1)
def train(net):
    optimizer = torch.optim.SGD(net.parameters(), 1e-1)
    losses = []
    for queries, passages in data:
        first, second = net(**queries).last_hidden_state, net(**passages).last_hidden_state
        scores = pooled(first, queries) @ pooled(second, passages).T
        loss = torch.nn.functional.cross_entropy(scores, torch.arange(4))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)
ours = train(model)
[entry] = [each for each in deepytorch.report().to_json()["regions"] if each["name"].startswith("model entry")]
with deepytorch.paused():
    torch.testing.assert_close(ours, train(same), rtol=1e-4, atol=1e-5)
steps = " ".join(str(entry[f"steps_{each}"]) for each in ("profiled", "packed", "padded"))
sys.stdout.write(f"{rank} {steps}" + chr(10))  # in one piece
dist.destroy_process_group()
"""
)


@pytest.mark.slow
@pytest.mark.parametrize(("uses", "later"), [("tokens", "6 0"), ("positions", "0 6")])
def test_both_calls_of_a_step_are_profiled_before_ranks_agree(uses: str, later: str) -> None:
    """The script uses what the first call gave after the second one has begun."""
    pytest.importorskip("transformers")
    done = run_cold(TWICE, uses, num_ranks=2)
    first, second = sorted(done.stdout.strip().splitlines()[-2:])
    assert second == f"1 2 {later}"
    assert first == ("0 1 6 1" if uses == "tokens" else "0 1 0 7"), first


GATHERED = (
    LLAMA
    + """
def sharded(net):
    for layer in net.model.layers if sys.argv[1] == "blocks" else ():
        fully_shard(layer, reshard_after_forward=False)
    return fully_shard(net, reshard_after_forward=False)
model = transformers.LlamaForCausalLM(config)
model, same = sharded(copy.deepcopy(model)), sharded(model)
data = [batch(12 - step % 2) for step in range(5)]
def train(net):
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    net.eval()
    with torch.no_grad():  # an evaluation before the first step leaves all weights gathered
        losses = [net(**data[0]).loss]
    net.train()
    for step, given in enumerate(data):
        loss = net(**given).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)
ours = train(model)
regions = [each for each in deepytorch.report().to_json()["regions"] if each["name"].startswith("model entry")]
with deepytorch.paused():
    torch.testing.assert_close(ours, train(same), rtol=1e-4, atol=1e-5)
packed = sum(each["steps_packed"] for each in regions)
sys.stdout.write(f"{rank} {packed}" + chr(10))  # in one piece
dist.destroy_process_group()
"""
)


@pytest.mark.slow
@pytest.mark.parametrize(("what", "packed"), [("blocks", 4), ("model", 0)])
def test_weights_that_an_evaluation_has_left_gathered_are_known_as_sharded(what: str, packed: int) -> None:
    pytest.importorskip("transformers")
    done = run_cold(GATHERED, what, num_ranks=2)
    assert sorted(done.stdout.strip().splitlines()[-2:]) == [f"0 {packed}", f"1 {packed}"], done.stdout


ADAPTERS = (
    LLAMA
    + """
import peft

kept = {"modules_to_save": ["embed_tokens", "lm_head"]} if sys.argv[1] == "parts" else {}
targets = ["q_proj", "v_proj", *(["embed_tokens"] if sys.argv[1] == "embeddings" else [])]
lora = peft.LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM", init_lora_weights=False, **kept)
def sharded(net):
    inner = net.base_model.model
    for each in [*inner.model.layers, *([inner.model.embed_tokens, inner.model.norm, inner.lm_head] if kept else [])]:
        fully_shard(each)
    return fully_shard(net)
model = peft.get_peft_model(transformers.LlamaForCausalLM(config), lora)
model, same = sharded(copy.deepcopy(model)), sharded(model)
data = [batch(12 - step % 2) for step in range(14)]
def train(net):
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    losses = []
    for step, given in enumerate(data):
        loss = net(**given).loss
        if step == 8 and kept:  # PEFT's generate calls the model inside, without the wrapper's hooks
            net.eval()
            net.generate(input_ids=given["input_ids"][:, :4], max_new_tokens=2, do_sample=False, pad_token_id=0)
            net.train()
        if step > 3:  # as a reward is kept near the model without adapters
            with torch.no_grad(), net.disable_adapter():
                before = net(**given).loss
            loss = loss + (loss - before).square()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)
ours = train(model)
[entry] = [each for each in deepytorch.report().to_json()["regions"] if each["name"].startswith("model entry")]
with deepytorch.paused():
    torch.testing.assert_close(ours, train(same), rtol=1e-4, atol=1e-5)
for one, other in zip(model.parameters(), same.parameters()):
    if one.requires_grad:
        torch.testing.assert_close(one.full_tensor(), other.full_tensor(), rtol=1e-3, atol=1e-5)
sys.stdout.write(f"{rank} {entry['steps_profiled']} {entry['steps_packed']}" + chr(10))  # in one piece
dist.destroy_process_group()
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["layers", "parts", "embeddings"])
def test_a_model_with_adapters_that_is_sharded_as_a_whole_is_packed(what: str) -> None:
    """Here `fully_shard` gives the wrapper of PEFT's a class of its own, and layers of PEFT's."""
    pytest.importorskip("peft")
    done = run_cold(ADAPTERS, what, num_ranks=2)
    assert sorted(done.stdout.strip().splitlines()[-2:]) == ["0 1 13", "1 1 13"], done.stdout


GROUPS = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from deepytorch.parallel_modules import sharding_groups

dist.init_process_group("gloo")
pairs = [[0, 1], [0, 1], [2, 3], [2, 3]][dist.get_rank()]
for reshard in (True, False):
    for shape, names, ranks in [((4,), ("all",), range(4)), ((2, 2), ("replica", "shard"), pairs)]:
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
        model[0].weight.requires_grad_(False)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        fully_shard(model[0], mesh=mesh, reshard_after_forward=reshard)
        fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
        for forwards in range(2):
            assert [dist.get_process_group_ranks(each) for each in sharding_groups(model)] == [list(ranks)]
            model(torch.ones(2, 4))
assert sharding_groups(nn.Linear(2, 2)) == []
replicate = None
try:
    from torch.distributed._composable.replicate_with_fsdp import replicate
except ImportError:  # of torch 2.13
    pass
if replicate is not None:  # FSDP2's classes, with no weight sharded
    model = replicate(nn.Linear(4, 8), mesh=init_device_mesh("cpu", (4,)))
    assert [dist.get_process_group_ranks(each) for each in sharding_groups(model)] == [[0, 1, 2, 3]]
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_ranks_that_hold_replicas_of_a_shard_are_no_peers() -> None:
    """HSDP: weights are sharded over two ranks, and two pairs of ranks hold all of them."""
    run_cold(GROUPS, num_ranks=4)
