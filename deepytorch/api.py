"""The user's calls: `explain` before training, `report` after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from deepytorch import autowrap
from deepytorch.compiler.backend import EXPLAINING, deepytorch_backend
from deepytorch.compiler.code import data_parallel
from deepytorch.compiler.compile_module import step
from deepytorch.compiler.config import CompilerConfig
from deepytorch.compiler.outcome import outcomes
from deepytorch.compiler.report import LEDGER, RegionRecord, Report
from deepytorch.first_steps import PAUSE_SECONDS, STEP_IN_FORWARDS
from deepytorch.torch_internals import OptimizedModule, reset_dynamo


class Explanation:
    """The explanation of what deepytorch would do with a model and a batch, as text or as JSON.

    advice: what only the script can do, and would gain more.
    """

    def __init__(
        self, regions: list[RegionRecord], gradients: dict[str, Any] | None = None, advice: Sequence[str] = ()
    ) -> None:
        self.regions, self.gradients, self.advice = regions, gradients, list(advice)

    @property
    def packed(self) -> bool:
        """Return whether padding would be stripped from some region."""
        return any(region.outcome == "packed" for region in self.regions)

    def to_json(self) -> dict[str, Any]:
        """Return plain data, one entry a region."""
        return {
            "packed": self.packed,
            "gradients": self.gradients,
            "advice": self.advice,
            "regions": [
                {
                    "name": region.name,
                    "outcome": region.outcome,
                    "changes": region.changes,
                    "declined": region.declined,
                    "attention": region.attention,
                    "this_batch_would_run_padded_because": list(region.padded_because),
                    "real_token_fraction": _fraction(region),
                    "expected_speedup_of_matrix_work": _expected(region),
                    "break_even_steps": _break_even(region),
                    "pass_ms": region.pass_ms,
                }
                for region in self.regions
            ],
        }

    def __str__(self) -> str:
        return _rendered(self._tables())

    __repr__ = __str__

    def _tables(self) -> list[Table]:
        tables = []
        for region in self.regions:
            table = Table(title=f"{region.name}: {region.outcome}", title_justify="left", show_header=False)
            table.add_column(style="bold")
            table.add_column(overflow="fold")
            table.add_row("fired", "\n".join(region.changes) or "nothing")
            if region.declined:
                table.add_row("declined", "\n".join(region.declined))
            if region.attention:
                forms = [f"{count} by {form}" for form, count in region.attention.items()]
                table.add_row("attention", "\n".join(forms))
            if region.padded_because:
                table.add_row("this batch", "runs padded: " + "; ".join(region.padded_because))
            fraction, expected = _fraction(region), _expected(region)
            if fraction is not None:
                table.add_row("real tokens", f"{fraction:.0%} of the positions")
            if expected is not None:
                table.add_row("expected gain", f"{expected:.2f}x less matrix work in what is packed")
            steps = _break_even(region)
            if steps is not None:
                table.add_row("break-even", f"about {steps:,} steps after it is traced, on this device")
            tables.append(table)
        if self.gradients is not None:
            table = Table(title="gradients", title_justify="left", show_header=False)
            table.add_column(style="bold")
            table.add_column(overflow="fold")
            if "declined" in self.gradients:
                table.add_row("declined", f"DistributedDataParallel reduces them itself: {self.gradients['declined']}")
            else:
                sizes = ", ".join(f"{size / 2**20:.2g}" for size in self.gradients["bucket_bytes"])
                table.add_row("buckets", f"{sizes} MB, for {self.gradients['parameters']} parameters")
                exposed, total = (self.gradients[f"predicted_{name}_ms"] for name in ("exposed", "communication"))
                table.add_row("predicted", f"{exposed:.2g} ms of {total:.2g} ms exposed, if the backward takes as long")
            tables.append(table)
        for advice in self.advice:
            table = Table(title="by hand", title_justify="left", show_header=False)
            table.add_row(advice)
            tables.append(table)
        if not tables:
            table = Table(title="nothing was compiled", title_justify="left", show_header=False)
            table.add_row("Dynamo made no graph of this call.")
            tables.append(table)
        return tables


def explain(model: Callable[..., Any], *args: Any, options: dict[str, Any] | None = None, **kwargs: Any) -> Explanation:
    """Run `model(*args, **kwargs)` once in eager and return what deepytorch would do with it, region by region.

    If Dynamo cuts a Hugging Face model into several graphs, or its weights are sharded, its batches are packed at model
    entry under `import deepytorch`. Then the model is proved as in training, and its entry is one more region. For a
    sharded model every rank has to call this.

    Nothing is lowered, and the model is not changed. Its forward runs once, so buffers that a forward updates are
    updated. `options` are those of `torch.compile(..., backend="deepytorch", options=...)`.
    """
    found: list[RegionRecord] = []
    token = EXPLAINING.set(found)
    target = model
    if isinstance(model, OptimizedModule):
        target = model._orig_mod
    try:
        reset_dynamo()  # a region that was compiled before would not be analysed again
        backbone = autowrap.backbone_of(target) if isinstance(target, torch.nn.Module) else None
        with outcomes() as came_to, autowrap.paused():  # a part that is called between two graphs would be armed
            if backbone is None:
                torch.compile(target, backend=_explaining(options))(*args, **kwargs)
            else:
                explained = torch.compile(step, backend=_explaining(options))
                given: list[tuple[Any, Any]] = []  # the backbone's arguments, for packing at its entry, below

                def call(*args: Any, **kwargs: Any) -> Any:
                    given.append((args, kwargs))
                    return explained(backbone, *args, **kwargs)

                with autowrap.calls_go_to(backbone, call):
                    target(*args, **kwargs)
                args, kwargs = given[0] if given else (args, kwargs)
        unpads = CompilerConfig.parse(None, options).unpad
        if unpads and isinstance(target, torch.nn.Module) and target.training and torch.is_grad_enabled():
            with autowrap.paused():  # a proof runs the model, which is not a training step to be armed
                entry = autowrap.explain_entry(target, came_to, args, kwargs)
            if entry is not None:
                found.insert(0, entry)
    finally:
        EXPLAINING.reset(token)
        reset_dynamo()
    parallel = isinstance(target, torch.nn.parallel.DistributedDataParallel)
    asked = bool((options or {}).get("reduce_gradients", CompilerConfig.reduce_gradients))
    advice = [_KEEP_LATENTS] if _is_diffusion_from_frozen_parts(target, (*args, *kwargs.values())) else []
    return Explanation(found, data_parallel.preview(target) if parallel and asked else None, advice)


# The gain is published: see docs/hosts/diffusers.md.
_KEEP_LATENTS = (
    "Latents and text embeddings come from parts that are not trained (an autoencoder, a text encoder). Where examples "
    "come again and are not augmented, compute the latents' means and deviations and the embeddings once, before the "
    "first step, and keep them: about 1.4x a step for Stable Diffusion. See docs/hosts/diffusers.md."
)


def _is_diffusion_from_frozen_parts(target: Any, given: Sequence[Any]) -> bool:
    """Return whether a call trains a diffusers model that takes another model's output: embeddings of a text, say."""
    if not isinstance(target, torch.nn.Module) or not target.training or not torch.is_grad_enabled():
        return False
    model: Any = target.module if isinstance(target, torch.nn.parallel.DistributedDataParallel) else target
    model = model.get_base_model() if hasattr(model, "get_base_model") else model  # of an adapter of PEFT's
    if not any(kind.__module__.startswith("diffusers.") for kind in type(model).__mro__):
        return False
    if not any(name in type(model).__name__ for name in ("Condition", "Transformer")):
        return False
    floats = [each for each in given if isinstance(each, torch.Tensor) and each.is_floating_point()]
    return len(floats) > 1 and not any(each.requires_grad for each in floats)


