"""`import deepytorch` never changes what a script trains: scripts as users write them, with the import and without."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from deepytorch.comm.group.native import native
from tests.scripts.runner import Runner, Scenario, compare

FOLDER = Path(__file__).with_name("scenarios")
HELPERS = {"tiny.py"}
# One or two of each kind, in `.ci/run` beside those of the default suite.
CHOSEN = (
    "loss_outside_counting_pads",
    "logits_kept_over_steps",
    "logits_sliced",
    "metric_all_positions",
    "forward_hooks_keep_activations",
    "backward_hooks",
    "gradient_checkpointing_enabled",
    "checkpoint_around_part",
    "ddp_loss_outside_counting_pads",
    "ddp_no_sync",
    "ddp_two_backwards",
    "freeze_midway",
    "evaluation_between_steps",
    "generate_between_steps",
    "generator_and_discriminator",
    "two_losses_two_backwards",
    "two_optimizers",
    "add_lora_midway",
    "optimizer_in_backward",
    "gradient_penalty_model_loss",
    "t5_loss_inside",
    "autocast_with_scaler",
    "exception_for_bad_batch",
    "saved_and_loaded_midway",
    "accelerate_loop",
    "lightning_loop",
    "unet_of_sdxl",
    "dreambooth_of_adapters",
)
# Those that are run in the default mode, too, where another process compiles while steps run in eager, for ten times
# their steps where they can; and whether compiled code takes over. The others stay in eager for good, and say why.
IN_THE_DEFAULT_MODE = {
    **dict.fromkeys(
        (
            "add_lora_midway", "checkpoint_around_part", "classes_change_midway", "ddp_images", "ddp_unused_parameters",
            "ddp_wrapped_again",
            "evaluation_between_steps", "freeze_midway", "generate_between_steps", "hooks_come_and_go", "images",
            "infinite_pads_times_mask",
            "lora_on_int8", "lora_with_checkpoints", "mixture_of_experts", "noise_by_name", "router_loss", "teacher",
            "two_losses_two_backwards",
        ),
        True,
    ),
    **dict.fromkeys(
        (
            "checkpointing_with_dropout", "gradient_penalty_model_loss",
            "passes_that_draw_alike",
        ),
        False,
    ),
}  # fmt: skip
CHOSEN_IN_THE_DEFAULT_MODE = (
    "ddp_unused_parameters", "ddp_wrapped_again", "freeze_midway", "hooks_come_and_go",
)  # fmt: skip
SCENARIOS = {
    scenario.name: scenario
    for path in sorted(FOLDER.glob("*.py"))
    if path.name not in HELPERS
    for scenario in Scenario.read(path)
}


def _marks(scenario: Scenario) -> list[pytest.MarkDecorator]:
    """`.ci/run` runs those of the default suite and the chosen ones, `-m "slow or matrix"` all."""
    if scenario.default:
        return []
    return [pytest.mark.slow if scenario.name in CHOSEN else pytest.mark.matrix]


def test_what_is_chosen_is_there() -> None:
    assert set(CHOSEN) <= {name for name, each in SCENARIOS.items() if not each.default}


@pytest.mark.parametrize(
    "scenario",
    [pytest.param(each, id=each.name, marks=_marks(each)) for each in SCENARIOS.values()],
)
def test_a_script_records_the_same_numbers_with_the_import(
    scenario: Scenario, runner: Runner, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    if scenario.ranks > 1:
        native.load()  # compiled here, where no deadline runs
    found, imported = compare(scenario, runner, tmp_path)
    record_property("report", json.dumps(imported.report))
    shown = "\n".join([*found[:12], *(["..."] if len(found) > 12 else []), imported.error, imported.log])
    assert not found, f"{len(found)} differences\n{shown}"
    assert imported.report is not None
    steps = {name: imported.report[f"steps_{name}"] for name in ("packed", "padded")}
    if scenario.expect == "packed":
        assert steps["packed"] > 0, (steps, imported.report)
        assert steps["padded"] <= 1, (steps, imported.report)
    elif scenario.expect == "padded":
        assert steps["padded"] > 0, (steps, imported.report)


@pytest.mark.timeout(700)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in CHOSEN_IN_THE_DEFAULT_MODE else pytest.mark.matrix)
        for name in IN_THE_DEFAULT_MODE
    ],
)
def test_a_script_records_the_same_numbers_in_the_default_mode(name: str, runner: Runner, tmp_path: Path) -> None:
    scenario = SCENARIOS[name]
    if scenario.ranks > 1:
        native.load()
    found, imported = compare(scenario, runner, tmp_path, "default", deadline_s=300.0, times=10)
    shown = "\n".join([*found[:12], imported.error, imported.log])
    assert not found, f"{len(found)} differences\n{shown}"
    assert imported.report is not None
    taken_over = any(region["change_over_seconds"] for region in imported.report["regions"])
    assert taken_over == IN_THE_DEFAULT_MODE[name], imported.report
