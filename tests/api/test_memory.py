"""What a training leaves in memory once its script has dropped it: nothing of model, optimizer or batches."""

from __future__ import annotations

import pytest

from tests.warm import run_script

TRAININGS = """
import deepytorch
import gc, os, sys, weakref
import torch
import torch.distributed as dist
from torch import nn

kind = sys.argv[1]
if os.environ["DEEPYTORCH_COMPILE"] == "wait":
    deepytorch.configure(options={"lowering": "aot_eager"})
else:  # in its first steps a model is packed at entry as soon as that can be asked
    import deepytorch.first_steps
    deepytorch.first_steps.ASK_SECONDS = 0.0

def tower():
    return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 16)).train()

def language_model():
    import transformers
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0,
    )).train()

def rows(step):
    lengths = torch.tensor([16, 5, 9, 3 + step])
    mask = (torch.arange(16)[None] < lengths[:, None]).long()
    ids = torch.randint(3, 96, mask.shape) * mask
    return dict(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100))

held = []
def hold(*objects):
    held.extend((type(each).__name__, weakref.ref(each)) for each in objects)

def training():
    if kind == "pair":
        models = [tower(), tower()]
    else:
        models = [language_model() if kind.startswith("language") else tower()]
    optimizers = [torch.optim.AdamW(each.parameters(), 1e-3) for each in models]
    called = [nn.parallel.DistributedDataParallel(each) if kind == "parallel" else each for each in models]
    for step in range(6):
        if kind.startswith("language"):
            batch = rows(step)
            outputs = called[0](**batch)
            loss = outputs.loss
            if kind == "language, logits":  # of the tokens, without pads
                scores = outputs.logits.log_softmax(-1)[..., 1] * batch["attention_mask"]
                loss = loss + scores.sum()
            hold(outputs.logits, *batch.values())
        else:
            batch = torch.randn(8, 16)
            outputs = batch
            for each in called:
                outputs = each(outputs)
            loss = outputs.square().mean()
            hold(batch, outputs)
        loss.backward()
        for each in optimizers:
            each.step()
            each.zero_grad(set_to_none=False)
        hold(loss)
    hold(*models, *called, *optimizers, *(each for model in models for each in model.parameters()))
    hold(*(each.grad for model in models for each in model.parameters()))

if kind == "parallel":
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for _ in range(2):
    training()
    gc.collect()
    alive = [name for name, each in held if each() is not None]
    assert not alive, alive
if kind == "parallel":
    group = weakref.ref(dist.group.WORLD)
    dist.destroy_process_group()
    gc.collect()
    assert group() is None
regions = deepytorch.report().to_json()["regions"]
print(len(held), sum(each["steps_packed"] for each in regions), sum(each["compiles"] for each in regions))
"""


@pytest.mark.parametrize("mode", ["beside", "wait"])
@pytest.mark.parametrize("kind", ["language", "language, logits", "tower", "pair", "parallel"])
def test_nothing_of_ours_keeps_what_a_script_has_dropped(kind: str, mode: str) -> None:
    if kind.startswith("language"):
        pytest.importorskip("transformers")
    done = run_script(TRAININGS, kind, env={"DEEPYTORCH_COMPILE": mode}, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    held, packed, compiles = map(int, done.stdout.split())
    assert held > 20
    assert packed >= 4 or not kind.startswith("language")
    assert (compiles > 0) == (mode == "wait")