def _explaining(options: dict[str, Any] | None) -> Callable[..., Any]:
    def backend(module: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        return deepytorch_backend(module, example_inputs, options=options)

    return backend


class Summary:
    """The summary of what deepytorch did in this process so far, as text or as JSON."""

    def __init__(self, report: Report) -> None:
        self._report = report

    def to_json(self) -> dict[str, Any]:
        """Return plain data: sums first, then the regions."""
        return self._report.to_json()

    def __str__(self) -> str:
        found = self.to_json()
        table = Table(title="deepytorch", title_justify="left")
        for name in (
            "region",
            "outcome",
            "packed",
            "padded",
            "last step",
            "real tokens",
            "compiles",
            "host ms/step",
            "why padded or declined",
        ):
            table.add_column(name, overflow="fold")
        for region in self._report.regions:
            fraction = _fraction(region)
            reasons = [f"{count} x {reason}" for reason, count in region.padded_because.items()]
            table.add_row(
                region.name,
                region.outcome,
                str(region.steps_packed),
                str(region.steps_padded),
                region.route,
                "" if fraction is None else f"{fraction:.0%}",
                f"{region.compiles}" + (f" ({region.recompiles} again)" if region.recompiles else ""),
                f"{1e3 * region.host_seconds / region.steps:.2f}" if region.steps else "",
                "\n".join([*reasons, *region.trials, *region.declined, *region.fallbacks, *region.compiled_here]),
            )
        profiled = sum(region.steps_profiled for region in self._report.regions)
        again = sum(region.steps_replayed for region in self._report.regions)
        seconds = sum(region.replay_seconds for region in self._report.regions)
        saved = f"{found['tokens_saved']:,} padded positions left out of {found['tokens_padded']:,}"
        compiled = f"compiling took {found['compile_seconds']:.1f} s"
        tried = sum(region.trial_seconds + region.compare_seconds for region in self._report.regions)
        told = _rendered([table, *self._outputs(), *self._gradients()]) + f"\n{saved}; {compiled}"
        told += f", trying forms of the model {tried:.1f} s." if tried else "."
        if not self._report.regions and found["first_step_seconds"] is not None:
            told += "\nSo far steps ran as in eager: a model is traced once the run is long enough for the pause"
            told += " (docs/starting.md). DEEPYTORCH_COMPILE=wait compiles at the first step."
        told += self._compiled_meanwhile(found)
        for group in found["groups_on_stock"]:
            told += f"\nProcess group {group['name']} runs on stock gloo and nccl: {group['why']}."
        if profiled:
            told += f"\n{profiled} first step{'s' * (profiled > 1)} ran in eager to see how outputs are used"
            told += f"; {again} ran once more for their pads, in {seconds:.1f} s." if again else "."
        read = sum(region.steps_read_back for region in self._report.regions)
        if read:
            told += f"\n{read} steps waited for the device to read their batch: deepytorch.prefetch(loader, device)"
            told += " lets them know it."
        compared = sum(region.verified_steps for region in self._report.regions)
        if compared:
            apart = max(region.largest_difference for region in self._report.regions)
            took = sum(region.verify_seconds for region in self._report.regions)
            told += f"\n{compared} packed steps were compared with eager, {apart:.1e} apart at most, in {took:.1f} s."
        return told

    __repr__ = __str__

    def _compiled_meanwhile(self, found: dict[str, Any]) -> str:
        """Return lines on the steps that ran while code was compiled in the background."""
        if not found["steps_meanwhile"]:
            return ""
        told = f"\n{found['steps_meanwhile']} steps ran in eager until they were compiled"
        if found["change_over_seconds"] is None:
            return told + ", which is not over yet."
        by = ", ".join(sorted({region.compiled_by for region in self._report.regions if region.compiled_by}))
        cost = (
            f", in {found['compile_seconds_in_background']:.1f} s and {found['compile_peak_mb_in_background']:.0f} MB"
        )
        told += f" (by {by}{cost * (found['compile_seconds_in_background'] > 0)})."
        told += f"\nSince the process began: compiled code after {found['change_over_seconds']:.1f} s"
        if found["first_step_seconds"] is not None:
            told += f", the first step after {found['first_step_seconds']:.1f} s"
        if found["break_even_seconds"] is not None:
            told += f", ahead of eager after {found['break_even_seconds']:.1f} s"
        return told + "."

    def _outputs(self) -> list[Table]:
        """Return a table of the uses of outputs, if there are any."""
        table = Table(title="outputs", title_justify="left")
        for name in ("region", "output", "uses"):
            table.add_column(name, overflow="fold")
        for region in self._report.regions:
            for output, uses in region.outputs.items():
                table.add_row(region.name, output, ", ".join(uses))
        return [table] if table.row_count else []

    def _gradients(self) -> list[Table]:
        if not self._report.gradients:
            return []
        table = Table(title="gradients", title_justify="left")
        for name in ("module", "buckets", "reductions", "MB", "from eager frames", "ms/step that the backward waited"):
            table.add_column(name, overflow="fold")
        for entry in self._report.gradients:
            syncs = entry["syncs"]
            table.add_row(
                entry["name"],
                str(len(entry["bucket_bytes"])),
                str(syncs),
                f"{entry['num_bytes'] / 2**20:.1f}",
                str(entry["from_eager_frames"]),
                f"{1e3 * entry['exposed_seconds'] / syncs:.2f}" if syncs else "",
            )
        return [table]


def report(reset: bool = False) -> Summary:
    """Return what deepytorch did in this process so far. With `reset` counts start anew; regions stay compiled."""
    return Summary(LEDGER.report(reset=reset))


def _fraction(region: RegionRecord) -> float | None:
    return region.tokens_real / region.tokens_padded if region.tokens_padded else None


def _expected(region: RegionRecord) -> float | None:
    return 1.0 / region.relative_cost if region.relative_cost else None


def _break_even(region: RegionRecord) -> int | None:
    """Return the number of steps that save the time of the trace, the proof and the loading of compiled code.

    This is a rough estimate by the time of one forward. None on devices that compute asynchronously.
    """
    if region.relative_cost is None or region.forward_seconds <= 0.0 or region.relative_cost >= 1.0:
        return None
    saved = STEP_IN_FORWARDS * region.forward_seconds * (1.0 - region.relative_cost)
    return max(1, round(PAUSE_SECONDS / saved))


def _rendered(tables: list[Table]) -> str:
    console = Console(width=120)
    with console.capture() as capture:
        for table in tables:
            console.print(table)
    return capture.get().rstrip()
