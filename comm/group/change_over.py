"""A group that was made while its C++ was being compiled goes over from stock gloo to ours.

How ranks come to change in front of the same collective: [Note: Change-over of a group] in csrc/change_over.h. Here is
what a thread of each rank does for that: wait for the compiled code, make the group's backend, have it put in front of
gloo behind an optimizer step (when no call of the training loop's own thread is under way), and agree on a collective.
"""

from __future__ import annotations

import atexit
import functools
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from deepytorch.comm.group.native import native
from deepytorch.log import logger
from deepytorch.patches import listen, patch

MAKE_TIMEOUT = timedelta(seconds=30)  # all ranks have said that they begin
_STORE_TIMEOUT = timedelta(seconds=10)  # nothing is waited for there: what is asked for is there
_LOOK_SECONDS = 0.5  # between two looks into the store, and while ranks agree:
_AGREE_SECONDS = 0.05
_AHEAD_SECONDS, _RATE_SECONDS = 1.0, 0.3  # how far ahead a proposal is, by the calls of that long
_ATTEMPTS = 10  # each twice as far ahead
_MESSAGES = ("send", "recv", "recv_anysource", "monitored_barrier")  # gloo counts them as if they were collectives


_Make = Callable[[Any, dist.Store, Any], tuple[Any, Callable[[], object]]]


class Stays(Exception):
    """Why a group stays on gloo."""


class _Ended(Exception):
    """The group, or the process, ends."""


class InFront:
    """The native `ChangeOver`, put in front of `gloo` in a group's backends for CPU tensors.

    Who holds gloo could call it past the group. In C++ its references are counted. From torch 2.14 on a group keeps the
    Python object of each of its backends, which whoever asks for one is given: of that one, too.
    """

    def __init__(self, group: dist.ProcessGroup, gloo: Any, change_over: Any) -> None:
        before = sys.getrefcount(change_over)
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, change_over)
        self._kept = weakref.ref(gloo) if sys.getrefcount(change_over) > before else None
        self.native = change_over

    def arm(self, at: int, key: str) -> str:
        """Change in front of collective `at`, if the store says so under `key` by then; why not, or nothing."""
        gloo = None if self._kept is None else self._kept()
        if gloo is not None and sys.getrefcount(gloo) > _OF_ONE_KEPT:
            return "somebody holds the group's gloo backend, to call it past the group"
        return str(self.native.arm(at, key, gloo is not None))


def _references_of_one_kept() -> int:
    """What `getrefcount` says of an object that one other holds, and a local name: 3, or 2 from Python 3.14 on."""
    others = [object()]
    kept = others[0]
    return sys.getrefcount(kept)


_OF_ONE_KEPT = _references_of_one_kept()


