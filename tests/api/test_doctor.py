"""`deepytorch doctor` says what is there, what is missing and how to get it, on any machine."""

from __future__ import annotations

import copy
import io
import json
import os
import re
import stat
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
from rich.console import Console

from deepytorch import doctor
from deepytorch.run_hook import FOLDER
from deepytorch.supported_versions import PYTHON, TORCH, TRANSFORMERS, TRITON_OF_TORCH

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def found():
    return doctor.collect()


def rendered(found) -> str:
    console = Console(file=io.StringIO(), width=2000)
    console.print(doctor.render(found))
    return console.file.getvalue()


def lacks(found) -> str:
    return "\n".join(f"{item['what']} | {item['needed_for']} | {item['how']}" for item in doctor.missing(found))


def test_answer_is_plain_json(found):
    assert json.loads(json.dumps(found)) == found


def test_versions_are_those_installed(found):
    assert found["packages"]["torch"] == metadata.version("torch")
    assert found["packages"]["torch"] in (torch.__version__, torch.__version__.partition("+")[0])  # +cu130
    assert found["packages"]["sympy"] == metadata.version("sympy")


def test_devices_are_those_of_this_machine(found):
    assert found["cpu"]["capability"] == torch.backends.cpu.get_cpu_capability()
    assert found["cpu"]["usable_cores"] == len(os.sched_getaffinity(0))
    assert found["cuda"]["available"] == torch.cuda.is_available()
    assert len(found["cuda"]["devices"]) == torch.cuda.device_count()
    assert (found["cuda"]["reason"] is None) == torch.cuda.is_available()
    assert found["distributed"]["gloo"] == torch.distributed.is_gloo_available()


def test_backend_is_registered_here(found):
    assert found["backend"] == {
        "registered": True,
        "target": "deepytorch.compiler.backend:deepytorch_backend",
        "reason": None,
    }


def test_everything_found_is_shown(found):
    text = rendered(found)
    for value in (
        found["packages"]["torch"],
        found["cpu"]["model"],
        found["cache"]["path"],
        found["backend"]["target"],
    ):
        assert value in text
    for item in found["missing"]:
        assert item["what"] in text
        assert item["how"] in text


def test_markup_in_what_is_found_is_shown_as_it_is(found):
    odd = copy.deepcopy(found)
    odd["cpu"]["model"] = "[bold]odd[/bold] CPU [/]"
    odd["missing"] = [{"what": "[red]w[/]", "needed_for": "n", "how": "pip install 'deepytorch[hf]'"}]
    text = rendered(odd)
    assert "[bold]odd[/bold] CPU [/]" in text
    assert "pip install 'deepytorch[hf]'" in text


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("packages", "transformers"), None, ["transformers", "pip install 'deepytorch[hf]'"]),
        (
            ("compilers", "cpp"),
            {"usable": False, "reason": "g++ is not on PATH"},
            ["g++ is not on PATH", "aot_eager", "CXX"],
        ),
        (
            ("compilers", "triton"),
            {"version": "3.9.0", "paired": "3.7", "usable": False},
            ["found 3.9.0", "triton==3.7.*"],
        ),
        (("backend",), {"registered": False, "reason": "no entry point"}, ["no entry point", "pip install"]),
        (("distributed", "gloo"), False, ["gloo", "torch.distributed"]),
        (("environment",), {"DEEPYTORCH": "off"}, ["DEEPYTORCH=off", "unset DEEPYTORCH"]),
        (("cache", "writable"), False, ["cache folder", "writable"]),
        (("cache", "open_to_others"), True, ["chmod 700"]),
    ],
)
def test_each_thing_missing_is_named_with_how_to_get_it(found, path, value, words):
    without = copy.deepcopy(found)
    place = without
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    new = set(lacks(without).splitlines()) - set(lacks(found).splitlines())
    assert len(new) == 1
    assert all(word in next(iter(new)) for word in words), new


@pytest.mark.parametrize(
    ("path", "version", "words"),
    [
        (("packages", "torch"), "2.9.1", ("torch 2.9.1", "2.11 to 2.15", "install torch 2.11 to 2.15")),
        (("packages", "torch"), "2.16.0a0+git12", ("torch 2.16.0a0", "2.11 to 2.15", "-m deepytorch.torch_internals")),
        (("packages", "torch"), "3.0.0", ("torch 3.0.0", "2.11 to 2.15", "-m deepytorch.torch_internals")),
        (("packages", "transformers"), "4.56.2", ("transformers 4.56.2", "4.57 to 5.x", "install transformers")),
        (("packages", "transformers"), "6.0.0", ("transformers 6.0.0", "4.57 to 5.x", "deepytorch verify")),
        (("python", "version"), "3.9.18", ("Python 3.9.18", "3.10 to 3.13", "install Python")),
        (("python", "version"), "3.14.0rc1", ("Python 3.14.0rc1", "3.10 to 3.13", "deepytorch verify")),
    ],
)
def test_versions_outside_of_the_tested_ranges_are_warned_of(found, path, version, words):
    other = copy.deepcopy(found)
    other[path[0]][path[1]] = version
    (warning,) = doctor.untested(other)
    assert all(word in shown for word, shown in zip(words, warning.values(), strict=True)), warning
    other["untested"] = [warning]
    assert all(text in rendered(other) for text in ("Not tested", *warning.values()))


