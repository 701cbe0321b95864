"""The ways to train one model on several ranks: each is to compute what one process does with the whole batch."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from typing import Any

import pytest
import torch
from torch import nn

from deepytorch.bench.memory import is_out_of_memory, peak_bytes
from deepytorch.bench.model_parts import blocks
from deepytorch.bench.models import build_model
from deepytorch.bench.parallel import loss_of, trainer
from deepytorch.bench.ways import Parallel, unavailable
from deepytorch.errors import ConfigError
from tests.comm import ranks

# Trains in several ways, one after the other, and in one process's way with the batches of all replicas.
_SCRIPT = """
import functools, json, warnings
warnings.filterwarnings("ignore")
from deepytorch.bench.model_parts import fill
from deepytorch.bench.models import build_model
from deepytorch.bench.parallel import trainer
from deepytorch.bench.ways import Parallel
from torch.distributed.tensor import DTensor

given = json.loads(os.environ["GIVEN"])
deepytorch.switch.SWITCH.enabled = given["armed"]
init("gloo", timeout=120.0)
device, steps = torch.device("cpu"), 3

def make():
    size = "small" if given["model"] == "qwen2" else "tiny"
    return build_model(given["model"], size, vocab_size=64, seed=0)

def start():
    if not given["made"]:
        return make()
    with torch.device("meta"):
        model = make()
    fill(model, model, device)  # as each part of it is where it is sharded
    return model

def batches(replica, step, count):
    drawn = torch.Generator().manual_seed(100 * step + replica)
    rows = [torch.randint(3, 64, (2, 16), generator=drawn) for _ in range(count)]
    return [{"input_ids": each, "attention_mask": torch.ones_like(each), "labels": each.clone()} for each in rows]

optimizer = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)

@functools.cache
def alone(replicas, count):
    model = start()
    sgd, losses = optimizer(model.parameters()), []
    for step in range(steps):
        sgd.zero_grad()
        every = [[model(**each).loss for each in batches(replica, step, count)] for replica in range(replicas)]
        (sum(map(sum, every)) / (replicas * count)).backward()
        sgd.step()
        losses.append([float(sum(each)) / count for each in every])
    return losses, {name: each.detach() for name, each in model.named_parameters()}

def whole(weight):
    if hasattr(weight, "ds_id"):
        from deepspeed.utils import safe_get_full_fp32_param
        return safe_get_full_fp32_param(weight)
    return weight.full_tensor() if isinstance(weight, DTensor) else weight.detach()

