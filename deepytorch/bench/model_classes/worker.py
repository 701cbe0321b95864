"""The work on models in processes of their own: in eager, with DEEPYTORCH=off, and then with the import.

A rank forks a process for each model, so that torch and transformers are imported once, and one that crashes or hangs
ends alone. Both parts share a folder: the first writes the model's weights and eager's numbers, the second judges its
own by them. What cannot be built or trained in eager ends there.
"""

from __future__ import annotations

import gc
import json
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch._inductor.compile_fx
import transformers.modeling_utils  # noqa: F401, as those above: once, for all models

import deepytorch
from deepytorch.bench.channel import Turns
from deepytorch.bench.model_classes import tables
from deepytorch.bench.model_classes.batches import STEPS_BEFORE, batches_of
from deepytorch.bench.model_classes.benchmark import ModelJob
from deepytorch.bench.model_classes.catalog import ModelClass, NotBuilt, build_small, forward_arguments, told
from deepytorch.bench.model_classes.judge import judge
from deepytorch.bench.model_classes.training import move_by_last_bit, train
from deepytorch.bench.processes import ending, last_lines

Job = ModelJob


def run(job: ModelJob, turns: Turns) -> dict[str, Any]:
    """Return `figures` and `texts` of this rank's model, and `process_s`, in a process that is forked for it."""
    assert job.scratch is not None
    which = ModelClass(*job.models[int(os.environ.get("RANK", "0"))])
    folder = job.scratch / which.name
    folder.mkdir(exist_ok=True)
    began = time.monotonic()
    gc.freeze()  # collections in the child, which traces, leave out what was imported
    child = os.fork()
    if child == 0:
        _work(job, which, folder)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    found: dict[str, Any] = {"figures": {}, "texts": {"outcome": tables.FAILS}}
    if status == 0:
        found = json.loads((folder / "found.json").read_text(encoding="utf-8"))
    elif status == -signal.SIGALRM:
        found["texts"]["error"] = f"not over in {job.limit:g} seconds"
    else:
        said = " ".join(last_lines(folder / "log", 1))
        found["texts"]["error"] = f"{ending(status, 'exit status')}: {said}"[:300]
    return found | {"process_s": time.monotonic() - began}


def _work(job: ModelJob, which: ModelClass, folder: Path) -> None:
    """Do the work and end this process, which a signal does where it takes too long, wherever it is."""
    status = 1
    try:
        log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        for stream in (1, 2):
            os.dup2(log, stream)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, job.limit)
        torch.set_num_threads(1)
        if job.lowering is None:
            figures, texts = _in_eager(which, folder)
        else:
            figures, texts = _with_import(which, folder, job.lowering)
        (folder / "found.json").write_text(json.dumps({"figures": figures, "texts": texts}), encoding="utf-8")
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _in_eager(which: ModelClass, folder: Path) -> tuple[dict[str, float], dict[str, str]]:
    try:
        model = build_small(which)
    except NotBuilt as reason:
        return {}, {"outcome": tables.NOT_BUILT, "error": str(reason)}
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    accepted = forward_arguments(model)
    batches = batches_of(which.task, model.config, accepted)
    drawn = torch.get_rng_state()
    began = time.perf_counter()
    try:
        eager = train(model, batches)
    except Exception as error:
        return {}, {"outcome": tables.EAGER_FAILS, "error": told(error)}
    seconds = time.perf_counter() - began
    torch.manual_seed(len(batches) - 1)
    draws = not torch.equal(torch.get_rng_state(), _state_after(model, batches))
    torch.set_rng_state(drawn)
    other = build_small(which, weights)
    move_by_last_bit(other)
    torch.save({"weights": weights, "eager": eager, "moved": train(other, batches)}, folder / "eager.pt")
    finite = all(bool(each.isfinite().all()) for numbers in eager for each in numbers.values())
    notes = [] if "attention_mask" in accepted else [tables.NO_MASK]
    notes += ["draws random numbers"] if draws else []  # without dropout: packed steps draw others
    notes += [] if finite else ["eager's numbers are not all finite"]
    return {"eager_s": seconds}, {"notes": "; ".join(notes)}


def _state_after(model: Any, batches: Any) -> torch.Tensor:
    """Return the state of the random numbers after a forward that began with the last batch's seed."""
    torch.manual_seed(len(batches) - 1)
    arguments = {name: value for name, value in batches[-1].arguments.items() if name in forward_arguments(model)}
    with torch.no_grad():
        model(**arguments)
    return torch.get_rng_state()


def _with_import(which: ModelClass, folder: Path, lowering: str) -> tuple[dict[str, float], dict[str, str]]:
    if not (folder / "eager.pt").exists():
        return {}, {}
    if lowering == "inductor":  # nothing is taken from an earlier run
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    known = torch.load(folder / "eager.pt", weights_only=True)
    deepytorch.configure(options={"lowering": lowering})
    model = build_small(which, known["weights"])
    batches = batches_of(which.task, model.config, forward_arguments(model))
    steps: list[str] = []
    before: dict[str, tuple[int, int, int]] = {}
    began = time.perf_counter()

    def after_step() -> None:
        steps.append(_kind_of_step(before))

    figures: dict[str, float] = {}
    texts: dict[str, str] = {}
    try:
        ours = train(model, batches, after_step)
    except Exception as error:
        texts = {"outcome": tables.FAILS, "error": told(error)}
    else:
        figures["import_s"] = time.perf_counter() - began
        worst = judge(known["eager"], known["moved"], ours)
        figures |= {"rel_diff": worst.difference, "own_rel_diff": worst.own, "allowed_rel_diff": worst.allowed}
        texts = {"outcome": tables.EQUAL if worst.is_equal else tables.WRONG, "furthest": worst.what}
    report = deepytorch.report().to_json()
    figures["compile_s"] = report["compile_seconds"] + report["compile_seconds_in_background"]
    sides = [batch.side for batch in batches]
    texts |= {"where": where(steps, sides), "steps": " ".join(steps), "sides": " ".join(sides)}
    texts["reasons"] = "\n".join(_reasons(report["regions"]))
    texts["regions"] = "\n".join(f"{region['name']}: {region['outcome']}" for region in report["regions"])
    return {name: value for name, value in figures.items() if math.isfinite(value)}, texts


def where(steps: Sequence[str], sides: Sequence[str]) -> str:
    """Return where steps with pads on the right were packed, after the first ones of each graph."""
    right = [step for step, side in zip(steps, sides, strict=False) if side == "right"]
    kinds = set(right[STEPS_BEFORE:])
    if len(kinds) > 1:  # another length may be traced anew, and its first step is profiled
        kinds.discard("profiled")
    for kind, how in (("entry", tables.ENTRY), ("graph", tables.GRAPH)):
        if kinds and kinds <= {"graph", "entry"} and kind in kinds:
            return how
    return tables.PART if kinds & {"graph", "entry", "part"} else tables.DECLINED


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


def _reasons(regions: Sequence[dict[str, Any]]) -> list[str]:
    """Return the reasons why steps were not packed, each once and in one line."""
    reasons: list[str] = []
    for region in regions:
        at = "at entry: " if _is_entry(region["name"]) else ""
        reasons += [at + each for each in (*region["declined"], *region["padded_because"], *region["fallbacks"])]
    return list(dict.fromkeys(" ".join(reason.split()) for reason in reasons))