@pytest.mark.parametrize("torch_version", ["2.11.0", "2.12.1+cu130", "2.15.0", "2.15.1a0+git1234"])
@pytest.mark.parametrize("transformers_version", [None, "4.57.0", "4.57.6", "5.0.0", "5.23.0"])
def test_versions_in_the_tested_ranges_are_not(found, torch_version, transformers_version):
    other = copy.deepcopy(found)
    other["packages"] |= {"torch": torch_version, "transformers": transformers_version}
    for python_version in ("3.10.0", "3.13.9"):
        other["python"]["version"] = python_version
        assert doctor.untested(other) == []


def test_a_torch_whose_triton_is_not_known_is_not_told_to_change_it(found):
    other = copy.deepcopy(found)
    other["compilers"]["triton"] = {"version": "4.0.0", "paired": None, "usable": False, "reason": "no device"}
    other["cuda"]["available"] = True
    assert "None" not in lacks(other)
    assert "the Triton of this torch" not in lacks(other)


def test_the_ranges_are_those_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == f">={dotted(PYTHON.oldest)}"
    prefix = "Programming Language :: Python :: 3."
    minors = [int(each.removeprefix(prefix)) for each in project["classifiers"] if each.startswith(prefix)]
    assert [(3, minor) for minor in minors] == [(3, n) for n in range(PYTHON.oldest[1], PYTHON.newest[1] + 1)]
    (torch_needed,) = [each for each in project["dependencies"] if re.match(r"torch\b", each)]
    assert torch_needed == f"torch>={dotted(TORCH.oldest)}", "an upper bound would replace the torch of a user"
    (transformers_needed,) = [each for each in project["optional-dependencies"]["hf"] if "transformers" in each]
    assert transformers_needed == f"transformers>={dotted(TRANSFORMERS.oldest)}"
    assert list(TRITON_OF_TORCH) == [f"2.{n}" for n in range(TORCH.oldest[1], TORCH.newest[1] + 1)]


def dotted(numbers) -> str:
    return ".".join(map(str, numbers))


def test_nothing_missing_is_said(found):
    complete = copy.deepcopy(found)
    complete["missing"] = []
    assert "Nothing is missing." in rendered(complete)


def test_compiler_that_is_not_there(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    cpp = doctor.collect()["compilers"]["cpp"]
    assert not cpp["usable"]
    assert cpp["reason"] == "none of no-such-compiler is on PATH"


def test_compiler_without_the_headers_is_not_usable(monkeypatch, tmp_path):
    compiler = tmp_path / "poor++"
    compiler.write_text(
        """#!/bin/sh
[ "$1" = --version ] && echo "poor 1.0" && exit 0
echo "probe.cpp:2: fatal error: omp.h: No such file" >&2
exit 1
"""
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    answer = doctor.collect()
    cpp = answer["compilers"]["cpp"]
    assert (cpp["version"], cpp["usable"]) == ("poor 1.0", False)
    assert "omp.h" in cpp["reason"]
    assert any("omp.h" in item["what"] for item in answer["missing"])


def test_cache_folder_is_looked_at_and_not_made(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    cache = doctor.collect()["cache"]
    assert (cache["exists"], cache["writable"], cache["num_files"]) == (False, True, 0)
    assert not (tmp_path / "caches").exists()


def test_cache_folder_open_to_others_is_said(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "deepytorch"
    folder.mkdir(mode=0o700)
    (folder / "rows.json").write_text("[]" * 50)
    cache = doctor.collect()["cache"]
    assert (cache["exists"], cache["open_to_others"], cache["num_files"], cache["size_bytes"]) == (True, False, 1, 100)
    folder.chmod(0o755)
    cache = doctor.collect()["cache"]
    assert cache["open_to_others"]
    assert cache["mode"] == "0755" == f"{stat.S_IMODE(Path(cache['path']).stat().st_mode):04o}"


def test_the_command_that_started_the_process_is_told(monkeypatch):
    monkeypatch.setenv("DEEPYTORCH_RUN", "on")
    answer = doctor.collect()
    assert answer["run"].startswith("started this process, and has no effect in it")
    monkeypatch.setattr(sys, "path", [FOLDER, *sys.path])
    assert "train with the import" in rendered(doctor.collect())
    monkeypatch.delenv("DEEPYTORCH_RUN")
    assert doctor.collect()["run"] == "did not start this process"


def test_environment_holds_our_variables_only(monkeypatch):
    monkeypatch.delenv("DEEPYTORCH_COMPILE")
    monkeypatch.setenv("DEEPYTORCH", "off")
    monkeypatch.setenv("SECRET_TOKEN", "hidden")
    answer = doctor.collect()
    assert answer["environment"] == {"DEEPYTORCH": "off"}
    assert "hidden" not in json.dumps(answer)