def known_as(name, way, stage):
    for wrapper in ("module.", "_checkpoint_wrapped_module.", "_orig_mod."):
        name = name.replace(wrapper, "")
    if way.pipeline == 1:
        return name
    parts = name.removeprefix("model.").split(".")  # of the stage
    if "layers" in parts:
        parts[2] = str(int(parts[2]) + 2 * stage // way.pipeline)
    return ".".join(parts)

for text in given["ways"]:
    way = Parallel(**text)
    replicas = way.replicas(size)
    torch._dynamo.reset()
    if given["armed"]:
        with deepytorch.paused():
            losses, weights = alone(replicas, way.accumulate)
    else:
        losses, weights = alone(replicas, way.accumulate)
    taught = trainer(make if given["made"] else make(), way, optimizer=optimizer, device=device)
    found = [float(taught.step(batches(way.replica(rank), step, way.accumulate))) for step in range(steps)]
    wanted = [each[way.replica(rank)] for each in losses]
    stage = rank // way.tensor % way.pipeline
    named = {known_as(name, way, stage): whole(each) for name, each in taught.model.named_parameters()}
    assert way.pipeline > 1 or named.keys() == weights.keys(), named.keys() ^ weights.keys()
    began = dict(start().named_parameters())
    say(json.dumps({
        "losses": max(abs(one - other) for one, other in zip(found, wanted)),
        "weights": max(float((each - weights[name]).abs().max()) for name, each in named.items()),
        "moved": max(float((each - began[name]).abs().max()) for name, each in named.items()),
    }))
    del taught
dist.barrier()
dist.destroy_process_group()
"""


def _train(
    ways: list[Parallel], model: str = "llama", num_ranks: int = 2, armed: bool = False, made: bool = False
) -> list[list[dict[str, Any]]]:
    """What each rank says of each way."""
    given = {"ways": [dataclasses.asdict(way) for way in ways], "model": model, "armed": armed, "made": made}
    env = {"GIVEN": json.dumps(given), "DS_ACCELERATOR": "cpu"}
    if not armed:
        env["DEEPYTORCH"] = "off"
    outputs = ranks.run(_SCRIPT, num_ranks, timeout=400.0, env=env)
    return [[json.loads(line) for line in output.splitlines() if line.startswith("{")] for output in outputs]


def _check(ways: list[Parallel], tolerance: float = 1e-6, **given: Any) -> None:
    """Losses and weights after three steps are those of one process with the batches of all replicas."""
    for rank, said in enumerate(_train(ways, **given)):
        assert len(said) == len(ways)
        for way, each in zip(ways, said, strict=True):
            assert each["moved"] > 1e-3
            assert each["losses"] < tolerance, (rank, way, each)
            assert each["weights"] < tolerance, (rank, way, each)


_DEEPSPEED = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
_PLAIN = [
    Parallel(sharding="ddp"),
    Parallel(sharding="oss", accumulate=2),
    Parallel(sharding="fsdp2"),
    Parallel(tensor=2),
    Parallel(pipeline=2, accumulate=2),
]


def test_every_way_trains_like_one_process() -> None:
    _check(_PLAIN)


@pytest.mark.slow  # compiles for minutes
def test_every_way_trains_like_one_process_with_deepytorch() -> None:
    _check(_PLAIN, armed=True)


@pytest.mark.slow
@pytest.mark.parametrize("armed", [False, True], ids=["off", "armed"])
def test_recomputed_and_accumulated_steps_are_the_same(armed: bool) -> None:
    kinds = [Parallel(sharding="ddp"), Parallel(sharding="fsdp2"), Parallel(tensor=2), Parallel(pipeline=2)]
    ways = [dataclasses.replace(way, recompute=True, accumulate=4) for way in kinds]
    _check([*ways, Parallel(pipeline=2)], armed=armed)


@pytest.mark.slow
@pytest.mark.parametrize("armed", [False, True], ids=["off", "armed"])
def test_ways_are_combined(armed: bool) -> None:
    ways = [
        Parallel(tensor=2, pipeline=2, accumulate=2),
        Parallel(sharding="ddp", tensor=2, accumulate=2),
        Parallel(sharding="fsdp2", tensor=2),
        Parallel(sharding="ddp", pipeline=2, accumulate=2),
        Parallel(sharding="fsdp2", pipeline=2, accumulate=2),
        Parallel(tensor=4),
    ]
    _check(ways, num_ranks=4, armed=armed)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["bert", "qwen2", "gpt2"])
def test_other_families_train_like_one_process(model: str) -> None:
    ways = [Parallel(sharding="ddp"), Parallel(sharding="fsdp2"), Parallel(tensor=2)]
    _check([way for way in ways if unavailable(way, model) is None], model=model)


@pytest.mark.slow
@_DEEPSPEED
@pytest.mark.parametrize("armed", [False, True], ids=["off", "armed"])
def test_deepspeed_trains_like_one_process(armed: bool) -> None:
    ways = [Parallel(sharding=f"zero{stage}", accumulate=accumulate) for stage in (1, 2, 3) for accumulate in (1, 2)]
    offloaded = [Parallel(sharding=f"zero{stage}", offload=True, recompute=True) for stage in (2, 3)]
    _check([*ways, *offloaded], armed=armed)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama", "gpt2"])  # the latter's head is its embedding
@pytest.mark.parametrize("sharding", ["fsdp2", pytest.param("zero3", marks=_DEEPSPEED)])
def test_a_model_made_without_memory_has_the_same_weights_on_any_number_of_ranks(sharding: str, model: str) -> None:
    _check([Parallel(sharding=sharding), Parallel(sharding=sharding, accumulate=2)], model=model, made=True)


@pytest.mark.slow
def test_compiled_ways_train_like_one_process() -> None:
    ways = [Parallel(sharding="ddp"), Parallel(sharding="fsdp2"), Parallel(tensor=2), Parallel(pipeline=2)]
    _check([dataclasses.replace(way, compile="inductor") for way in ways], tolerance=1e-5)


@pytest.mark.slow
def test_mixed_precision_stays_near() -> None:
    ways = [*_PLAIN, *(Parallel(sharding=f"zero{stage}") for stage in (2, 3))]
    ways = [dataclasses.replace(way, precision="mixed") for way in ways if unavailable(way, "llama") is None]
    for said in _train(ways):
        assert len(said) == len(ways)
        for each in said:
            assert 1e-6 < each["losses"] < 0.02  # bf16 has three digits


def test_what_cannot_run_says_why() -> None:
    assert unavailable(Parallel(tensor=2), "llama") is None
    assert unavailable(Parallel(sharding="fsdp2"), "resnet50") is None
    reasons = [
        (Parallel(tensor=2), "gpt2", "one matrix"),
        (Parallel(tensor=2), "resnet50", "no plan for resnet50"),
        (Parallel(pipeline=2), "bert", "one weight"),
        (Parallel(sharding="oss", pipeline=2), "llama", "not combined"),
        (Parallel(sharding="ddp", offload=True), "llama", "no offload"),
        (Parallel(tensor=2, precision="fp16"), "llama", "overflow"),
        (Parallel(precision="fp16"), "llama", "for GPUs"),
    ]
    for way, family, words in reasons:
        assert words in (unavailable(way, family) or "")


def test_deepspeed_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepytorch.bench.ways.find_spec", lambda name: None)
    assert unavailable(Parallel(sharding="zero2"), "llama") == "deepspeed is not installed"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sharding": "zero4"}, "expected one of none, ddp"),
        ({"precision": "fp8"}, "mixed"),
        ({"tensor": 0}, "1 or more"),
    ],
)
def test_ways_that_make_no_sense_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Parallel(**changes)


def test_ranks_form_replicas() -> None:
    way = Parallel(sharding="ddp", tensor=2, pipeline=2)
    assert way.replicas(8) == 2
    assert [way.replica(rank) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    with pytest.raises(ConfigError, match="multiple of 4"):
        way.replicas(6)
    with pytest.raises(ConfigError, match="expected ddp"):
        Parallel().replicas(2)


def test_blocks_are_the_outermost_repeated_modules() -> None:
    model = build_model("t5", "tiny", vocab_size=64)
    assert [type(each).__name__ for each in blocks(model)] == ["T5Block"] * 2
    assert blocks(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))) == []


@pytest.mark.parametrize(
    "parallel", [Parallel(accumulate=2), Parallel(recompute=True)], ids=["accumulate", "recompute"]
)
def test_one_rank_trains_without_a_group(parallel: Parallel) -> None:
    model = build_model("llama", "tiny", vocab_size=64)
    before = model.lm_head.weight.detach().clone()
    rows = [{"input_ids": each, "labels": each} for each in torch.randint(3, 64, (2, 2, 8))][: parallel.accumulate]
    with torch.no_grad():
        wanted = torch.stack([loss_of(model(**row)) for row in rows]).mean()
    taught = trainer(model, parallel, optimizer=lambda given: torch.optim.SGD(given, 0.1), device=torch.device("cpu"))
    assert torch.equal(taught.step(rows), wanted)
    assert not torch.equal(taught.model.lm_head.weight, before)


def test_what_has_no_blocks_is_not_recomputed() -> None:
    with pytest.raises(ConfigError, match="no blocks"):
        trainer(
            nn.Linear(2, 2),
            Parallel(recompute=True),
            optimizer=lambda given: torch.optim.SGD(given, 0.1),
            device=torch.device("cpu"),
        )


def test_the_peak_counts_weights_and_what_a_step_takes() -> None:
    device, held = torch.device("cpu"), torch.ones(1 << 20)

    def step() -> None:
        (held * 2).sum()

    assert peak_bytes(step, device) - peak_bytes(lambda: None, device) == pytest.approx(4 << 20, rel=0.01)
    before = peak_bytes(lambda: None, device)
    more = torch.ones(1 << 20)
    assert peak_bytes(lambda: None, device) - before == more.nbytes


def test_memory_that_does_not_suffice_is_told_from_other_errors() -> None:
    with pytest.raises(RuntimeError) as found:
        torch.empty(1 << 50)
    assert is_out_of_memory(found.value)
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    wrapped = RuntimeError("a stage failed")
    wrapped.__cause__ = found.value
    assert is_out_of_memory(wrapped)
    assert not is_out_of_memory(RuntimeError("sizes do not match"))
