"""Groups made while their C++ was compiled go over to ours: [Note: Change-over of a group] in csrc/change_over.h.

The compiler is a stand-in here: the C++ is there, and a rank is told so when its script says `finish()`.
"""

from __future__ import annotations

import re
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepytorch import patches
from deepytorch.comm.group import change_over, inner_backends
from deepytorch.comm.group.native import native
from tests.comm.ranks import Ranks, run
from tests.warm import run_script

BESIDE = {"DEEPYTORCH_COMPILE": "beside"}

SETUP = """
from deepytorch.comm.group import change_over
from deepytorch.comm.group.native import native
from deepytorch.comm.group.groups import native_backend
compiling, tried = [True], []
native.build_beside = lambda: None
native.is_built = lambda: not compiling[0]
native.builds_beside = lambda: compiling[0] and not tried

def finish():
    compiling[0] = False

def fail():
    tried.append(True)

def is_ours(group=None):
    return native_backend(group or dist.group.WORLD) is not None

def state(number=0):
    return change_over.standings()[number]["state"]

weight = torch.nn.Parameter(torch.zeros(2))
optimizer = torch.optim.SGD([weight], lr=0.1)

def step():
    weight.grad = torch.ones(2)
    optimizer.step()

def all_are(answer, group=None):
    '''Whether every rank says so: all leave a loop in the same round.'''
    found = torch.tensor([float(answer)])
    dist.all_reduce(found, op=dist.ReduceOp.MIN, group=group)
    return bool(found.item())

def until(answer, loop=lambda: None, seconds=60.0):
    begun = time.monotonic()
    while not all_are(answer()):
        loop()
        step()
        time.sleep(0.01)
        assert time.monotonic() - begun < seconds, change_over.standings()
"""


def since(output: str) -> int:
    """The collective from which on a rank's group was ours."""
    found = re.search(r"deepytorch's since collective (\d+)", output)
    assert found is not None, output
    return int(found[1])


PLAIN = """
asked = change_over.ChangingGroup._proposal
def within_the_round(self, attempt):  # of six collectives and that of `all_are`: behind two that nobody has waited for
    return (asked(self, attempt) - begun) // 7 * 7 + 7 + begun + 3
change_over.ChangingGroup._proposal = within_the_round

def one_round():
    parts = [torch.full((size_of,), rank + 1.0 + number) for number, size_of in enumerate((70_000, 3, 100_000))]
    works = [dist.all_reduce(part, async_op=True) for part in parts]
    told = torch.full((5,), float(rank))
    dist.broadcast(told, src=size - 1)
    gathered = [torch.empty(3) for _ in range(size)]
    dist.all_gather(gathered, torch.full((3,), float(rank)))
    dist.barrier()
    for number, (work, part) in enumerate(zip(works, parts)):
        work.wait()
        assert torch.equal(part, torch.full_like(part, sum(range(1, size + 1)) + size * number)), part
    assert told.tolist() == [size - 1.0] * 5
    assert torch.stack(gathered).tolist() == [[float(other)] * 3 for other in range(size)]

init()
begun, name = 0, dist.group.WORLD.group_name
for number in range(3):
    one_round()
if rank == 1:
    time.sleep(0.5)  # ranks begin at different times
until(lambda: native.is_built(), lambda: (one_round(), finish() if rank == 0 or time.monotonic() % 2 > 1.5 else None))
begun = dist.group.WORLD._get_sequence_number_for_group() % 7
until(lambda: state().startswith("deepytorch's"), one_round)
for number in range(3):
    one_round()
assert is_ours()
deepytorch.comm.chosen()  # raises for a group that is not ours
assert (dist.get_backend(), dist.group.WORLD.group_name) == ("deepytorch", name) and name
summed = torch.distributed._functional_collectives.all_reduce(torch.ones(2), "sum", dist.group.WORLD)
assert summed.tolist() == [float(size)] * 2
say(state())
dist.destroy_process_group()
"""


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.matrix)])
def test_ranks_change_in_front_of_the_same_collective_while_others_are_under_way(num_ranks: int) -> None:
    outputs = run(SETUP + PLAIN, num_ranks, timeout=90, env=BESIDE)
    assert len({since(output) for output in outputs}) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "per_host"), [(2, 1), (4, 2), (3, 2)])
