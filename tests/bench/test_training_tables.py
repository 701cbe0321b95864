"""The benchmarks that train models: their cells, rows, tables and plots, from invented figures of ranks."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest

from deepytorch.bench import peers, product, scaling
from deepytorch.bench.benchmark import Benchmark, Cell
from deepytorch.bench.compute import Compute, ComputeOptions
from deepytorch.bench.epoch import EpochOptions
from deepytorch.bench.memory_table import Memory, MemoryOptions
from deepytorch.bench.peers import Peers, PeersOptions
from deepytorch.bench.plots import svg_of
from deepytorch.bench.product import Product, ProductOptions
from deepytorch.bench.results import Results, Row, decoded
from deepytorch.bench.scaling import Scaling, ScalingOptions
from deepytorch.bench.table import html_of, markdown_of
from deepytorch.bench.training import Job
from deepytorch.comm.topology.cost import Link, Links
from deepytorch.comm.topology.host import Host
from deepytorch.comm.topology.topology import Topology
from deepytorch.errors import ConfigError
from tests.bench.trained import rank


def results_of(benchmark: Benchmark[Any], options: Any, seconds: dict[str, float], **changes: Any) -> Results:
    """Return results in which a step of a setup takes so long, and those of other setups a second."""
    rows = []
    for cell in benchmark.cells(options):
        if cell.impossible is not None:
            rows += [Row(key={**cell.key, "setup": each.name}, failed=cell.impossible) for each in cell.setups]
            continue
        found = {
            setup.name: [rank([seconds.get(setup.name, 1.0)] * 6, **changes_of(cell, changes))] * cell.place.all_ranks
            for setup in cell.setups
        }
        rows += benchmark.rows(options, cell, found)
    results = Results(
        benchmark=benchmark.name,
        command="",
        options=json.loads(json.dumps(asdict(options), default=str)),
        machine="",
        versions={"torch": "2.13"},
        date="2026-11-29",
        rows=rows,
    )
    derived = benchmark.derived(options, results)
    return Results(**{**{name: getattr(results, name) for name in Results.__slots__}, "rows": [*rows, *derived]})


def changes_of(cell: Cell, changes: dict[str, Any]) -> dict[str, Any]:
    return {name: value(cell) if callable(value) else value for name, value in changes.items()}


@pytest.mark.parametrize(
    ("benchmark", "options"),
    [
        (Compute(), ComputeOptions(models=("vgg16",))),
        (Memory(), MemoryOptions()),
        (Peers(), PeersOptions(ranks=2)),
        (Product(), ProductOptions(sharding="fsdp2")),
        (Scaling(), ScalingOptions(hosts=(1, 2))),
    ],
)
def test_jobs_survive_json_and_pages_can_be_made(benchmark: Benchmark[Any], options: Any) -> None:
    for cell in benchmark.cells(options):
        for setup in cell.setups:
            assert decoded(Job, json.loads(json.dumps(asdict(setup.job), default=str))) == setup.job
    results = results_of(benchmark, options, {"deepytorch": 0.5, "with the import": 0.5})
    keys = [tuple(row.key.items()) for row in results.rows]
    assert len(set(keys)) == len(keys)
    tables = benchmark.tables(results)
    assert tables
    for table in tables:
        assert table.rows
        assert all(len(row) == len(table.columns) for row in table.rows)
        assert markdown_of(table)
        assert html_of(table)
    assert all("<svg" in svg_of(plot) for plot in benchmark.plots(results))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: MemoryOptions(tables=("colour",)), "expected one of precision"),
        (lambda: MemoryOptions(precisions=("fp8",)), "expected one of fp32, mixed, fp16"),
        (lambda: PeersOptions(peers=("horovod",)), "expected one of eager"),
        (lambda: ProductOptions(models=("llama3",)), "expected one of llama2-13b"),
        (lambda: ProductOptions(sharding="zero9"), "expected one of as-published"),
        (lambda: ScalingOptions(predict=(0,)), "expected 1 or more"),
        (lambda: ScalingOptions(setups=("jax",)), "expected one of ddp"),
        (lambda: ComputeOptions(models=("vgg17",)), "expected one of alexnet"),
        (lambda: ComputeOptions(setups=("jax",)), "expected one of eager, inductor"),
        (lambda: ComputeOptions(precision="fp8"), "expected one of fp32, mixed"),
        (lambda: ComputeOptions(steps=0), "expected 1 or more"),
        (lambda: EpochOptions(models=("hf_Bert",)), 'models has "hf_Bert"'),
        (lambda: EpochOptions(setups=("eager+random",)), 'setups has "eager'),
        (lambda: EpochOptions(precision="fp16"), 'precision is "fp16"'),
        (lambda: EpochOptions(batches=1), "batches is 1"),
        (lambda: EpochOptions(rounds=0), "rounds is 0"),
    ],
)
def test_options_that_make_no_sense_are_refused(make: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


def test_memory_has_the_published_ways_and_says_what_cannot_be() -> None:
    cells = Memory().cells(MemoryOptions(ranks=4))
    ways = [cell.key["tensor x pipeline"] for cell in cells if cell.key["table"] == "parallelism"]
    assert ways == ["1x1", "2x1", "4x1", "1x2", "1x4", "2x2"]  # 4x4 takes sixteen ranks
    shardings = [cell.key["sharding"] for cell in cells if cell.key["table"] == "sharding"]
    assert shardings == ["ddp", "ddp", "oss", "zero1", "zero2", "zero3", "fsdp2"]
    of_one = [
        cell.key["sharding"] for cell in Memory().cells(MemoryOptions(tables=("sharding",), precisions=("fp32",)))
    ]
    assert of_one == shardings[1:]
    results = results_of(Memory(), MemoryOptions(ranks=4, tables=("precision",)), {"with the import": 0.5})
    [table] = Memory().tables(results)
    # four ranks of eight examples a second, and twice that
    assert table.rows[0][-5:] == ("32.00 +- 0.00", "200", "64.00 +- 0.00", "200", "2.00x")


def test_ranks_of_one_replica_count_their_examples_once() -> None:
    results = results_of(Memory(), MemoryOptions(ranks=4, tables=("parallelism",)), {})
    rates = {row.key["tensor x pipeline"]: row.figures["examples_per_s"] for row in results.having(setup="without")}
    assert rates == {"1x1": 32.0, "2x1": 16.0, "4x1": 8.0, "1x2": 16.0, "1x4": 8.0, "2x2": 8.0}


def test_the_products_table_has_the_published_gain_beside_the_measured_one() -> None:
    results = results_of(Product(), ProductOptions(models=("resnet50", "sd-2.1")), {product.OURS: 0.8})
    [table] = Product().tables(results)
    assert [row[5:7] for row in table.rows] == [("+25 %", "+89 %"), ("+25 %", "+22 %")]
    assert [row[1] for row in table.rows] == ["1 x 2", "1 x 1"]


def test_peers_are_sorted_and_the_missing_ones_named() -> None:
    results = results_of(Peers(), PeersOptions(), {peers.OURS: 0.25, "torch.compile": 0.5})
    [table] = Peers().tables(results)
    names = [row[0] for row in table.rows]
    assert names[:2] == [peers.OURS, "torch.compile"]
    assert table.rows[names.index("eager")][3] == "4.00x"
    assert "Not measured: FSDP2, needs several ranks: --ranks 2." in table.notes
    assert any("Liger" in note for note in table.notes)
    assert "torch 2.13" in table.notes


def compute_of(cell: Cell) -> dict[str, Any]:
    """Return the compute of a rank: 0.3 s of its own, of which as many ranks as there are get a share of two cores."""
    ranks = cell.place.all_ranks
    slowed = max(1.0, ranks / 2)
    step = {
        "forward_s": 0.1 * slowed,
        "backward_s": 0.2 * slowed,
        "optimizer_s": 0.0,
        "cpu_s": 0.3,
        "ready": [[0.1 * slowed, 25 << 20]],
    }
    if cell.place.hosts == 1:
        return {"steps": [step], "group": {}}
    hosts = tuple(Host(id=f"host {number}", cpus=2) for number in range(cell.place.hosts))
    topology = Topology(hosts, tuple(at for at in range(cell.place.hosts) for _ in range(2)))
    links = Links(engine=Link(100.0, 0.08))
    return {"steps": [step], "group": {"topology": topology.to_json(), "links": links.to_json()}}


def test_scaling_is_predicted_and_the_largest_measured_number_shows_how_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    options = ScalingOptions(
        models=("resnet50",),
        setups=("ddp", "deepytorch"),
        precisions=("fp32",),
        hosts=(2, 4),
        predict=(64, 1000),
        steps=3,
        repeats=2,
    )
    results = results_of(Scaling(), options, {scaling.DDP: 2.7}, ready=compute_of)
    predicted = results.having(kind="predicted", setup=scaling.DDP)
    assert [(row.key["hosts"], row.key["ranks"], row.key["from"]) for row in predicted] == [
        (4, 2, 4), (4, 2, 8), (32, 2, 1), (500, 2, 1),
    ]  # fmt: skip
    own = predicted[1]
    # eight ranks on two cores compute 1.2 s; after 0.8 s of it the network carries 25 MB, in 2.1 s
    assert own.figures["step_s"] == pytest.approx(0.8 + 25 * 2**20 * 0.08e-6, rel=0.02)
    assert own.figures["step_rel_diff"] == pytest.approx(abs(own.figures["step_s"] - 2.7) / 2.7)
    assert all(0 < row.figures["scaling_efficiency"] < 1 for row in predicted[2:])
    names = [points.name for plot in Scaling().plots(results) for points in plot.series if points.predicted]
    assert names == ["ddp, fp32, predicted", "deepytorch, fp32, predicted"] * 2
    assert Scaling().tables(results)[-1].title == "Predicted, not measured"
