"""Ranks that run one model of Megatron-LM together, of which one dies, stops, or sees another batch: no hang."""

from __future__ import annotations

import os
import re
import signal
import textwrap

import pytest

from deepytorch.comm.group.native import native
from tests.comm.ranks import Outcome, Ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240, func_only=True),  # a hang is the failure that these tests look for
]


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    """Compile the process group here, where no deadline of a test runs."""
    pytest.importorskip("megatron.core")
    native.load()


BEGIN = """
deepytorch.switch.SWITCH.enabled = True
deepytorch.switch.SWITCH.process_groups = {ours}
from tests.integrations.megatron_runs import *
stand_in()
init("gloo", timeout={timeout})
from megatron.core import parallel_state
from deepytorch.integrations import megatron_entry
parallel_state.initialize_model_parallel(2, distributed_timeout_minutes={timeout} / 60)
model = gpt(LLAMA | {{"tensor_model_parallel_size": 2}}, position_embedding_type="rope")
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
attend = megatron_entry.varlen_attention

def in_a_packed_layer(action):
    def attention(*args, **kwargs):
        action()
        return attend(*args, **kwargs)
    megatron_entry.varlen_attention = attention

def train(step, kind="loss mask"):
    arguments, weights = batch(kind, step)
    loss, _ = mean_loss(weights, model(**arguments))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

def alike(step, **changes):
    # One step in which rank 1 gets other arguments, and the same in eager from the same weights.
    found, expected = [], []
    arguments, weights = batch("right", step)
    arguments |= changes if rank == 1 else {{}}
    for values, block in ((expected, deepytorch.paused()), (found, contextlib.nullcontext())):
        with block:
            loss, losses = mean_loss(weights, model(**arguments))
            loss.backward()
        values += [loss.detach(), *(each.grad for each in model.parameters())]
        optimizer.zero_grad()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)

for step in range(3):
    train(step)
record = record_of(model)
assert record.steps_packed == 2, record
"""


def ranks_of(script: str, timeout: float, ours: bool = True) -> Ranks:
    """Two ranks that have trained packed for two steps, and run `script` then. timeout: of their groups, in seconds."""
    return Ranks(BEGIN.format(ours=ours, timeout=timeout) + textwrap.dedent(script))


def ended(script: str, timeout: float = 30.0) -> list[Outcome]:
    """How two ranks have ended, both of them well."""
    with ranks_of(script, timeout) as ranks:
        outcomes = ranks.wait(100)
    assert [each.code for each in outcomes] == [0, 0], "\n".join(each.output for each in outcomes)
    return outcomes


SURVIVOR = """
if rank == 1:
    in_a_packed_layer(lambda: os.kill(os.getpid(), signal.{signal}))
say("begins")
error, seconds = told(lambda: train(3))
say("found after", round(seconds, 1), error)
error, seconds = told(lambda: train(4))
say("again after", round(seconds, 1), error)
dist.destroy_process_group()
say("destroyed")
"""


@pytest.mark.parametrize("ours", [True, False], ids=["deepytorch", "gloo"])
def test_a_rank_killed_in_a_packed_layer_is_seen_long_before_the_timeout(ours: bool) -> None:
    with ranks_of(SURVIVOR.format(signal="SIGKILL"), 100.0, ours) as ranks:
        ranks.until(0, "begins", 90)
        one, other = ranks.wait(30)
    assert (one.code, other.code) == (0, -signal.SIGKILL), one.output
    assert all(word in one.output for word in ("found after", "again after", "destroyed")), one.output
    if ours:
        assert "local rank 1 has died: local rank 0 waited for it in all_reduce" in one.output, one.output
    else:
        assert "onnection closed by peer" in one.output or "reset" in one.output, one.output


