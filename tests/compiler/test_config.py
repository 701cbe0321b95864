"""Options are accepted with their meaning or refused with what to do; nothing is ignored."""

from __future__ import annotations

import json
import re
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest
import torch

from deepytorch.compiler.config import MODES, CompilerConfig
from deepytorch.config import Environment
from deepytorch.errors import ConfigError


def test_defaults():
    config = CompilerConfig.parse()
    assert config == CompilerConfig()
    assert (config.lowering, config.unpad, config.loss_rows, config.defer_outputs) == ("inductor", True, True, True)
    assert config.inductor_options() == {}


def test_config_is_frozen_hashable_and_json():
    options = {"unpad": False, "triton.cudagraphs": True, "max_autotune_gemm_backends": "ATEN"}
    config = CompilerConfig.parse(options=options)
    with pytest.raises(FrozenInstanceError):
        config.unpad = True
    assert hash(config) == hash(CompilerConfig.parse(options=options))
    assert config == CompilerConfig.parse(options=options)
    assert len({config, replace(config, unpad=True), CompilerConfig()}) == 3
    assert json.loads(json.dumps(config.to_json()))["inductor"] == {
        "max_autotune_gemm_backends": "ATEN",
        "triton.cudagraphs": True,
    }


def test_ours_and_inductors_options_stand_side_by_side(tmp_path):
    config = CompilerConfig.parse(
        options={
            "lowering": "aot_eager",
            "loss-rows": False,
            "min_padding": 0.25,
            "dump_graphs": tmp_path,
            "max-autotune": True,
            "triton.cudagraphs": False,
            "inductor": {"epilogue_fusion": False},
        }
    )
    assert (config.lowering, config.loss_rows, config.min_padding) == ("aot_eager", False, 0.25)
    assert config.dump_graphs == str(tmp_path)
    assert config.inductor == {"max_autotune": True, "triton.cudagraphs": False, "epilogue_fusion": False}


@pytest.mark.parametrize("mode", [None, *MODES])
def test_modes_mean_what_they_mean_to_inductor(mode):
    stock = torch._inductor.list_mode_options(mode) if mode else {}
    assert CompilerConfig.parse(mode=mode).inductor_options() == stock
    assert CompilerConfig.parse(mode, {"max_autotune": False}).inductor_options() == {**stock, "max_autotune": False}


@pytest.mark.parametrize(
    "options, said",
    [
        ({"unpads": True}, "did you mean 'unpad'"),
        ({"defer_output": True}, "did you mean 'defer_outputs'"),
        ({"triton.cudagraph": True}, "did you mean 'triton.cudagraphs'"),
        ({"xyzzy": 1}, "leave it out"),
        ({"outputs": "zeros"}, "option 'outputs' is 'zeros'; .* leave it out"),
        ({3: 1}, "option 3 is not known"),
        ({"unpad": 1}, "unpad is 1; expected True or False"),
        ({"loss_rows": "yes"}, "loss_rows is 'yes'"),
        ({"min_padding": 1.5}, "from 0 to 1"),
        ({"min_padding": True}, "from 0 to 1"),
        ({"min_padding": float("nan")}, "from 0 to 1"),
        ({"lowering": "aot"}, "one of inductor, aot_eager, eager"),
        ({"dump_graphs": 3}, "a directory"),
        ({"dump_graphs": ""}, "a directory"),
        ({"triton.cudagraphs": "yes"}, "a value of type bool"),
        ({"inductor": {"nonsense_option": 1}}, "'nonsense_option' is not known"),
        ({"inductor": 3}, "a dict of Inductor's options"),
        (["unpad"], "expected a dict"),
    ],
)
def test_what_is_not_accepted_is_refused_with_advice(options, said):
    with pytest.raises(ConfigError, match=said):
        CompilerConfig.parse(options=options)


def test_mode_may_stand_among_the_options():
    assert CompilerConfig.parse(options={"mode": "reduce-overhead"}) == CompilerConfig.parse("reduce-overhead")
    assert CompilerConfig.parse("reduce-overhead", {"mode": "reduce-overhead"}).mode == "reduce-overhead"
    with pytest.raises(ConfigError, match="leave one out"):
        CompilerConfig.parse("default", {"mode": "reduce-overhead"})


@pytest.mark.parametrize("mode", ["fast", "lite", 3])
def test_unknown_mode_is_refused(mode):
    with pytest.raises(ConfigError, match="one of default, reduce-overhead"):
        CompilerConfig.parse(mode)


def test_unknown_keyword_is_refused():
    with pytest.raises(ConfigError, match="unpad"):
        CompilerConfig.parse(None, None, {"unpad": True})


def test_custom_pass_in_options_is_kept_and_told_apart():
    class Identity(torch._inductor.custom_graph_pass.CustomGraphPass):
        def __call__(self, graph):
            pass

        def uuid(self):
            return b"identity"

    each = Identity()
    config = CompilerConfig.parse(options={"post_grad_custom_pre_pass": each})
    assert config.inductor["post_grad_custom_pre_pass"] is each
    assert "identity" in config.to_json()["inductor"]["post_grad_custom_pre_pass"]


# the environment


def test_environment_defaults_to_on():
    assert Environment.read({}) == Environment(enabled=True, log_level=None)
    assert Environment.read({"DEEPYTORCH": ""}).enabled


def test_environment_is_read():
    assert Environment.read({"DEEPYTORCH": "off", "DEEPYTORCH_LOG": "DEBUG"}) == Environment(False, "debug")
    assert Environment.read({"DEEPYTORCH": "ON"}).enabled


def test_environment_asks_for_comparisons():
    assert not Environment.read({"DEEPYTORCH": "on", "DEEPYTORCH_VERIFY_EVERY": "7"}).verify
    found = Environment.read({"DEEPYTORCH": "Verify"})
    assert (found.enabled, found.verify, found.verify_every) == (True, True, 50)
    assert Environment.read({"DEEPYTORCH": "verify", "DEEPYTORCH_VERIFY_EVERY": " 7 "}).verify_every == 7
    assert Environment.read({"DEEPYTORCH_VERIFY_EVERY": ""}).verify_every == 50


def test_environment_of_the_process(monkeypatch):
    monkeypatch.setenv("DEEPYTORCH", "off")
    assert not Environment.read().enabled


@pytest.mark.parametrize(
    "variables",
    [
        {"DEEPYTORCH": "no"},
        {"DEEPYTORCH_LOG": "loud"},
        *({"DEEPYTORCH_VERIFY_EVERY": value} for value in ("0", "-1", "2.5", "often", "²")),
    ],
)
def test_environment_refuses_what_it_does_not_know(variables):
    with pytest.raises(ConfigError, match="or unset it"):
        Environment.read(variables)


def test_environment_is_read_in_one_place():
    root = Path(__file__).parents[2]
    for folder in ("compiler", "passes", "comm"):
        for path in (root / folder).rglob("*.py"):
            assert not re.search(r"os\.environ|getenv", path.read_text()), path
