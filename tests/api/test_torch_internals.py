"""The list of torch's private names is complete, and this torch has each of them."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from deepytorch.torch_internals import INTERNALS, Internal, troubles
from tests.api.private_names import _Reader, names_used


def test_the_list_is_what_the_sources_use() -> None:
    used = names_used()
    listed = {each.name: set(each.calls) for each in INTERNALS}
    assert len(listed) == len(INTERNALS)
    assert sorted(used.keys() - listed.keys()) == [], "used, but not listed in torch_internals"
    assert sorted(listed.keys() - used.keys()) == [], "listed in torch_internals, but not used any more"
    assert listed == used


def test_this_torch_has_what_is_used() -> None:
    assert troubles() == {}


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
    _Reader(found).visit(ast.parse(source))
    calls = {name: found[name] for name in found if found[name]}
    assert calls == {
        "torch._inductor.config.get_type": {(1, ())},
        "torch._C._first": {(1, ("two",))},
        "torch._guards.detect_fake_mode": {(1, ())},
        "torch._dynamo.reset": {(0, ())},
    }
    assert not any("hidden" in name or "mine" in name for name in found)


def test_the_table_is_printed() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "deepytorch.torch_internals"], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-2000:]
    assert f"{len(INTERNALS)} of {len(INTERNALS)} are as expected." in done.stdout
