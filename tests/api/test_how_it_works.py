"""What docs/how-it-works.md says of a settled step is what a profile shows; what is for GPUs stays unloaded."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.cold import run_cold

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-it-works.md"

PROFILE = """
import json, sys
from tests.count import files_of_a_settled_step
called = files_of_a_settled_step()
apart = [name for name in sys.modules if ".step.rounding" in name or ".group.devices" in name]
print(json.dumps({"called": called, "apart": apart}))
"""
GROUP = """
import os, sys, tempfile, torch, deepytorch
import torch.distributed as dist
store = "file://" + os.path.join(tempfile.mkdtemp(), "store")
dist.init_process_group("deepytorch", init_method=store, rank=0, world_size=1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
dist.destroy_process_group()
print([name for name in sys.modules if ".group.devices" in name])
"""


@pytest.fixture(scope="module")
def profile() -> dict[str, list[str]]:
    return json.loads(_python(PROFILE))


def test_the_page_names_every_file_of_a_settled_step(profile: dict[str, list[str]]) -> None:
    section = PAGE.read_text().partition("### A settled step")[2].partition("\n#")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    always, named, called = _files("\n".join(rows)), _files(section), set(profile["called"])
    assert always, "the page has no table of a settled step"
    assert called - named == set(), "called in a settled step, and not on the page"
    assert always - called == set(), "in the page's table, and not called in a settled step"


def test_what_is_for_gpus_stays_unloaded(profile: dict[str, list[str]]) -> None:
    assert profile["apart"] == []
    assert _python(GROUP).strip() == "[]"


def _files(text: str) -> set[str]:
    return set(re.findall(r"`((?:comm|compiler|deepytorch|passes)/[\w/]+\.py)`", text))


def _python(code: str) -> str:
    return run_cold(code, cwd=ROOT).stdout.strip().splitlines()[-1]