@pytest.mark.parametrize("ours", [True, False], ids=["deepytorch", "gloo"])
def test_a_rank_stopped_in_a_packed_layer_times_out(ours: bool) -> None:
    with ranks_of(SURVIVOR.format(signal="SIGSTOP"), 5.0, ours) as ranks:
        ranks.until(0, "begins", 90)
        ranks.processes[0].wait(30)
        os.kill(ranks.processes[1].pid, signal.SIGCONT)
        one, other = ranks.wait(30)
    assert (one.code, other.code) == (0, 0), (one.output, other.output)
    expected = "timed out after 5.* s in all_reduce.* local rank 1 has not come" if ours else "[Tt]imed out.*5000ms"
    assert re.search(f"found after [5-9].*{expected}", one.output), one.output
    assert "found after" in other.output, other.output


def test_ranks_that_see_other_masks_run_padded() -> None:
    """Their rows may have as many tokens, at other places."""
    ended("""
    for step in range(3, 6):
        tokens = rows("right", step)
        for mine in (tokens, tokens.flip(1)):
            before = record.steps_packed
            alike(step, attention_mask=(LATER | ~mine[:, None])[:, None])
            if step > 3:
                assert record.steps_packed == before + (mine is tokens), record
    assert record.padded_because == {"tensor-parallel ranks would run this batch differently": 3}, record
    dist.destroy_process_group()
    """)


def test_a_rank_that_decides_otherwise_has_all_run_padded() -> None:
    """By a hook that it has, or by a probe that came out different there."""
    one, other = ended("""
    hook = model.decoder.layers[0].register_forward_hook(lambda *_: None) if rank == 1 else None
    before = record.steps_packed
    alike(3)
    assert record.steps_packed == before
    if rank == 1:
        hook.remove()
        proved = megatron_entry.prove
        def prove(*args):
            assert proved(*args) is None
            return "packed and padded probes differ"
        megatron_entry.prove = prove
    for step in range(3):
        alike(3 + step)  # a kind of calls that is new: each row has a mask
    assert record.steps_packed == before, record
    say(record.declined)
    dist.destroy_process_group()
    """)
    assert "the probe failed on another tensor-parallel rank" in one.output, one.output
    assert "packed and padded probes differ" in other.output, other.output


@pytest.mark.parametrize("how", ["fails in the probe", "fails in a step", "is paused"])
def test_a_rank_that_leaves_the_others_is_named(how: str) -> None:
    """What the two ranks call then differs, or one of them ends: both are told at once."""
    kind = "right" if how == "fails in the probe" else "loss mask"
    one, other = ended(f"""
    def fail():
        raise RuntimeError("no kernel here")
    if rank == 1 and {how!r} != "is paused":
        in_a_packed_layer(fail)
    with deepytorch.paused() if rank == 1 and {how!r} == "is paused" else contextlib.nullcontext():
        error, seconds = told(lambda: train(3, {kind!r}))
    say("found after", round(seconds, 1), error)
    """)
    assert re.search(r"found after \d\.", one.output), one.output
    if how == "fails in a step":
        assert "local rank 1 has died: local rank 0 waited for it in all_reduce" in one.output, one.output
    else:
        assert re.search(r"ranks disagree on collective .* local rank 0 .* local rank 1 called", one.output), one.output
    if how != "is paused":
        assert re.search(r"found after \d\..*no kernel here", other.output), other.output


PIPELINE = """
deepytorch.switch.SWITCH.enabled = True
from tests.integrations.megatron_runs import *
stand_in()
torch.cuda.synchronize = lambda *_: None
init("gloo", timeout={timeout})
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from deepytorch.integrations import megatron_entry
parallel_state.initialize_model_parallel(1, 2, distributed_timeout_minutes={timeout} / 60)
model = gpt(
    LLAMA | {{"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.float32}},
    position_embedding_type="rope", pre_process=rank == 0, post_process=rank == 1,
)

def train(step, change=lambda arguments: None, block=contextlib.nullcontext, loss_func=mean_loss):
    def forward_step(batches, model):
        arguments, weights = next(batches)
        if rank == 1:
            change(arguments)
        with block() if rank == 1 else contextlib.nullcontext():
            return model(**arguments), lambda outputs: (loss_func(weights, outputs)[0], {{}})
    get_forward_backward_func()(
        forward_step_func=forward_step, data_iterator=iter([batch("loss mask", 2 * step + each) for each in range(2)]),
        model=[model], num_microbatches=2, seq_length=POSITIONS, micro_batch_size=ROWS, forward_only=False,
    )

for step in range(2):
    train(step)
record = record_of(model)
assert record.steps_packed == 2, record
say("begins")
{script}
error, seconds = told(lambda: train(2{arguments}))
say("found after", round(seconds, 1), error)
"""