class ChangingGroup:
    """One group of `size` ranks, on one of them.

    group: runs on `gloo` for CPU tensors, by this name. store: of these ranks and this life of the group alone. make:
    the native backend over `gloo`, agreed by all ranks, and what is to be called when it is in place; raises `Stays`.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        gloo: Any,
        name: str,
        store: Any,
        rank: int,
        size: int,
        make: _Make,
    ) -> None:
        self.state = "on gloo while deepytorch's collectives are compiled"
        self.name, self.rank, self.size = name, rank, size
        self.sent_messages = False
        self._group, self._gloo, self._make = weakref.ref(group), gloo, make
        self._begun = gloo._get_sequence_number_for_group()
        self._store: Any = store.clone()  # a connection of its own: the loop's own calls never wait for this thread
        if _beneath(self._store) is not _beneath(store):  # else it is the script's own
            self._store.set_timeout(_STORE_TIMEOUT)
        self._module: Any = None
        self._ours: Any = None
        self._adopt: Callable[[], object]
        self._in_front: Any = None  # of gloo, once it is installed
        self._armed_key, self._unfit = "", ""
        self._installed, self._stopped = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self._run, name="deepytorch-change-over", daemon=True)

    def holds(self, caller: Any) -> bool:
        """Whether a process group, or a backend, is this one's."""
        return caller is self._gloo or caller is self._group()

    def stop(self) -> None:
        """End the thread soon."""
        self._stopped.set()

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            self._prepare()
            at = self._agree()
            self._until(lambda: bool(self._in_front.native.is_over))
            self.state = f"deepytorch's since collective {at}"
            logger.info("the collectives of process group %s are deepytorch's now", self.name)
        except _Ended:
            self.state = "ended"
        except Stays as why:
            self._stay(str(why))
        except Exception as error:  # the training loop is none the worse for it: what is armed knows by itself
            self._stay(f"rank {self.rank}: {error}")
        finally:
            self._let_go()

    def _prepare(self) -> None:
        """Until every rank has its backend in front of gloo."""
        self._until(lambda: native.is_built() or not native.builds_beside())
        self._module = native.load() if native.is_built() else None
        if self._module is None:
            why = native.failed(lately=True) or "deepytorch's C++ was not compiled"
            raise Stays(f"rank {self.rank}: {why.splitlines()[0]}")
        if self._store.compare_set("digest", "", native.digest()).decode() != native.digest():
            raise Stays("ranks have different builds of deepytorch")
        self._meet("ready")
        self._ours, self._adopt = self._make(self._module, dist.PrefixStore("group", self._store), self._gloo)
        self._meet("made")
        with _LOCK:
            _TO_INSTALL.append(self)
        self.state = "on gloo until the ranks have agreed on a collective"
        self._until(self._installed.is_set)
        if self._unfit:
            raise Stays(self._unfit)
        self._meet("installed")

    def _agree(self) -> int:
        """The collective that all ranks change in front of."""
        refusal = ""
        for attempt in range(_ATTEMPTS):
            key = f"decision/{attempt}"
            at = self._proposal(attempt)
            mine = self._in_front.arm(at, key)
            self._armed_key = "" if mine else key
            if mine:
                refusal = f" (rank {self.rank}: {mine})"
                self._store.compare_set(key, "", "no")
            elif self._store.add(f"armed/{attempt}", 1) == self.size:
                self._store.compare_set(key, "", "go")
            self._until(functools.partial(self._store.check, [key]), _AGREE_SECONDS)
            go = self._store.get(key) == b"go"
            self._in_front.native.decide(key, go)
            if go:
                return at
            self._armed_key = ""
        raise Stays(f"no collective was found that all ranks could change in front of{refusal}")

    def _proposal(self, attempt: int) -> int:
        """Which collective it is to be: rank 0 says so."""
        key = f"at/{attempt}"
        if self.rank == 0:
            before, since = self._in_front.native.position(), time.monotonic()
            self._until(lambda: time.monotonic() - since > _RATE_SECONDS, _AGREE_SECONDS)
            now = self._in_front.native.position()
            rate = (now - before) / (time.monotonic() - since)
            ahead = max(2, math.ceil(rate * _AHEAD_SECONDS)) << attempt
            self._store.set(key, str(now + ahead))
        self._until(functools.partial(self._store.check, [key]), _AGREE_SECONDS)
        return int(self._store.get(key))

    def _meet(self, word: str) -> None:
        """Until all ranks have come here."""
        if self._store.add(word, 1) == self.size:
            self._store.set(f"all/{word}", "")
        self._until(functools.partial(self._store.check, [f"all/{word}"]))

    def _until(self, ready: Callable[[], bool], seconds: float | None = None) -> None:
        """Look every so often. It ends with the group, or where a rank has said that it stays."""
        while True:
            if self._stopped.is_set() or self._group() is None:
                raise _Ended
            if self._store.check(["stays"]):
                raise Stays(self._store.get("stays").decode())
            if ready():
                return
            self._stopped.wait(_LOOK_SECONDS if seconds is None else seconds)

    def _stay(self, why: str) -> None:
        if self._stopped.is_set() or self._group() is None:  # it has ended: that explains any error
            self.state = "ended"
            return
        try:
            key = self._armed_key
            if key and self._store.compare_set(key, "", "no") != b"no":
                self.state = f"deepytorch's soon: it is decided, but {why}"
                return
            self._store.compare_set("stays", "", why)
        except RuntimeError as error:
            logger.debug("the ranks of a process group cannot be told: %s", error)
        self.state = f"on gloo: {why}"
        logger.info("process group %s stays on gloo: %s. Later groups, and the next run, use ours", self.name, why)

    def _let_go(self) -> None:
        """Drop what was made; where it is not in front of gloo, with the group, since its end would shut gloo down."""
        while self._ours is not None and self._in_front is None:
            if self._group() is None or self._stopped.wait(_LOOK_SECONDS):
                break
        with _LOCK:
            if self in _TO_INSTALL:
                _TO_INSTALL.remove(self)
        self._gloo = self._ours = self._in_front = self._store = None

    # ------------------------------------------------------------------ the training loop's thread

    def install(self) -> None:
        """Put the backend in front of gloo. Calls from now on are counted there."""
        group, gloo, ours = self._group(), self._gloo, self._ours
        if group is None or ours is None:
            return
        try:
            if not self.sent_messages:
                known_as = str(dist.get_backend(group))  # raises where it was destroyed, and is merely held by somebody
                change_over = self._module.ChangeOver(gloo, ours, self._store, self._begun)
                self._in_front, self._gloo = InFront(group, gloo, change_over), None
                self._adopt()
                if "deepytorch" not in known_as:
                    ours.show_as_gloo()
            if self.sent_messages:  # looked at again: another thread may have come in between
                self._unfit = "it was used to send and receive before, and gloo counts that as collectives"
        except (RuntimeError, ValueError) as error:  # none of the optimizer's, whose step this stands behind
            self._unfit = f"rank {self.rank}: {error}"
        self._installed.set()