def test_ranks_of_several_hosts_change_over_too(num_ranks: int, per_host: int) -> None:
    outputs = run(SETUP + f"pretend_hosts({per_host})" + PLAIN, num_ranks, timeout=120, env=BESIDE)
    assert len({since(output) for output in outputs}) == 1


@pytest.mark.slow
def test_after_the_change_over_an_error_on_one_host_reaches_the_others_within_two_seconds() -> None:
    script = """
pretend_hosts(1)
init()
finish()
until(lambda: state().startswith("deepytorch's"))
dist.barrier()
if rank == 0:
    time.sleep(1)
    native_backend(dist.group.WORLD).abort()
    error, seconds = told(lambda: dist.all_reduce(torch.ones(100_000)))
else:  # waits for a call that rank 0 never makes
    error, seconds = told(lambda: dist.all_reduce(torch.ones(100_000)))
assert "aborted by this rank (0)" in error and seconds < 3.0, (error, seconds)
error, seconds = told(lambda: dist.send(torch.ones(3), 1 - rank))
assert "aborted by this rank (0)" in error and seconds < 0.5, (error, seconds)
say("told")
time.sleep(1)  # rank 0 holds the store, and no connection closes by its end
os._exit(0)
"""
    for output in run(SETUP + script, 2, timeout=60, env=BESIDE):
        assert "told" in output


@pytest.mark.slow
def test_connecting_in_mid_life_has_a_deadline_of_its_own_that_calls_do_not_have() -> None:
    script = """
change_over.MAKE_TIMEOUT = timedelta(seconds=4)
pretend_hosts(1)
init(timeout=5.0)
dist.distributed_c10d._set_pg_timeout(timedelta(seconds=60))  # it is the one that counts from here on
finish()
until(lambda: state().startswith("deepytorch's"))
for size_of in (3, 4_000_000):
    total = torch.full((size_of,), rank + 1.0)
    if rank == 1:
        time.sleep(6)  # as while a checkpoint is written
    dist.all_reduce(total)
    assert total.unique().tolist() == [3.0]
say("over")
dist.destroy_process_group()
"""
    for output in run(SETUP + script, 2, timeout=90, env=BESIDE):
        assert "over" in output


DDP = """
init("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
alone = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
alone.load_state_dict(model.state_dict())
ddp = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.0001)
ours, theirs = (torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (ddp, alone))
data = torch.Generator().manual_seed(5)
def train():
    batch = torch.randn(4 * size, 6, generator=data)
    ddp(batch[4 * rank:4 * rank + 4]).square().mean().backward()
    alone(batch).square().mean().backward()
    for each in (ours, theirs):
        each.step(); each.zero_grad()
    for mine, other in zip(model.parameters(), alone.parameters()):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
for number in range(4):
    train()
finish()
until(lambda: state().startswith("deepytorch's"), train)
for number in range(10):
    train()
assert is_ours() and dist.get_backend() == "gloo"
say(state())
dist.destroy_process_group()
"""


def test_ddp_trains_across_the_change_over_as_on_one_process() -> None:
    script = (
        SETUP
        + "import deepytorch.integrations.process_groups as groups\ndeepytorch.switch.SWITCH.enabled = True\n"
        + DDP
    )
    outputs = run(script, 2, timeout=90, env=BESIDE)
    assert len({since(output) for output in outputs}) == 1


@pytest.mark.parametrize("broken", [pytest.param(0, marks=pytest.mark.matrix), 1])
def test_where_one_rank_cannot_compile_all_stay_on_gloo_and_say_so(broken: int) -> None:
    script = f"""
init()
fail() if rank == {broken} else finish()
until(lambda: state().startswith("on gloo: "))
total = torch.ones(3)
dist.all_reduce(total)
assert total.tolist() == [2.0] * 3 and not is_ours()
say(state())
dist.destroy_process_group()
"""
    for output in run(SETUP + script, 2, timeout=60, env=BESIDE):
        assert f"on gloo: rank {broken}: deepytorch's C++ was not compiled" in output


