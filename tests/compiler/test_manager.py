"""A pass rewrites the whole graph or leaves it as it was, and either way the report says so."""

from __future__ import annotations

import stat
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import fx

from deepytorch.compiler.manager import run_passes
from deepytorch.passes.base import Context, Decline, Pass, Rewrite

X = torch.tensor([1.0, 2.0])


@dataclass(frozen=True)
class AddOne(Pass):
    """x -> x + amount, `amount` a new buffer."""

    provides: ClassVar[frozenset[str]] = frozenset({"one"})
    amount: float = 1.0

    def rewrite(self, module: fx.GraphModule, context: Context) -> Rewrite:
        name = f"amount{len(list(module.buffers()))}"
        module.register_buffer(name, torch.tensor(self.amount), persistent=False)
        output = next(iter(reversed(module.graph.nodes)))
        with module.graph.inserting_before(output):
            amount = module.graph.get_attr(name)
            output.replace_input_with(output.args[0], module.graph.call_function(torch.add, (output.args[0], amount)))
        module.meta["touched"] = module.extra = True
        return Rewrite(changes=[f"added {self.amount}"])


@dataclass(frozen=True)
class NeedsOne(AddOne):
    requires: ClassVar[frozenset[str]] = frozenset({"one"})
    amount: float = 10.0


@dataclass(frozen=True)
class DeclineHalfway(AddOne):
    def rewrite(self, module: fx.GraphModule, context: Context) -> Rewrite:
        super().rewrite(module, context)
        return Rewrite(declined=[Decline("add", "the model is too small")])


@dataclass(frozen=True)
class FailHalfway(AddOne):
    def rewrite(self, module: fx.GraphModule, context: Context) -> Rewrite:
        super().rewrite(module, context)
        raise KeyError("a rule without an op")


@dataclass(frozen=True)
class BreakTheGraph(AddOne):
    def rewrite(self, module: fx.GraphModule, context: Context) -> Rewrite:
        rewrite = super().rewrite(module, context)
        placeholder = next(iter(module.graph.nodes))
        next(iter(reversed(module.graph.nodes))).append(placeholder)
        return rewrite


def trace() -> fx.GraphModule:
    return fx.symbolic_trace(lambda x: x * 2)


def test_passes_run_in_order_and_say_what_they_did():
    module, context = trace(), Context()
    first, second = run_passes(module, [AddOne(), NeedsOne()], context).runs
    assert torch.equal(module(X), X * 2 + 11)
    assert (first.name, first.fired, first.rewrite.changes, first.error) == ("AddOne", True, ["added 1.0"], None)
    assert second.name == "NeedsOne"
    assert first.time_ms > 0


@pytest.mark.parametrize("failing", [FailHalfway, DeclineHalfway, BreakTheGraph])
def test_what_a_failed_pass_did_is_undone(failing):
    module, context = trace(), Context()
    code = module.code
    (run,) = run_passes(module, [failing()], context).runs
    assert not run.fired
    assert len(run.rewrite.declined) == 1
    assert module.code == code
    assert torch.equal(module(X), X * 2)
    assert not list(module.buffers())
    assert not module._non_persistent_buffers_set
    assert "touched" not in module.meta
    assert not hasattr(module, "extra")
    module.graph.lint()
    assert run_passes(module, [AddOne()], context).fired
    assert torch.equal(module(X), X * 2 + 1)


def test_failure_is_a_decline_with_its_reason_and_logged_once(caplog):
    for _ in range(2):
        (run,) = run_passes(trace(), [FailHalfway()], Context()).runs
        assert run.error == "KeyError: 'a rule without an op'"
        assert run.rewrite.declined == [Decline("FailHalfway", "the pass failed: KeyError: 'a rule without an op'")]
    assert sum("FailHalfway" in record.getMessage() for record in caplog.records) <= 1


def test_pass_is_skipped_when_what_it_needs_was_declined():
    module = trace()
    runs = run_passes(module, [DeclineHalfway(), NeedsOne()], Context()).runs
    assert [run.fired for run in runs] == [False, False]
    assert "needs one, which an earlier pass declined to provide" in runs[1].rewrite.declined[0].reason
    assert torch.equal(module(X), X * 2)


def test_order_that_cannot_work_is_our_error():
    with pytest.raises(AssertionError, match="NeedsOne requires"):
        run_passes(trace(), [NeedsOne(), AddOne()], Context())


def test_an_interrupt_is_not_swallowed():
    @dataclass(frozen=True)
    class Interrupted(AddOne):
        def rewrite(self, module: fx.GraphModule, context: Context) -> Rewrite:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_passes(trace(), [Interrupted()], Context())


# graph dumps


def test_graphs_are_dumped_before_and_after(tmp_path):
    folder = tmp_path / "deep" / "graphs"
    run_passes(trace(), [AddOne(), FailHalfway()], Context(), dump_dir=folder)
    run_passes(trace(), [AddOne()], Context(), dump_dir=str(folder))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    names = [path.name.split("-") for path in sorted(folder.iterdir())]
    assert [int(name[0]) for name in names] == [1, 2, 3, 4, 5, 6]
    assert ["-".join(name[2:]) for name in names] == [
        "AddOne-before.py",
        "AddOne-after.py",
        "FailHalfway-before.py",
        "FailHalfway-after-unchanged.py",
        "AddOne-before.py",
        "AddOne-after.py",
    ]
    before, after = (path.read_text() for path in sorted(folder.iterdir())[:2])
    assert "amount" not in before
    assert "amount" in after


def test_dump_that_cannot_be_written_costs_a_warning(tmp_path, caplog):
    blocked = tmp_path / "file"
    blocked.write_text("")
    (run,) = run_passes(trace(), [AddOne()], Context(), dump_dir=blocked / "graphs").runs
    assert run.fired
    assert "graphs are not dumped" in caplog.text