def _beneath(store: Any) -> Any:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


_LOCK = threading.Lock()
_CHANGING: list[ChangingGroup] = []
_TO_INSTALL: list[ChangingGroup] = []
_process = os.getpid()


def begin(group: dist.ProcessGroup, gloo: Any, name: str, store: dist.Store, rank: int, size: int, make: _Make) -> None:
    """Let a group change over as soon as all its ranks can; its arguments are those of `ChangingGroup`.

    Nobody has asked for it, so what is in its way is no error: a store without a second connection, no thread.
    """
    try:
        _begin(ChangingGroup(group, gloo, name, store, rank, size, make))
    except (RuntimeError, NotImplementedError, AttributeError) as error:
        logger.info("process group %s stays on gloo: %s", name, error)


def _begin(changing: ChangingGroup) -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    _watch_messages(changing)
    listen(register_optimizer_step_post_hook, _stepped, "change process groups over behind a step", _nothing)
    with _LOCK:
        if not _CHANGING:
            atexit.register(_stop)
    changing.thread.start()
    with _LOCK:
        _CHANGING.append(changing)


def standings() -> list[dict[str, str]]:
    """Each group that was made on stock gloo while the C++ was compiled, and what has become of it."""
    with _LOCK:
        return [{"name": each.name, "state": each.state} for each in _CHANGING]


def _nothing() -> None:
    """Nothing to do when torch does not call any more: groups stay as they are."""


def _stepped(*_: Any) -> None:
    if not _TO_INSTALL or os.getpid() != _process:
        return
    with _LOCK:
        waiting = list(_TO_INSTALL)
        _TO_INSTALL.clear()
    for each in waiting:
        each.install()


def _stop() -> None:
    for each in list(_CHANGING):
        each.stop()
    deadline = time.monotonic() + MAKE_TIMEOUT.total_seconds()
    if os.getpid() == _process:
        for each in list(_CHANGING):
            each.thread.join(max(0.0, deadline - time.monotonic()))


def _watch_messages(changing: ChangingGroup) -> None:
    """Notice messages between two ranks on groups that have nothing of ours in front of gloo yet."""
    backend = next(each for each in type(changing._gloo).__mro__ if "send" in vars(each))
    for owner in (dist.ProcessGroup, backend):
        for name in _MESSAGES:
            _watch(owner, name)


def _watch(owner: Any, name: str) -> None:
    original = getattr(owner, name)

    def watching(self: Any, *args: Any, **kwargs: Any) -> Any:
        _saw(self)
        return original(self, *args, **kwargs)

    functools.update_wrapper(watching, original)
    # pybind11 looks for this name among the frames when an override in Python calls its base
    watching.__code__ = watching.__code__.replace(co_name=name)

    def undo() -> bool:
        _saw(None)
        if vars(owner).get(name) is not watching:
            return False
        setattr(owner, name, original)
        return True

    where = f"{owner.__module__}.{owner.__qualname__}.{name}"
    patch(where, "see what is sent between two ranks", lambda: setattr(owner, name, watching), undo, always=True)


def _saw(caller: Any) -> None:
    """A message is sent on a group, or by a backend; None: from now on nobody would tell."""
    for each in _CHANGING:
        if caller is None or each.holds(caller):
            each.sent_messages = True
