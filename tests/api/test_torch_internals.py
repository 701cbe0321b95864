"""The list of torch's private names is complete, and this torch has each of them."""

from __future__ import annotations

import ast
import functools

import pytest
import torch

from deepytorch.supported_versions import TORCH
from deepytorch.torch_internals import ALIASES, ATTRIBUTES, INTERNALS, Attribute, Internal, troubles
from tests.api.private_names import Reader, attributes_used, names_used, names_used_elsewhere
from tests.cold import run_cold
from tests.warm import run_script


def test_the_list_is_what_the_sources_use() -> None:
    used = names_used()
    listed = {each.name: set(each.calls) for each in INTERNALS}
    assert len(listed) == len(INTERNALS)
    assert sorted(used.keys() - listed.keys()) == [], "used, but not listed in torch_internals"
    assert sorted(listed.keys() - used.keys()) == [], "listed in torch_internals, but not used any more"
    assert listed == used


def test_nobody_else_uses_one() -> None:
    assert sorted(names_used_elsewhere()) == [], "import them from deepytorch.torch_internals"


def test_attributes_of_torchs_objects_are_listed() -> None:
    assert attributes_used() == {each.name for each in ATTRIBUTES}
    assert Attribute("module", "_no_such_hooks", "a test").trouble() == "is not there"


def test_aliases_lead_to_what_is_listed() -> None:
    for alias, name in ALIASES.items():
        assert any(each.name == name or each.name.startswith(f"{name}.") for each in INTERNALS), alias


def test_a_name_that_a_torch_lacks_is_said_where_it_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALIASES, "moved_away", "torch._dynamo.moved_away")
    with pytest.raises(ImportError, match=r"has no torch\._dynamo\.moved_away, which deepytorch needs"):
        from deepytorch.torch_internals import moved_away  # noqa: F401


# The names of the list that a version of torch does not have; a new version gets its line when it is read.
LACKS: dict[str, set[str]] = {"2.11": set(), "2.12": set(), "2.13": set(), "2.14": set(), "2.15": set()}


def test_this_torch_lacks_what_is_said_of_it() -> None:
    minor = ".".join(torch.__version__.split(".")[:2])
    assert minor in LACKS, "a torch that is not in the list yet"
    assert troubles().keys() == LACKS[minor]


def test_every_version_that_is_tested_has_its_line() -> None:
    assert list(LACKS) == [f"2.{minor}" for minor in range(TORCH.oldest[1], TORCH.newest[1] + 1)]


TRAINING = """
import logging, sys
import torch
torch.__version__ = sys.argv[1]  # a torch that nobody has tested
for name in sys.argv[2:]:
    owner, _, attribute = name.rpartition(".")
    delattr(eval(owner), attribute)
import deepytorch.torch_internals
logging.basicConfig()
if deepytorch.torch_internals.is_usable():  # otherwise nothing is compiled, and nothing is loaded
    deepytorch.configure(options={"lowering": "aot_eager"})
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(2):
    loss = model(torch.ones(8, 4)).square().sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(float(loss), "deepytorch.handles" in sys.modules and bool(sys.modules["deepytorch.handles"].HANDLES))
"""


@functools.cache
def train(version: str, *names: str) -> tuple[str, str]:
    """What is printed by a script with the import, in a torch of that version without these names, and its log."""
    done = run_cold(TRAINING, version, *names, env={"PYTHONWARNINGS": "ignore"})
    return done.stdout.strip(), done.stderr


@pytest.mark.slow
def test_a_newer_torch_with_every_name_is_used_as_a_tested_one() -> None:
    tested, said = train(f"{TORCH.newest[0]}.{TORCH.newest[1]}.0")
    newer, also_said = train("2.99.0")
    assert tested == newer
    assert newer.endswith("True")
    assert "deepytorch is off" not in said + also_said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("torch._C._autograd._top_saved_tensors_default_hooks", "deepytorch is off: torch 2.99.0"),
        ("torch._C._len_torch_dispatch_stack", "deepytorch is off: torch 2.99.0"),
        ("torch.distributed.distributed_c10d._new_process_group_helper", "torch is left as it is: "),
    ],
)
def test_a_newer_torch_without_a_name_trains_as_if_nothing_was_imported(name: str, words: str) -> None:
    expected, _ = train("2.99.0")
    found, said = train("2.99.0", name)
    assert found.split()[0] == expected.split()[0]
    assert words in said
    assert name.rpartition(".")[2] in said
    if "off" in words:
        assert found.endswith("False")


@pytest.mark.parametrize(
    ("name", "calls", "words"),
    [
        ("torch._C._no_such_function", (), "is not there"),
        ("torch._no_such_module.name", (), "is not there"),
        ("torch._dynamo.config.optimize_ddp", ((0, ()),), "not to be called"),
        ("torch._dynamo.reset", ((3, ()),), "called with 3 by place"),
        ("torch._inductor.compile_fx.compile_fx", ((2, ("patches",)),), "and patches"),
    ],
)
def test_what_is_not_as_expected_is_named(name: str, calls: tuple, words: str) -> None:
    trouble = Internal(name, "a test", calls).trouble()
    assert trouble is not None
    assert words in trouble


def test_names_are_found_however_they_are_imported() -> None:
    source = """
import torch
import torch._dynamo as dynamo
from torch._guards import detect_fake_mode as detect

def one(config):
    from torch._inductor import config as inductor
    inductor.get_type("x")
    return config._mine, torch._C._first(1, two=2), detect(3)

def two(torch):
    return torch._C._hidden, dynamo.reset(), dynamo.config.__name__
"""
    found: dict = {}
    Reader(found).visit(ast.parse(source))
    calls = {name: found[name] for name in found if found[name]}
    assert calls == {
        "torch._inductor.config.get_type": {(1, ())},
        "torch._C._first": {(1, ("two",))},
        "torch._guards.detect_fake_mode": {(1, ())},
        "torch._dynamo.reset": {(0, ())},
    }
    assert not any("hidden" in name or "mine" in name for name in found)


def test_the_table_is_printed() -> None:
    script = 'import runpy\nrunpy.run_module("deepytorch.torch_internals", run_name="__main__")'
    done = run_script(script, timeout=120)
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-2000:]
    number = len(INTERNALS) + len(ATTRIBUTES)
    assert f"{number} of {number} are as expected." in done.stdout