def stages(script: str = "", arguments: str = "", timeout: float = 30.0) -> Ranks:
    """Two stages of a pipeline that have packed a step, and run `script` and a step with other arguments then."""
    return Ranks(PIPELINE.format(script=textwrap.dedent(script), arguments=arguments, timeout=timeout))


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP"])
def test_a_stage_that_ends_or_stops_in_a_packed_layer_is_an_error_of_the_other(name: str) -> None:
    script = f"""
    attend = megatron_entry.varlen_attention
    if rank == 1:
        megatron_entry.varlen_attention = lambda *_, **__: os.kill(os.getpid(), signal.{name})
    """
    with stages(script, timeout=100.0 if name == "SIGKILL" else 5.0) as ranks:
        ranks.until(0, "begins", 90)
        assert ranks.processes[0].wait(30) == 0, ranks.output(0)
        output = ranks.output(0)
    # What stages send each other goes through gloo, which names no rank.
    expected = r"\d\..* by peer" if name == "SIGKILL" else r"[5-9]\..*[Tt]imed out waiting 5000ms"
    assert re.search(f"found after {expected}", output), output


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        # Its tokens are pads for the stage before, as no loss behind them counts there.
        (
            "change=lambda it: it.update(loss_mask=it['loss_mask'].flip(1))",
            "its batch or its masks are others",
        ),
        ("change=lambda it: it.update(loss_mask=None)", "hardly any padding in the batch"),
        ("block=deepytorch.paused", "its call did not come to deepytorch, or is paused there"),
    ],
    ids=["other masks", "no mask", "paused"],
)
def test_a_stage_that_needs_what_the_one_before_has_left_out_says_so(arguments: str, why: str) -> None:
    with stages(arguments=f", {arguments}") as ranks:
        ranks.until(1, "found after", 90)
        one, other = ranks.wait(30)
    assert re.search(
        r"found after \d\..*stage 1 of the pipeline \(rank 1\) needs \d+ positions of this batch that stage 0 "
        rf"\(rank 0\) has left out as padding: {why}",
        other.output,
    ), other.output
    assert re.search(r"found after \d\..*(by peer|rank 1)", one.output), one.output


def test_a_stage_whose_pads_are_looked_at_late_says_so() -> None:
    with stages(arguments=", loss_func=lambda weights, outputs: (outputs.mean(), {})") as ranks:
        ranks.until(1, "found after", 90)
        one, other = ranks.wait(30)
    assert re.search(r"found after \d\..*padded positions of 'output' are looked at", other.output), other.output
    assert re.search(r"found after \d\..*(by peer|rank 1)", one.output), one.output


def test_a_stage_that_cannot_pack_in_a_step_has_all_run_it_padded() -> None:
    with stages("""
    hook = model.decoder.layers[0].register_forward_hook(lambda *_: None) if rank == 1 else None
    train(2)
    assert record.steps_packed == 2, record
    if rank == 1:
        hook.remove()
    train(3)
    assert record.steps_packed == 4, record
    with deepytorch.paused() if rank == 0 else contextlib.nullcontext():
        train(4)
    assert record.steps_packed == 4, record
    train(5)
    assert record.steps_packed == 6, record
    dist.destroy_process_group()
    raise SystemExit(0)
    """) as ranks:
        outcomes = ranks.wait(100)
    assert [each.code for each in outcomes] == [0, 0], "\n".join(each.output for each in outcomes)
