"""What is changed of other people's stands in one ledger, and `disable()` takes all of it back."""

from __future__ import annotations

import types

import pytest

from deepytorch import patches
from deepytorch.patches import Patch, forget, ledger, listen, patch, replace
from deepytorch.switch import SWITCH
from tests.warm import run_script


@pytest.fixture(autouse=True)
def _own_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patches, "_LEDGER", {})
    monkeypatch.setattr(SWITCH, "enabled", True)


class Owner:
    def call(self, value: int) -> int:
        """Of the owner's."""
        return value

    @classmethod
    def kind(cls) -> str:
        return cls.__name__


class Heir(Owner):
    pass


def _plus_one(original):
    def wrapper(self, value):
        return original(self, value) + 1

    return wrapper


@pytest.mark.parametrize("owner", [Owner, Heir])
def test_an_attribute_is_replaced_once_and_comes_back_as_it_was(owner: type) -> None:
    before = dict(vars(owner))
    for _ in range(2):
        replace(owner, "call", _plus_one, "to count")
    assert owner().call(1) == 2
    assert owner.call.__doc__ == "Of the owner's."
    [entry] = ledger()
    assert (entry.where, entry.why, entry.applied) == (f"{__name__}.{owner.__name__}.call", "to count", True)
    patches.undo_all()
    assert dict(vars(owner)) == before
    assert not entry.applied
    patches.apply_all()
    assert owner().call(1) == 2
    patches.undo_all()
    assert dict(vars(owner)) == before


def test_a_class_method_and_a_name_of_a_module_come_back_too() -> None:
    module = types.ModuleType("some_host")
    module.helper = len
    replace(module, "helper", lambda original: lambda value: original(value) + 1, "to count")
    replace(Owner, "kind", lambda original: classmethod(lambda cls: original() + "!"), "to shout")
    assert (module.helper([]), Owner.kind()) == (1, "Owner!")
    assert [entry.where for entry in ledger()] == ["some_host.helper", f"{__name__}.Owner.kind"]
    before = vars(Owner)["kind"]
    patches.undo_all()
    assert module.helper is len
    assert Owner.kind() == "Owner"
    assert isinstance(vars(Owner)["kind"], classmethod)
    assert vars(Owner)["kind"] is not before


def test_what_somebody_else_has_wrapped_stays_and_is_said_so() -> None:
    module = types.ModuleType("some_host")
    module.helper = len
    replace(module, "helper", lambda original: lambda value: original(value) + 1, "to count")
    ours = module.helper
    module.helper = theirs = lambda value: 10 * ours(value)
    patches.undo_all()
    assert module.helper is theirs
    assert ledger()[0].applied


def test_while_disabled_changes_are_noted_and_made_by_enable() -> None:
    made: list[str] = []
    SWITCH.enabled = False
    patch("one", "why", lambda: made.append("one"), lambda: made.remove("one"))
    patch("two", "why", lambda: made.append("two"), lambda: made.remove("two"), always=True)
    assert made == ["two"]
    SWITCH.enabled = True
    patches.apply_all()
    assert made == ["two", "one"]
    patches.undo_all()
    assert made == []
    forget("one")
    assert [entry.where for entry in ledger()] == ["two"]


def test_a_listener_says_farewell_before_it_is_removed() -> None:
    heard: list[str] = []

    def register(function):
        heard.append("registered")
        return types.SimpleNamespace(remove=lambda: heard.append("removed"))

    def on_step() -> None: ...

    for _ in range(2):
        listen(register, on_step, "why", lambda: heard.append("farewell"))
    patches.undo_all()
    listen(register, on_step, "why", lambda: heard.append("another"))  # of what is compiled by name, after disable()
    assert heard == ["registered", "farewell", "removed", "registered"]
    assert isinstance(ledger()[0], Patch)


SNAPSHOT = """
import torch, torch.distributed.distributed_c10d as c10d, torch._dynamo, torch._inductor.config, logging
import transformers, transformers.trainer, accelerate.utils.dataclasses as accelerate
from torch.optim import optimizer
from transformers.modeling_utils import AttentionInterface

def snapshot():
    return {
        "Optimizer": dict(vars(torch.optim.Optimizer)),
        "c10d": {name: value for name, value in vars(c10d).items() if callable(value)},
        "Trainer": dict(vars(transformers.Trainer)),
        "AttentionInterface": dict(vars(AttentionInterface)),
        "DynamoBackend": dict(vars(accelerate.DynamoBackend)),
        "backends": sorted(accelerate.DynamoBackend._value2member_map_),
        "dynamo": {name: value for name, value in torch._dynamo.config.get_config_copy().items()},
        "inductor": torch._inductor.config.get_config_copy(),
        "filters": list(logging.getLogger("torch._dynamo.convert_frame").filters),
        "before steps": list(optimizer._global_optimizer_pre_hooks.values()),
        "after steps": list(optimizer._global_optimizer_post_hooks.values()),
        "parts of modules": list(torch.nn.modules.module._global_module_registration_hooks.values()),
        "parameters of modules": list(torch.nn.modules.module._global_parameter_registration_hooks.values()),
        "functional": {name: value for name, value in vars(torch.nn.functional).items() if callable(value)},
        "Tensor": {name: value for name, value in vars(torch.Tensor).items() if callable(value)},
        "Module": {name: vars(torch.nn.Module)[name] for name in ("__call__", "_call_impl", "_wrapped_call_impl")},
    }

before = snapshot()
"""


def test_after_disable_every_name_is_its_owners_again() -> None:
    script = f"""{SNAPSHOT}
import deepytorch
deepytorch.configure(options={{"lowering": "aot_eager"}})
from transformers import LlamaConfig, LlamaForCausalLM
accelerate.DynamoBackend("DEEPYTORCH")
config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
model = LlamaForCausalLM(config)
optimizer_ = torch.optim.SGD(model.parameters(), 0.1)
mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
ids = torch.randint(0, 64, (2, 4))
for _ in range(3):
    outputs = model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100))
    outputs.loss.backward()
    optimizer_.step()
    optimizer_.zero_grad()
logits = outputs.logits  # still to be computed
wanted = None
deepytorch.disable()
after = snapshot()
for kind in before:
    if isinstance(before[kind], dict):
        pairs = {{k: (before[kind].get(k), after[kind].get(k)) for k in before[kind].keys() | after[kind].keys()}}
        wrong = [k for k, (one, other) in pairs.items() if one is not other and one != other]
        assert not wrong, (kind, wrong)
    else:
        assert before[kind] == after[kind], (kind, before[kind], after[kind])
from deepytorch.patches import ledger
assert len(ledger()) >= 6 and not any(entry.applied for entry in ledger()), ledger()
weights = [each.detach().clone() for each in model.parameters()]
model(ids, attention_mask=mask, labels=ids).loss.backward()  # in eager
optimizer_.step()
assert torch.isfinite(logits + 0).all()
deepytorch.enable()
assert all(entry.applied for entry in ledger()), [entry.where for entry in ledger() if not entry.applied]
"""
    done = run_script(script, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
