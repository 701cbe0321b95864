"""`deepytorch doctor --topology` shows hosts, GPUs, links and network, of this machine or of a file."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from deepytorch.cli import app
from deepytorch.comm.topology.host import Gpu, Host, NetworkDevice
from deepytorch.comm.topology.topology import Topology, read_topology
from deepytorch.errors import ConfigError, DataError
from deepytorch.topology_view import collect_topology, render_topology

FIXTURES = Path(__file__).parents[1] / "comm/fixtures"


def rendered(topology: Topology) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(render_topology(topology))
    return console.file.getvalue()


def shown(*options: str) -> str:
    done = CliRunner().invoke(app, ["doctor", "--topology", *options], catch_exceptions=False)
    assert done.exit_code == 0
    return done.stdout


def test_this_machine_is_shown():
    assert f"{os.cpu_count()} processor" in shown()
    assert collect_topology().num_hosts == 1


@pytest.mark.parametrize("name", ["pcie_8gpu", "rdma_125x8", "cpu_2x2"])
def test_json_can_be_read_back(name, tmp_path):
    path = tmp_path / "again.json"
    path.write_text(shown("--json", "--file", str(FIXTURES / f"{name}.json")))
    assert read_topology(path) == read_topology(FIXTURES / f"{name}.json")


def test_equal_hosts_are_shown_once():
    text = rendered(read_topology(FIXTURES / "rdma_125x8.json"))
    assert "125 hosts, 1,000 ranks, 8 on each" in text
    assert text.count("mlx5_7") == 1
    assert "rdma (rdma-0) to rdma (rdma-124)" in text


def test_links_make_a_matrix():
    nvlink = rendered(read_topology(FIXTURES / "nvlink_8gpu.json"))
    pcie = rendered(read_topology(FIXTURES / "pcie_8gpu.json"))
    assert nvlink.count("NV18") == 8 * 7
    assert [pcie.count(word) for word in ("switch", "bridge", "sockets")] == [8, 16, 32]


def test_what_is_not_known_is_said():
    host = Host("h", 1, gpus=(Gpu(0, "[red]odd[/]"), Gpu(1, "g")), network=(NetworkDevice("eth0", "tcp"),))
    text = rendered(Topology((host,), (0, 0)))
    assert "[red]odd[/]" in text
    assert "?" in text
    assert "not known" in text
    bare = rendered(Topology((Host("a", 1), Host("b", 2)), (0, 0, 1)))
    assert "not as many on each" in bare
    assert "No GPU found." in bare
    assert "No network device found." in bare


def test_wrong_options_and_files_are_refused(tmp_path):
    runner = CliRunner()
    with pytest.raises(ConfigError, match="--topology"):
        runner.invoke(app, ["doctor", "--file", "x.json"], catch_exceptions=False)
    with pytest.raises(DataError, match=r"missing\.json"):
        runner.invoke(app, ["doctor", "--topology", "--file", str(tmp_path / "missing.json")], catch_exceptions=False)
    json_file = tmp_path / "list.json"
    json_file.write_text(json.dumps([1]))
    with pytest.raises(DataError, match="the topology"):
        collect_topology(json_file)
