"""The work on one model in a process of its own: in eager, with DEEPYTORCH=off, and then with the import.

Both write what they found to files of a folder that they share: the first the model's weights and eager's numbers, the
second the verdict. What cannot be built or trained in eager is said in `eager.json` and ends there.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import deepytorch
from deepytorch.bench.model_classes.batches import batches_of
from deepytorch.bench.model_classes.catalog import ModelClass, NotBuilt, build_small, forward_arguments, told
from deepytorch.bench.model_classes.judge import judge
from deepytorch.bench.model_classes.training import move_by_last_bit, train


def main(arguments: Mapping[str, Any]) -> None:
    """Run one of the two parts of a job."""
    folder = Path(arguments["folder"])
    which = ModelClass(*arguments["which"])
    torch.set_num_threads(1)
    found = _in_eager(which, folder) if arguments["part"] == "eager" else _with_import(which, folder, arguments)
    (folder / f"{arguments['part']}.json").write_text(json.dumps(found), encoding="utf-8")


def _in_eager(which: ModelClass, folder: Path) -> dict[str, Any]:
    try:
        model = build_small(which)
    except NotBuilt as reason:
        return {"outcome": "not built", "error": str(reason)}
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    accepted = forward_arguments(model)
    batches = batches_of(which.task, model.config, accepted)
    drawn = torch.get_rng_state()
    began = time.perf_counter()
    try:
        eager = train(model, batches)
    except Exception as error:
        return {"outcome": "eager fails", "error": told(error)}
    seconds = time.perf_counter() - began
    torch.manual_seed(len(batches) - 1)
    draws = not torch.equal(torch.get_rng_state(), _state_after(model, batches))
    torch.set_rng_state(drawn)
    other = build_small(which, weights)
    move_by_last_bit(other)
    torch.save({"weights": weights, "eager": eager, "moved": train(other, batches)}, folder / "eager.pt")
    finite = all(bool(each.isfinite().all()) for numbers in eager for each in numbers.values())
    return {
        "sides": [batch.side for batch in batches],
        "draws": draws,
        "finite": finite,
        "eager_seconds": seconds,
        "has_mask": "attention_mask" in accepted,
    }


def _state_after(model: Any, batches: Any) -> torch.Tensor:
    """Return the state of the random numbers after a forward that began with the last batch's seed."""
    torch.manual_seed(len(batches) - 1)
    arguments = {name: value for name, value in batches[-1].arguments.items() if name in forward_arguments(model)}
    with torch.no_grad():
        model(**arguments)
    return torch.get_rng_state()


def _with_import(which: ModelClass, folder: Path, arguments: Mapping[str, Any]) -> dict[str, Any]:
    known = torch.load(folder / "eager.pt", weights_only=True)
    deepytorch.configure(options={"lowering": arguments["lowering"]})
    model = build_small(which, known["weights"])
    batches = batches_of(which.task, model.config, forward_arguments(model))
    steps: list[str] = []
    before: dict[str, tuple[int, int, int]] = {}
    began = time.perf_counter()

    def after_step() -> None:
        steps.append(_kind_of_step(before))

    try:
        ours = train(model, batches, after_step)
    except Exception as error:
        return {"outcome": "fails", "error": told(error), "steps": steps} | _reported()
    found = {"seconds": time.perf_counter() - began, "steps": steps} | _reported()
    worst = judge(known["eager"], known["moved"], ours)
    return found | {
        "outcome": "equal" if worst.is_equal else "wrong",
        "furthest": worst.what,
        "difference": worst.difference,
        "own": worst.own,
        "allowed": worst.allowed,
    }


def _kind_of_step(before: dict[str, tuple[int, int, int]]) -> str:
    """Return how the regions ran since the last call: "graph", "entry", "part", "padded", "profiled" or "eager"."""
    ran = {"packed": set(), "padded": set(), "profiled": set()}  # type: dict[str, set[str]]
    for number, region in enumerate(deepytorch.report().to_json()["regions"]):
        key = f"{number} {region['name']}"
        counts = tuple(region[f"steps_{kind}"] for kind in ran)
        for kind, now, then in zip(ran, counts, before.get(key, (0, 0, 0)), strict=True):
            if now > then:
                ran[kind].add(region["name"])
        before[key] = counts
    if any(_is_entry(name) for name in ran["packed"]):
        return "entry"
    if ran["packed"]:
        return "part" if ran["padded"] else "graph"
    return "padded" if ran["padded"] else "profiled" if ran["profiled"] else "eager"


def _is_entry(name: str) -> bool:
    return name.startswith("model entry")


def _reported() -> dict[str, Any]:
    """Return the reasons why steps were not packed, and what compiling took."""
    report = deepytorch.report().to_json()
    reasons: list[str] = []
    for region in report["regions"]:
        where = "at entry: " if _is_entry(region["name"]) else ""
        reasons += [where + each for each in (*region["declined"], *region["padded_because"], *region["fallbacks"])]
    return {
        "reasons": list(dict.fromkeys(reasons)),
        "regions": [f"{region['name']}: {region['outcome']}" for region in report["regions"]],
        "compile_seconds": report["compile_seconds"] + report["compile_seconds_in_background"],
    }
