"""The Hugging Face Trainer and Accelerate with nothing but the import, against the same script without it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cold import run_cold

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

TRAINER = """
import json, os, sys
import deepytorch
if os.environ.get("DEEPYTORCH") != "off":
    deepytorch.configure(options={"lowering": "aot_eager"})
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
folder = sys.argv[1]
torch.manual_seed(0)
config = LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=64,
                     max_position_embeddings=64)
model = LlamaForCausalLM(config)
generator = torch.Generator().manual_seed(0)
rows = []
for number in range(48):
    length = int(torch.randint(4, 30, (), generator=generator))
    rows.append(torch.randint(3, 64, (length,), generator=generator))
def collate(chosen):
    width = max(len(row) for row in chosen)
    ids = torch.zeros(len(chosen), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for place, row in enumerate(chosen):
        ids[place, : len(row)] = row
        mask[place, : len(row)] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
arguments = TrainingArguments(
    folder, per_device_train_batch_size=4, per_device_eval_batch_size=3, max_steps=6, logging_steps=1, eval_steps=3,
    eval_strategy="steps", save_steps=3, learning_rate=1e-2, report_to=[], use_cpu=True, disable_tqdm=True, seed=0,
    remove_unused_columns=False, label_names=["labels"])
texts = []
class Speaks(TrainerCallback):  # with a key-value cache, in the middle of training
    def on_step_end(self, *_, model=None, **__):
        model.eval()
        with torch.no_grad():
            texts.append(model.generate(rows[1][None], max_new_tokens=4, do_sample=False, use_cache=True).tolist())
        model.train()
trainer = Trainer(model, arguments, collate, train_dataset=rows, eval_dataset=rows[:9], callbacks=[Speaks()])
trainer.train()
resumed = len(sys.argv) > 2
if resumed:
    trainer.args.max_steps = 8
    trainer.train(resume_from_checkpoint=sys.argv[2])
with torch.no_grad():
    text = model.generate(rows[0][None], max_new_tokens=5, do_sample=False)
history = trainer.state.log_history
found = {
    "losses": [entry["loss"] for entry in history if "loss" in entry],
    "eval": [entry["eval_loss"] for entry in history if "eval_loss" in entry],
    "names": sorted({name for entry in history for name in entry if name.startswith("deepytorch/")}),
    "in_eval": [each for entry in history if "eval_loss" in entry for each in entry if "deepy" in each],
    "text": text.tolist(),
    "texts": texts,
    "keys": sorted(torch.load(folder + "/checkpoint-3/optimizer.pt", weights_only=False)),
    "report": deepytorch.report().to_json(),
    "type": type(trainer.model).__name__,
}
print("FOUND" + json.dumps(found))
"""


def run(script: str, *arguments: str, **environment: str) -> dict:
    done = run_cold(script, *arguments, env={"TQDM_DISABLE": "1", **environment}, timeout=280)
    [line] = [line for line in done.stdout.splitlines() if line.startswith("FOUND")]
    return json.loads(line.removeprefix("FOUND"))


@pytest.mark.slow
def test_a_trainer_script_trains_alike_and_faster_with_the_import_alone(tmp_path: Path) -> None:
    plain = run(TRAINER, str(tmp_path / "plain"), DEEPYTORCH="off")
    ours = run(TRAINER, str(tmp_path / "ours"))
    assert ours["losses"] == pytest.approx(plain["losses"], rel=1e-4)
    assert ours["eval"] == pytest.approx(plain["eval"], rel=1e-4)
    assert ours["text"] == plain["text"]
    assert ours["texts"] == plain["texts"]
    assert len(ours["losses"]) == 6
    assert ours["type"] == plain["type"] == "LlamaForCausalLM"
    assert ours["keys"] == plain["keys"]
    packed = {each["name"]: each["steps_packed"] + each["steps_profiled"] for each in ours["report"]["regions"]}
    evaluated = packed.pop("model entry of LlamaForCausalLM, without gradients")
    assert sum(packed.values()) == 6
    assert evaluated == 6  # and none of the calls that generate
    assert ours["report"]["recompiles"] <= 1
    assert plain["report"]["regions"] == []
    assert "deepytorch/real_token_fraction" in ours["names"]
    assert "deepytorch/steps_packed" in ours["names"]
    assert ours["in_eval"] == []
    assert plain["names"] == []


@pytest.mark.slow
def test_a_trainer_goes_on_from_a_checkpoint_of_the_other(tmp_path: Path) -> None:
    run(TRAINER, str(tmp_path / "plain"), DEEPYTORCH="off")
    run(TRAINER, str(tmp_path / "ours"))
    crossed = run(TRAINER, str(tmp_path / "crossed"), str(tmp_path / "plain" / "checkpoint-6"))
    back = run(TRAINER, str(tmp_path / "back"), str(tmp_path / "ours" / "checkpoint-6"), DEEPYTORCH="off")
    assert crossed["losses"][-2:] == pytest.approx(back["losses"][-2:], rel=1e-3)


ACCELERATE = """
import json, pickle
import torch
if {imported}:
    import deepytorch
from accelerate import Accelerator
from accelerate.utils import DynamoBackend, TorchDynamoPlugin
import deepytorch
plugin = TorchDynamoPlugin(backend="deepytorch", options={{"lowering": "aot_eager"}})
accelerator = Accelerator(cpu=True, dynamo_plugin=plugin)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = accelerator.prepare(model, optimizer)
for _ in range(2):
    accelerator.backward(model(torch.ones(3, 4)).sum())
    optimizer.step()
member = DynamoBackend("DEEPYTORCH")
assert member is DynamoBackend("DEEPYTORCH") and member.value == "DEEPYTORCH"
assert DynamoBackend("INDUCTOR") is DynamoBackend.INDUCTOR
try:
    DynamoBackend("DEEPTORCH")
except ValueError:
    pass
else:
    raise AssertionError("any name is taken")
found = {{"type": type(model).__name__, "regions": len(deepytorch.report().to_json()["regions"])}}
print("FOUND" + json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.parametrize("imported", [True, False], ids=["first", "last"])
def test_accelerate_takes_the_name(imported: bool) -> None:
    found = run(ACCELERATE.format(imported=imported))
    assert found == {"type": "OptimizedModule", "regions": 1}


NAMED = """
import json
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
                                     vocab_size=64, max_position_embeddings=64))
def collate(rows):
    mask = torch.tensor([[1] * 9, [1] * 5 + [0] * 4])
    ids = torch.randint(3, 64, (2, 9))
    return {{"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}}
{first}
arguments = TrainingArguments("{folder}", per_device_train_batch_size=2, max_steps=2, report_to=[], use_cpu=True,
                              disable_tqdm=True, save_strategy="no", remove_unused_columns=False, torch_compile=True,
                              torch_compile_backend="deepytorch")
Trainer(model, arguments, collate, train_dataset=list(range(4))).train()
import deepytorch
print("FOUND" + json.dumps(deepytorch.report().to_json()))
"""


@pytest.mark.slow
def test_the_trainer_takes_the_name(tmp_path: Path) -> None:
    found = run(NAMED.format(first="import deepytorch", folder=tmp_path))
    assert found["steps_packed"] + found["steps_profiled"] == 2
    assert len(found["regions"]) == 1