@pytest.mark.slow
def test_a_rank_that_takes_no_optimizer_step_keeps_all_on_gloo_and_nobody_waits() -> None:
    script = """
init()
finish()
if rank == 1:
    step = lambda: None
begun, rounds = time.monotonic(), 0
until(lambda: time.monotonic() - begun > 3.0)
assert not is_ours()
say(state())
dist.destroy_process_group()
"""
    for output in run(SETUP + script, 2, timeout=60, env=BESIDE):
        assert "on gloo until the ranks have agreed on a collective" in output


@pytest.mark.slow
def test_groups_of_some_ranks_change_over_by_themselves() -> None:
    script = """
init()
pairs = [dist.new_group([first, first + 1]) for first in range(2)]
mine = [pair for first, pair in enumerate(pairs) if rank in (first, first + 1)]
finish()
def each():
    for first, pair in enumerate(pairs):
        if rank in (first, first + 1):
            total = torch.full((50,), rank + 1.0)
            dist.all_reduce(total, group=pair)
            assert total.tolist() == [2.0 * first + 3.0] * 50
until(lambda: all(found["state"].startswith("deepytorch's") for found in change_over.standings()), each)
each()
assert all(is_ours(pair) for pair in mine) and is_ours()
say(len(change_over.standings()))
dist.destroy_process_group()
"""
    assert [output.split()[-1] for output in run(SETUP + script, 3, timeout=90, env=BESIDE)] == ["2", "3", "2"]


MESSAGES = """
init()
def message(tag):
    tensor = torch.full((4,), float(tag))
    if rank == 0:
        return dist.isend(tensor, 1, tag=tag), tensor
    tensor.zero_()
    return dist.irecv(tensor, 0, tag=tag), tensor
"""


@pytest.mark.slow
@pytest.mark.parametrize("hosts", ["", "pretend_hosts(1)"])
def test_messages_from_before_the_moment_meet_those_from_after_it(hosts: str) -> None:
    script = """
finish()
until(lambda: change_over._CHANGING[0]._in_front is not None)
early = [message(7)] if rank == 1 else []  # received before, sent after
until(lambda: state().startswith("deepytorch's"))
early += [message(7)] if rank == 0 else []
work, tensor = early[0]
work.wait()
assert tensor.tolist() == [7.0] * 4
assert is_ours()
message(8)[0].wait()
dist.group.WORLD.monitored_barrier(timedelta(seconds=10))
say(state())
dist.destroy_process_group()
"""
    outputs = run(SETUP + hosts + MESSAGES + script, 2, timeout=60, env=BESIDE)
    assert len({since(output) for output in outputs}) == 1


@pytest.mark.slow
def test_a_group_that_was_used_for_messages_before_stays_on_gloo() -> None:
    script = """
message(1)[0].wait()
finish()
until(lambda: state().startswith("on gloo: "))
assert not is_ours()
say(state())
dist.destroy_process_group()
"""
    for output in run(SETUP + MESSAGES + script, 2, timeout=60, env=BESIDE):
        assert "it was used to send and receive before" in output


@pytest.mark.slow
def test_a_rank_killed_after_the_decision_ends_the_others_in_an_error_by_the_deadline() -> None:
    script = """
init(timeout=15.0)
finish()
if rank == 1:
    decided = change_over.ChangingGroup._agree
    def then(self):
        say("agreed")
        os.kill(os.getpid(), signal.SIGKILL)
    go = change_over.ChangingGroup._until
    def looked(self, ready, seconds=None):
        go(self, ready, seconds)
        if self._armed_key:
            then(self)
    change_over.ChangingGroup._until = looked
def loop():
    while True:
        total = torch.ones(3)
        dist.all_reduce(total)
        assert total.tolist() == [2.0] * 3
        step()
        time.sleep(0.01)
error, seconds = told(loop)
say("error", seconds < 40.0)
os._exit(0)
"""
    with Ranks(SETUP + script, 2, BESIDE) as ranks:
        outcomes = ranks.wait(90)
    assert "agreed" in outcomes[1].output
    assert "error True" in outcomes[0].output


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["compiling", "made", "installed", "armed"])
def test_a_group_may_be_destroyed_at_any_point_and_made_again(moment: str) -> None:
    script = f"""
reached = dict(compiling=lambda each: True, made=lambda each: each._ours is not None,
               installed=lambda each: each._in_front is not None, armed=lambda each: bool(each._armed_key))
init()
if "{moment}" != "compiling":
    finish()
until(lambda: reached["{moment}"](change_over._CHANGING[0]))
dist.destroy_process_group()
compiling[0] = True
init(suffix="again")
finish()
until(lambda: state(1).startswith("deepytorch's"))
assert is_ours()
change_over._CHANGING[0].thread.join(20)
say(state(0), "then", state(1))
dist.destroy_process_group()
"""
    for output in run(SETUP + script, 2, timeout=90, env=BESIDE):
        assert "then deepytorch's" in output
        assert output.startswith("ended") or moment == "armed"


