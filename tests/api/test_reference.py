"""The configuration reference says what the dataclasses say."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from deepytorch.comm.group.options import Options
from deepytorch.compiler.config import CompilerConfig
from deepytorch.config import Environment
from deepytorch.reference import markdown, sections

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_page_is_what_the_command_prints() -> None:
    assert PAGE.read_text(encoding="utf-8").strip() == markdown().strip(), "deepytorch config > docs/configuration.md"


def test_every_field_has_a_meaning() -> None:
    compiler, group, environment = sections()
    assert [each.name for each in compiler.settings] == [field.name for field in fields(CompilerConfig)]
    assert [each.name for each in group.settings] == [field.name for field in fields(Options)]
    assert len(environment.settings) == len(fields(Environment))
    for section in (compiler, group, environment):
        for setting in section.settings:
            assert len(setting.meaning) > 10, setting
    assert [each.name for each in environment.settings] == [
        "DEEPYTORCH",
        "DEEPYTORCH_LOG",
        "DEEPYTORCH_LINKS",
        "DEEPYTORCH",
        "DEEPYTORCH_VERIFY_EVERY",
        "DEEPYTORCH_COMPILE",
        "DEEPYTORCH_GPU_COMPILE",
        "DEEPYTORCH_RUN",
        "DEEPYTORCH_PROFILE",
        "DEEPYTORCH_CACHE_MB",
        "DEEPYTORCH_MEMORY",
    ]
    assert environment.settings[0].value == r"on\|off"
    assert [each.value for each in compiler.settings if each.name == "unpad"] == ["True"]
