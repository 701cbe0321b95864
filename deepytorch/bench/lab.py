"""The lab: hosts simulated by network namespaces on one machine, joined by links of a chosen rate.

Each host is a namespace with one device. A bridge in another namespace is the switch: the machine's own network is
never touched. No namespace has a name; the kernel removes one, with its devices, when its last process and file
descriptor are gone.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import itertools
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from deepytorch.bench import namespaces
from deepytorch.bench.processes import Program, ending, last_lines, rank_environment
from deepytorch.bench.shaping import MTU_BYTES, flow_commands, link_commands, parse_rate, segment_bytes
from deepytorch.errors import ConfigError
from deepytorch.log import logger

if TYPE_CHECKING:
    from rich.console import Console

T = TypeVar("T")

DEVICE = "lab0"  # a host's only device besides lo; the same name everywhere, as on real hosts
MAX_HOSTS = 250
TIMED_OUT = 124  # exit status, as that of timeout(1)

_FIRST_PORT = 29500  # torchrun's default, below the ephemeral ports of connections
_TERM_GRACE_S = 3.0
_POLL_S = 0.05
_TAIL_LINES = 20
_TOOL_LIMIT_S = 60
_KEEPER_LIMIT_S = 30
_KERNEL_PARTS = {
    "htb": "the qdisc htb (CONFIG_NET_SCH_HTB, module sch_htb)",
    "bfifo": "the qdisc bfifo (CONFIG_NET_SCHED)",
    "bpf": "the classifier bpf (CONFIG_NET_CLS_BPF, module cls_bpf)",
    "bridge": "the device bridge (CONFIG_BRIDGE, module bridge)",
    "veth": "the device veth (CONFIG_VETH, module veth)",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class LabOptions:
    """The options of a lab. Raises `ConfigError` for a value that is not accepted."""

    hosts: int = 2
    ranks: int = 1  # of each host
    rate: str = "1gbit"  # of each host, in each direction, as tc writes it
    flow_rate: str | None = None  # of each TCP connection between hosts, in each direction
    logs: Path | None = None  # folder; None: a fresh one in the temporary folder
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        """Check every value."""
        if not 1 <= self.hosts <= MAX_HOSTS:
            raise ConfigError(f"hosts is {self.hosts}, expected 1 to {MAX_HOSTS}: they share one simulated network.")
        if self.ranks < 1:
            raise ConfigError(f"ranks is {self.ranks}, expected 1 or more for each host.")
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise ConfigError(f"timeout is {self.timeout_s} s, expected more than 0 (or none).")
        rate, flow = self.rate_bits_per_s, self.flow_bits_per_s  # both are read, so both are checked
        if flow is not None and flow > rate:
            raise ConfigError(
                f"flow-rate is {self.flow_rate} and rate is {self.rate}, expected a flow-rate of at most the rate: "
                "it would cap nothing. Lower it or leave it out."
            )

    @property
    def rate_bits_per_s(self) -> int:
        """Return the rate that a host may send, and may receive."""
        return parse_rate(self.rate)

    @property
    def flow_bits_per_s(self) -> int | None:
        """Return the rate of a TCP connection between hosts in each direction, or None for no cap."""
        return None if self.flow_rate is None else parse_rate(self.flow_rate, "flow-rate")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rank:
    """One process that the lab started, the leader of its own session and process group."""

    index: int  # of all ranks
    host: int
    process: subprocess.Popen[bytes]
    log: Path


# ranks that ended with their return codes, and signals to this process, in the order of arrival
_Events: TypeAlias = "queue.SimpleQueue[tuple[Rank, int] | signal.Signals]"


class Lab:
    """Simulated hosts, for as long as the `with` block runs. Everything that runs inside ends with it.

    Raises `ConfigError` if the machine cannot have a lab: see `check_machine`.
    """

    def __init__(self, options: LabOptions) -> None:
        self.options = options
        self.addresses = [f"10.0.0.{host + 1}" for host in range(options.hosts)]
        self.ranks: list[Rank] = []
        self._hosts: list[int] = []  # file descriptors of their namespaces
        self._resources = ExitStack()
        self._ports = itertools.count(_FIRST_PORT)

    def __enter__(self) -> Lab:
        check_machine()
        with ExitStack() as resources:
            switch = _create_namespace(resources)
            self._hosts = [_create_namespace(resources) for _ in range(self.options.hosts)]
            resources.enter_context(_keeper([switch, *self._hosts]))
            self._connect(switch)
            resources.callback(self.end)
            self.logs = self.options.logs or Path(tempfile.mkdtemp(prefix="deepytorch-lab-"))
            self._resources = resources.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._resources.close()

    def start(
        self,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        logs: Path | None = None,
        stdins: Sequence[int] | None = None,
    ) -> list[Rank]:
        """Start `command` once per rank and return the ranks, which keep running.

        `env` is set on top of this process's environment, and torchrun's variables on top of that. Output goes to
        `hostN-rankM.log` in `logs` (default: the lab's folder), and replaces that of an earlier call. stdins: a file
        descriptor for each rank's stdin.
        """
        command = _resolve(command)
        logs = logs or self.logs
        try:
            logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"The folder for logs is {logs}, expected one that can be made: {error}.") from error
        common = self._common_environment({**os.environ, **(env or {})})
        started, ranks = [], self.options.hosts * self.options.ranks
        for index in range(ranks):
            host = index // self.options.ranks
            own = rank_environment(index, ranks, self.options.ranks)
            environment = {**common, **own, "NODE_RANK": str(host)}
            log = logs / f"host{host}-rank{index}.log"
            stdin = subprocess.DEVNULL if stdins is None else stdins[index]
            program = self.inside(host, partial(Program, command, log, env=environment, stdin=stdin))
            started.append(Rank(index=index, host=host, process=program.process, log=log))
            self.ranks.append(started[-1])
        return started

    def inside(self, host: int, function: Callable[[], T]) -> T:
        """Call `function` in a thread on `host`: its processes and sockets belong to that host."""
        return namespaces.inside(self._hosts[host], function)

    def end(self) -> None:
        """End all ranks and everything else on the hosts: SIGTERM to the ranks' groups, 3 seconds later SIGKILL."""
        running = [rank for rank in self.ranks if rank.process.poll() is None]
        for rank in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.process.pid, signal.SIGTERM)
        deadline = time.monotonic() + _TERM_GRACE_S
        for rank in running:
            try:
                rank.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                rank.process.kill()
        left = namespaces.end_processes(self._hosts)
        for pid in left:
            logger.warning("process %d of the lab does not end, its simulated host stays until it does", pid)
        for rank in self.ranks:
            if rank.process.pid not in left:
                rank.process.wait()
        self.ranks.clear()

    def _connect(self, switch: int) -> None:
        """Give each host its device, its address and its rate, and connect it to the switch."""
        rate, flow = self.options.rate_bits_per_s, self.options.flow_bits_per_s
        size = f"mtu {MTU_BYTES} gso_max_size {segment_bytes(rate)}"
        links = ["link add switch type bridge", "link set lo up", "link set switch up"]
        for host, namespace in enumerate(self._hosts):
            links += [
                f"link add host{host} type veth peer name {DEVICE} netns /proc/self/fd/{namespace}",
                f"link set host{host} master switch {size} up",
            ]
        _set_network(switch, {"ipv6/conf/default/disable_ipv6": "1"})
        _batch(switch, "ip", links, self._hosts)
        # the rate of a host's incoming traffic, then of its outgoing traffic
        ports = [line for host in range(len(self._hosts)) for line in link_commands(f"host{host}", rate)]
        _batch(switch, "tc", ports)
        sending = link_commands(DEVICE, rate) if flow is None else flow_commands(DEVICE, rate, flow)
        for namespace, address in zip(self._hosts, self.addresses, strict=True):
            # cubic, Linux's default: some machines set another, which would not fill a link in the same way
            settings = {"ipv4/tcp_congestion_control": "cubic", f"ipv6/conf/{DEVICE}/disable_ipv6": "1"}
            _set_network(namespace, settings)
            up = [f"addr add {address}/24 dev {DEVICE}", "link set lo up", f"link set {DEVICE} {size} up"]
            _batch(namespace, "ip", up)
            _batch(namespace, "tc", sending)

    def _common_environment(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return the variables that torchrun would set equally for all ranks, on top of `environment`."""
        # an outer torchrun's store and identity are not these ranks'
        kept = {name: value for name, value in environment.items() if not name.startswith("TORCHELASTIC_")}
        return {
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",  # logs can be followed, and are complete when a rank is killed
            "DEEPYTORCH_LINKS": "measure",  # this network is not the one of the last lab, nor of the machine
            **kept,
            "GROUP_WORLD_SIZE": str(self.options.hosts),
            "MASTER_ADDR": self.addresses[0],
            "MASTER_PORT": str(self.inside(0, lambda: _free_port(self._ports))),
            "GLOO_SOCKET_IFNAME": DEVICE,
        }


def run_lab(options: LabOptions, command: Sequence[str], console: Console) -> int:
    """Run `command` once per rank, show rank 0's output on `console` and return the exit status.

    The status is 0; that of the first failing rank (128 + n for one that signal n ended), which ends the others; 124
    after the time limit; 128 + n when this process gets SIGINT, SIGTERM or SIGHUP. Raises `ConfigError`.
    """
    command = _resolve(command)
    events: _Events = queue.SimpleQueue()
    with _signals_into(events), Lab(options) as lab:
        deadline = time.monotonic() + (options.timeout_s or float("inf"))
        shape = f"{options.rate} a host" + (f", {options.flow_rate} a connection" if options.flow_rate else "")
        console.print(
            f"{options.hosts} hosts x {options.ranks} ranks, {shape}; logs in {lab.logs}",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
        ranks = lab.start(command)
        for rank in ranks:
            threading.Thread(target=_await_end, args=(rank, events), daemon=True).start()
        with _Follower(ranks[0].log, console) as follower:
            status, reason = _wait(len(ranks), events, deadline, follower)
            lab.end()
    if reason:
        console.print(reason, style="bold red", markup=False, highlight=False, soft_wrap=True)
    return status


def check_machine() -> None:
    """Raise `ConfigError` if hosts cannot be simulated: not Linux, not root, or no iproute2."""
    if sys.platform != "linux":
        raise ConfigError(
            f"The lab was started on {sys.platform}, expected Linux: its hosts are network namespaces. "
            "Use a Linux machine, or a Linux virtual machine on this one."
        )
    if os.geteuid() != 0:
        raise ConfigError(
            f"The lab was started by user {os.geteuid()}, expected root (user 0), who may make network namespaces. "
            'Start it with sudo: sudo "$(command -v deepytorch)" lab ...'
        )
    missing = [tool for tool in ("ip", "tc") if _tool(tool) is None]
    if missing:
        raise ConfigError(
            f"The lab found no {' and no '.join(missing)}, expected both ip and tc on PATH. "
            "Install iproute2 (Debian, Ubuntu, Arch) or iproute and iproute-tc (Fedora)."
        )


class _Follower:
    """Copies the new contents of a log file to the console."""

    def __init__(self, log: Path, console: Console) -> None:
        self._console = console
        self._file = log.open("rb")
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def __enter__(self) -> _Follower:
        return self

    def __exit__(self, *_: object) -> None:
        with self._file:
            self.copy()

    def copy(self) -> None:
        text = self._decoder.decode(self._file.read())
        if text:  # unchanged: with carriage returns of progress bars, and colours
            self._console.file.write(text)
            self._console.file.flush()


def _await_end(rank: Rank, events: _Events) -> None:
    events.put((rank, rank.process.wait()))


def _wait(
    num_ranks: int,
    events: _Events,
    deadline: float,
    follower: _Follower,
) -> tuple[int, str | None]:
    """Return the lab's exit status and, unless every rank succeeded, a message about it."""
    while num_ranks:
        follower.copy()
        try:
            event = events.get(timeout=max(0.0, min(_POLL_S, deadline - time.monotonic())))
        except queue.Empty:
            if time.monotonic() > deadline:
                return TIMED_OUT, "The time limit is over: all ranks are ended."
            continue
        if isinstance(event, signal.Signals):
            return 128 + event, f"{event.name}: all ranks are ended."
        rank, code = event
        if code:
            return (128 - code if code < 0 else code), _describe_failure(rank, code)
        num_ranks -= 1
    return 0, None


def _describe_failure(rank: Rank, code: int) -> str:
    how = ending(code, "exited with status")
    what = f"Rank {rank.index} on host {rank.host} {how}, the other ranks are ended; its log is {rank.log}"
    tail = last_lines(rank.log, _TAIL_LINES)
    return "\n".join([f"{what}, which ends with:", *tail]) if tail else f"{what}, which is empty."


@contextlib.contextmanager
def _signals_into(events: _Events) -> Iterator[None]:
    """Turn signals that ask this process to end into events, so that none can interrupt the cleaning."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    # an ignored signal (nohup) stays ignored
    before = {number: signal.getsignal(number) for number in asked if signal.getsignal(number) != signal.SIG_IGN}
    for number in before:
        signal.signal(number, lambda number, _: events.put(signal.Signals(number)))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _keeper(held: Sequence[int]) -> Iterator[None]:
    """Run a process that, at the end, ends everything in the namespaces `held`.

    The keeper does so even if this process dies before (SIGKILL).
    """
    keeper = subprocess.Popen(
        namespaces.keeper_command(held), stdin=subprocess.PIPE, pass_fds=held, start_new_session=True, cwd="/"
    )
    try:
        yield
    finally:
        try:
            keeper.communicate(timeout=_KEEPER_LIMIT_S)  # closes the pipe; the keeper checks once more, and ends
        finally:
            keeper.kill()


def _create_namespace(resources: ExitStack) -> int:
    try:
        namespace = namespaces.create()
    except OSError as error:
        remedy = (
            "a container needs --privileged (or --cap-add SYS_ADMIN and NET_ADMIN)"
            if error.errno == errno.EPERM
            else "the kernel needs CONFIG_NET_NS"
        )
        raise ConfigError(
            f"The kernel refused a network namespace ({error.strerror}), expected root to be given one: {remedy}."
        ) from error
    resources.callback(os.close, namespace)
    return namespace


def _batch(namespace: int, tool: str, commands: Sequence[str], pass_fds: Sequence[int] = ()) -> None:
    """Run `commands` with `ip` or `tc` inside `namespace`."""
    done = namespaces.inside(
        namespace,
        lambda: subprocess.run(
            [_tool(tool) or tool, "-batch", "-"],
            input="".join(f"{command}\n" for command in commands),
            text=True,
            capture_output=True,
            check=False,
            pass_fds=pass_fds,
            timeout=_TOOL_LIMIT_S,
        ),
    )
    if done.returncode != 0:
        raise ConfigError(_describe_refusal(tool, commands, done.stderr))


def _describe_refusal(tool: str, commands: Sequence[str], stderr: str) -> str:
    """Name the command of the batch that failed and, if known, the kernel feature that it lacks."""
    said, _, line = stderr.strip().partition("Command failed -:")
    command = commands[int(line) - 1] if line.isdecimal() and 0 < int(line) <= len(commands) else commands[0]
    words = command.split()
    parts = [need for part, need in _KERNEL_PARTS.items() if part in words]
    return f"`{tool} {command[:120]}` failed: {' '.join(said.split())} " + (
        f"Expected a kernel with {parts[0]}: load the module, or use a kernel that has it."
        if parts
        else "Expected a kernel and an iproute2 that know it: are both recent?"
    )


def _tool(name: str) -> str | None:
    """Return the path of the program `name`; root's PATH lacks the system folders after a plain `su`."""
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"]))


def _set_network(namespace: int, values: Mapping[str, str]) -> None:
    """Write settings below /proc/sys/net for one namespace; settings that the kernel lacks are skipped."""

    def write() -> None:
        for name, value in values.items():
            with contextlib.suppress(OSError):
                Path("/proc/sys/net", name).write_text(value)

    namespaces.inside(namespace, write)


def _resolve(command: Sequence[str]) -> list[str]:
    """Return `command` with this Python before a script. Raises `ConfigError` if there is nothing to run."""
    if not command:
        raise ConfigError("No command was given, expected one after `--`: deepytorch lab -- train.py --steps 10.")
    if command[0].endswith(".py"):
        found, resolved = Path(command[0]).is_file(), [sys.executable, *command]
    else:
        found, resolved = shutil.which(command[0]) is not None, list(command)
    if not found:
        raise ConfigError(f"The command is {command[0]!r}, expected a Python file or a program on PATH.")
    return resolved


def _free_port(candidates: Iterator[int]) -> int:
    for port in candidates:
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return port
    raise AssertionError("the ports to try never end")