class Alone:
    """A group of one rank, with ours in front of its gloo. own: ours runs over another gloo, as between hosts."""

    def __init__(self, store: dist.Store | None = None, own: bool = False) -> None:
        self.module: Any = native.load()
        self.store = dist.HashStore()
        self.gloo: Any = dist.ProcessGroupGloo(dist.PrefixStore("stock", self.store), 0, 1, timedelta(seconds=10))
        self.gloo._set_sequence_number_for_group()
        self.group = dist.ProcessGroup(self.store, 0, 1)
        kinds = dist.ProcessGroup.BackendType
        self.group._register_backend(torch.device("cpu"), kinds.GLOO, self.gloo)
        nothing: dict[str, Any] = {"cuda": None, "segment": None, "between": []}
        one = {"rank": 0, "size": 1, "num_hosts": 1, "host": 0, "ranks": [0], "timeout_ms": 10_000}
        ten = timedelta(seconds=10)
        self.inner: Any = inner_backends.gloo_in_order(self.store, 0, 1, ten, ten) if own else None
        ours = self.module.Backend(cpu=self.inner if own else self.gloo, **one, **nothing)
        begun = self.gloo._get_sequence_number_for_group()
        asked = self.store if store is None else store
        self.front: Any = self.module.ChangeOver(stock=self.gloo, ours=ours, store=asked, begun=begun)
        self.in_front = change_over.InFront(self.group, self.gloo, self.front)

    def collective(self) -> None:
        tensor = torch.ones(2)
        self.group.allreduce([tensor]).wait()
        assert tensor.tolist() == [1.0, 1.0]


def test_it_changes_in_front_of_the_very_collective_that_was_decided_on() -> None:
    alone = Alone()
    del alone.gloo
    assert alone.in_front.arm(3, "k") == ""
    alone.front.decide("k", True)
    for number in range(3):
        assert not alone.front.is_over
        assert alone.front.position() == number
        alone.collective()
    alone.collective()
    assert alone.front.is_over


def test_who_comes_there_undecided_decides_against_it_and_may_be_armed_again() -> None:
    alone = Alone()
    del alone.gloo
    assert alone.in_front.arm(1, "k") == ""
    alone.collective()
    alone.collective()
    assert not alone.front.is_over
    assert alone.store.compare_set("k", "", "go") == b"no"
    alone.front.decide("k", False)
    assert alone.in_front.arm(3, "next") == ""
    assert alone.store.compare_set("next", "", "go") == b"go"  # nobody has told it yet: it asks
    alone.collective()
    assert not alone.front.is_over
    alone.collective()
    assert alone.front.is_over


def test_it_is_not_armed_for_what_is_over_nor_while_gloo_is_called_past_it() -> None:
    alone = Alone()
    assert "somebody holds the group's gloo backend" in alone.in_front.arm(5, "k")
    alone.gloo.allreduce([torch.ones(2)], dist.AllreduceOptions()).wait()
    del alone.gloo
    assert "was called past the group" in alone.in_front.arm(5, "k")
    other = Alone()
    del other.gloo
    other.collective()
    assert "was called already" in other.in_front.arm(1, "k")


def test_a_call_past_the_group_is_not_forgotten_when_others_follow_it() -> None:
    alone = Alone()
    alone.gloo.allreduce([torch.ones(2)], dist.AllreduceOptions()).wait()
    del alone.gloo
    alone.collective()
    assert "was called past the group" in alone.in_front.arm(5, "k")


