"""An algorithm added by CONTRIBUTING's recipe to a copy of the sources: compiled, asked for by name, and run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.comm.ranks import run

ROOT = Path(__file__).parents[2]
PACKAGES = ("comm", "compiler", "passes", "deepytorch")

ALGORITHM = '''
"""All-reduce in which every chunk goes through the areas of the shared segment."""

from deepytorch.comm.algorithms.base import Choice, Operation
from deepytorch.comm.algorithms.shared_memory import InMemory
from deepytorch.comm.topology.cost import Links
from deepytorch.comm.topology.topology import Topology


class ThroughAreas(InMemory):
    name = "through_areas"
    kinds = ("all_reduce",)
    several_hosts = False

    def cost_us(self, operation: Operation, topology: Topology, links: Links, choice: Choice) -> float:
        return 2 * links.link("memory").time_us(operation.num_bytes)
'''

# (file, what stands there, what stands there afterwards)
EDITS = (
    (
        "comm/algorithms/select.py",
        "from deepytorch.comm.algorithms.streams import Streams\n",
        "from deepytorch.comm.algorithms.streams import Streams\n"
        "from deepytorch.comm.algorithms.through_areas import ThroughAreas\n",
    ),
    ("comm/algorithms/select.py", "Multimem(),\n)", "Multimem(), ThroughAreas(),\n)"),
    ("comm/csrc/backend.h", "_(nvlink_multimem)\n", "_(nvlink_multimem) _(through_areas)\n"),
    (
        "comm/csrc/backend/collectives.cpp",
        "row.algorithm == Algorithm::streams; }",
        "row.algorithm == Algorithm::streams || row.algorithm == Algorithm::through_areas; }",
    ),
    (
        "comm/csrc/backend/collectives.cpp",
        "  if (copies == nullptr && setup_.num_hosts == 1 && call.checked && segment->all_shared()) {\n",
        "  if (row.algorithm == Algorithm::through_areas) {\n"
        "    HostCopies areas(data);\n"
        '    std::fputs("through the areas\\n", stderr);\n'
        "    return all_reduce_through(call, areas, count, nullptr);\n"
        "  }\n"
        "  if (copies == nullptr && setup_.num_hosts == 1 && call.checked && segment->all_shared()) {\n",
    ),
)

SCRIPT = """
from deepytorch.comm.algorithms.select import explain
from deepytorch.comm.group.groups import group_of
from deepytorch.comm.group.tables import chosen
init(timeout=500, pg_options=Options(algorithm="through_areas"))
for size in (1, 1000, 3_000_001):
    mine = torch.arange(size, dtype=torch.float32) * (rank + 1)
    dist.all_reduce(mine)
    assert torch.equal(mine, torch.arange(size, dtype=torch.float32) * 3)
assert chosen(kind="all_reduce").algorithm == "through_areas"
assert chosen(kind="broadcast").algorithm == "engine"
group = group_of()
[told] = explain(group.topology, group.links, sizes=[1 << 20])
told = {each.algorithm: each for each in told.predictions}
assert told["through_areas"].time_us > told["shared_memory"].time_us > 0
dist.destroy_process_group()
"""


@pytest.mark.matrix  # compiles all of the C++
def test_an_algorithm_by_the_recipe(tmp_path: Path) -> None:
    for name in PACKAGES:
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "comm/algorithms/through_areas.py").write_text(ALGORITHM.lstrip())
    for name, before, after in EDITS:
        text = (tmp_path / name).read_text()
        assert text.count(before) == 1, (name, before)
        (tmp_path / name).write_text(text.replace(before, after))
    outputs = run(SCRIPT, 2, 550, env={"PYTHONPATH": str(tmp_path)}, warm=False)
    assert all(output.count("through the areas") == 3 for output in outputs), outputs