def test_a_timeout_that_is_set_while_gloo_runs_is_that_of_both() -> None:
    alone = Alone(own=True)
    alone.front.set_timeout(timedelta(seconds=7))
    assert alone.gloo.options._timeout == alone.inner.options._timeout == timedelta(seconds=7)
    del alone.gloo
    assert alone.in_front.arm(1, "k") == ""
    alone.front.decide("k", True)
    alone.collective()
    alone.collective()
    assert alone.front.is_over


@pytest.mark.parametrize(("lazy", "seconds"), [("", 4), ("0", 4), ("1", 60)])
def test_lazy_connections_have_the_deadline_of_calls(lazy: str, seconds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", lazy)
    asked = inner_backends._to_connect(timedelta(seconds=4), timedelta(seconds=60))
    assert asked == timedelta(seconds=seconds)


def test_what_an_earlier_reduce_scatter_has_written_is_not_written_again() -> None:
    alone = Alone()
    del alone.gloo
    output = torch.zeros(3)
    work = alone.group._reduce_scatter_base(output, torch.arange(3.0), dist.ReduceScatterOptions())
    work.wait()
    output.mul_(10)  # as an average, or an optimizer
    at = alone.front.position()
    assert alone.in_front.arm(at + 1, "k") == ""
    alone.front.decide("k", True)
    for _ in range(4):
        alone.collective()
    assert alone.front.is_over
    assert output.tolist() == [0.0, 10.0, 20.0]
    del work


def test_a_store_that_is_gone_ends_in_an_error_that_says_so() -> None:
    server: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    alone = Alone(dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=5)))
    del alone.gloo
    assert alone.in_front.arm(1, "k") == ""
    alone.collective()
    del server
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"their store is gone.*`deepytorch build`"):
            alone.collective()


def test_messages_are_not_counted_as_collectives() -> None:
    alone = Alone()
    alone.group.monitored_barrier(timedelta(seconds=5))
    alone.collective()
    alone.group.barrier().wait()
    assert alone.front.position() == 2


def test_what_is_sent_on_a_group_is_noticed_and_that_nobody_looks_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    class Sender:
        def send(self, to: int) -> int:
            return to

    mine, other = Sender(), Sender()
    group = SimpleNamespace(holds=lambda caller: caller is mine, sent_messages=False)
    monkeypatch.setattr(change_over, "_CHANGING", [group])
    change_over._watch(Sender, "send")
    assert (other.send(3), group.sent_messages) == (3, False)
    assert (mine.send(4), group.sent_messages) == (4, True)
    group.sent_messages = False
    [entry] = [each for each in patches.ledger() if each.where.endswith("Sender.send")]
    entry.undo()
    patches.forget(entry.where)
    assert (mine.send(5), group.sent_messages) == (5, True)


DROPPED = """
import sys
from datetime import timedelta
import torch
import torch.distributed as dist
from deepytorch.comm.group.native import native
module = native.load()
sys.setswitchinterval(10)  # this thread keeps the interpreter's lock wherever nobody lets go of it
for _ in range(300):
    store = dist.HashStore()
    gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), 0, 1, timedelta(seconds=10))
    gloo._set_sequence_number_for_group()
    one = {"rank": 0, "size": 1, "num_hosts": 1, "host": 0, "ranks": [0], "timeout_ms": 10_000}
    last = module.Backend(cpu=gloo, cuda=None, segment=None, between=[], **one)
    if "front" in sys.argv:
        begun = gloo._get_sequence_number_for_group()
        last = module.ChangeOver(stock=gloo, ours=last, store=store, begun=begun)
    del gloo
    last.allreduce([torch.ones(2)], dist.AllreduceOptions()).wait()
    del last
print("done")
"""


@pytest.mark.parametrize("which", ["front", "group"])
def test_python_drops_the_last_reference_while_gloo_drops_a_tensor_of_python(which: str) -> None:
    native.load()  # compiled here, where no deadline runs
    done = run_script(DROPPED, which, timeout=60)
    assert done.stdout.split() == ["done"], done.stderr
