"""The lab: hosts that talk at the chosen rate, and nothing left of them, however they end."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from rich.console import Console

from deepytorch.bench import lab as lab_module
from deepytorch.bench.lab import DEVICE, Lab, LabOptions, check_machine, run_lab
from deepytorch.bench.shaping import NUM_FLOW_LEAVES, flow_commands, parse_rate, segment_bytes
from deepytorch.errors import ConfigError
from tests.command_line import run

ROOT = Path(__file__).parents[2]
PAYLOAD = 1448 / 1514  # of a full frame

# --- without root


@pytest.mark.parametrize(
    "text, bits_per_s",
    [("200mbit", 200_000_000), ("1.5gbit", 1_500_000_000), ("5000 kbit", 5_000_000), ("1Gbit", 10**9)],
)
def test_a_rate_is_read_as_tc_writes_it(text, bits_per_s):
    assert parse_rate(text) == bits_per_s


@pytest.mark.parametrize("text", ["", "200", "200mb", "fast", "-1mbit", "999kbit", "101gbit", "1mbit; reboot"])
def test_another_rate_is_refused_with_an_example(text):
    with pytest.raises(ConfigError, match=r"rate is .*expected a number and kbit, mbit or gbit.*200mbit"):
        parse_rate(text)


@pytest.mark.parametrize(
    "values, message",
    [
        ({"hosts": 0}, "hosts is 0, expected 1 to 250"),
        ({"hosts": 251}, "hosts is 251"),
        ({"ranks": 0}, "ranks is 0"),
        ({"timeout_s": 0.0}, "timeout is 0.0 s"),
        ({"timeout_s": float("nan")}, "timeout is nan s"),
        ({"rate": "quick"}, "rate is 'quick'"),
        ({"flow_rate": "quick"}, "flow-rate is 'quick'"),
        ({"rate": "10mbit", "flow_rate": "20mbit"}, "flow-rate is 20mbit and rate is 10mbit"),
    ],
)
def test_an_option_that_nothing_can_be_made_of_is_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        LabOptions(**values)


def test_without_root_the_error_says_who_and_how(monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ConfigError, match=r"user 1000, expected root .*sudo"):
        check_machine()


def test_off_linux_the_error_says_so(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ConfigError, match="started on darwin, expected Linux"):
        check_machine()


def test_without_iproute2_the_error_names_the_missing_tool(monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(lab_module, "_tool", lambda name: "/sbin/ip" if name == "ip" else None)
    with pytest.raises(ConfigError, match=r"found no tc, .* Install iproute2"):
        check_machine()


@pytest.mark.parametrize(
    "kind, expected",
    [("htb", "kernel with the qdisc htb (CONFIG_NET_SCH_HTB"), ("bpf", "the classifier bpf"), ("up", "iproute2")],
)
def test_what_the_kernel_lacks_is_named(kind, expected):
    commands = ["link set lo down", f"qdisc add dev lo root {kind}", "link set lo up"]
    message = lab_module._describe_refusal("tc", commands, "Error: Unknown kind.\nCommand failed -:2\n")
    assert message.startswith(f"`tc qdisc add dev lo root {kind}` failed: Error: Unknown kind. Expected a kernel")
    assert expected in message


def test_large_segments_only_where_they_are_short_in_time():
    assert [segment_bytes(rate) for rate in (10**6, 10**8, 10**9, 10**11)] == [1514, 3125, 31250, 65536]


def test_the_flows_leaves_together_are_assured_no_more_than_the_rate():
    assured = [
        int(line.split("rate ")[1].split("bit")[0])
        for line in flow_commands("eth9", 10**7, 10**6)
        if "parent 1:1 c" in line
    ]
    assert len(assured) == NUM_FLOW_LEAVES + 1
    assert sum(assured) <= 10**7


def test_a_missing_program_or_none_is_refused():
    with pytest.raises(ConfigError, match="No command was given"):
        lab_module._resolve([])
    for name in ("no-such-program", "no_such_script.py"):
        with pytest.raises(ConfigError, match=f"The command is '{name}', expected a Python file or a program on PATH"):
            lab_module._resolve([name, "-v"])


def test_the_command_line_passes_everything_on(monkeypatch):
    asked = []
    monkeypatch.setattr(lab_module, "run_lab", lambda *given: asked.append(given) or 7)
    options = "--hosts 3 --ranks 2 --rate 50mbit --flow-rate 10mbit --logs out --timeout 9"
    assert run(monkeypatch, "lab", *options.split(), "--", "train.py", "--rate", "1") == 7
    ((options, command, _),) = asked
    assert options == LabOptions(hosts=3, ranks=2, rate="50mbit", flow_rate="10mbit", logs=Path("out"), timeout_s=9.0)
    assert command == ["train.py", "--rate", "1"]


# --- on simulated hosts


def console() -> Console:
    return Console(file=io.StringIO(), width=200)


def shown(on: Console) -> str:
    assert isinstance(on.file, io.StringIO)
    return on.file.getvalue()


@pytest.mark.lab
@pytest.mark.slow
def test_ranks_on_two_hosts_reduce_over_gloo(tmp_path):
    script = tmp_path / "reduce.py"
    script.write_text(
        "import os, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "value = torch.tensor([float(dist.get_rank() + 1)])\n"
        "dist.all_reduce(value)\n"
        "print('sum', value.item(), os.stat('/proc/self/ns/net').st_ino)\n"
        "dist.destroy_process_group()\n"
    )
    on = console()
    assert run_lab(LabOptions(ranks=2, logs=tmp_path / "logs", timeout_s=60), [str(script)], on) == 0
    logs = sorted((tmp_path / "logs").iterdir())
    assert [log.name for log in logs] == ["host0-rank0.log", "host0-rank1.log", "host1-rank2.log", "host1-rank3.log"]
    sums = [next(line.split() for line in log.read_text().splitlines() if line.startswith("sum")) for log in logs]
    assert [line[1] for line in sums] == ["10.0"] * 4
    namespaces = [line[2] for line in sums]
    assert namespaces[0] == namespaces[1] != namespaces[2] == namespaces[3]
    assert shown(on).count("sum 10.0") == 1, "rank 0's output and no other's is shown"
    assert str(tmp_path / "logs") in shown(on)


@pytest.mark.lab
def test_the_environment_is_torchruns(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    script = tmp_path / "show.py"
    script.write_text("import json, os, socket\nprint(json.dumps([dict(os.environ), socket.if_nameindex()]))\n")
    with Lab(LabOptions(ranks=2, logs=tmp_path)) as lab:
        ranks = lab.start([str(script)], {"EXTRA": "1"})
        assert [rank.process.wait(20) for rank in ranks] == [0] * 4
        seen = [json.loads(rank.log.read_text()) for rank in ranks]
        again = lab.start([str(script)], {"OMP_NUM_THREADS": "2"}, logs=tmp_path / "again")
        assert [rank.process.wait(20) for rank in again] == [0] * 4
        assert json.loads(again[3].log.read_text())[0]["OMP_NUM_THREADS"] == "2"
    names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK")
    assert ["".join(env[name] for name in names) for env, _ in seen] == ["0000", "1100", "2011", "3111"]
    for env, devices in seen:
        expected = {
            "WORLD_SIZE": "4",
            "LOCAL_WORLD_SIZE": "2",
            "GROUP_WORLD_SIZE": "2",
            "MASTER_ADDR": lab.addresses[0],
            "GLOO_SOCKET_IFNAME": DEVICE,
            "OMP_NUM_THREADS": "1",
            "EXTRA": "1",
        }
        assert {name: env[name] for name in expected} == expected
        assert env["MASTER_PORT"] == seen[0][0]["MASTER_PORT"]
        assert not [name for name in env if name.startswith("TORCHELASTIC")]
        assert DEVICE in [name for _, name in devices]


def goodput_bits_per_s(lab: Lab, senders: list[int], num_connections: int, seconds: float = 0.4) -> float:
    """Payload that host 1 takes from `num_connections` connections with each of the hosts `senders`."""
    stop, received = threading.Event(), [0] * (num_connections * len(senders))
    with ExitStack() as open_sockets:
        server = open_sockets.enter_context(lab.inside(1, lambda: socket.create_server((lab.addresses[1], 0))))
        pairs = []
        for host in [host for host in senders for _ in range(num_connections)]:
            sender = lab.inside(host, lambda: socket.create_connection(server.getsockname(), timeout=5))
            pairs.append((open_sockets.enter_context(sender), open_sockets.enter_context(server.accept()[0])))

        def send(connection: socket.socket) -> None:
            connection.settimeout(0.2)
            while not stop.is_set():
                try:
                    connection.send(bytes(65536))
                except TimeoutError:
                    continue

        def receive(index: int, connection: socket.socket) -> None:
            connection.settimeout(0.2)
            while not stop.is_set():
                try:
                    received[index] += len(connection.recv(65536))
                except TimeoutError:
                    continue

        threads = [threading.Thread(target=send, args=(sender,)) for sender, _ in pairs]
        threads += [threading.Thread(target=receive, args=(index, pair[1])) for index, pair in enumerate(pairs)]
        for thread in threads:
            thread.start()
        try:
            time.sleep(0.3)
            before, start = sum(received), time.perf_counter()
            time.sleep(seconds)
            return (sum(received) - before) * 8 / (time.perf_counter() - start)
        finally:
            stop.set()
            for thread in threads:
                thread.join()


@pytest.mark.lab
@pytest.mark.parametrize("rate", ["50mbit", "200mbit"])
def test_a_connection_gets_the_rate(rate, tmp_path):
    with Lab(LabOptions(rate=rate, logs=tmp_path)) as lab:
        assert goodput_bits_per_s(lab, [0], 1) == pytest.approx(PAYLOAD * parse_rate(rate), rel=0.25)


@pytest.mark.lab
def test_what_a_host_receives_is_limited_too(tmp_path):
    with Lab(LabOptions(hosts=3, rate="100mbit", logs=tmp_path)) as lab:
        assert goodput_bits_per_s(lab, [0, 2], 1) == pytest.approx(PAYLOAD * 100e6, rel=0.25)


@pytest.mark.lab
def test_a_flow_rate_holds_for_each_connection(tmp_path):
    with Lab(LabOptions(rate="200mbit", flow_rate="40mbit", logs=tmp_path)) as lab:
        assert goodput_bits_per_s(lab, [0], 1) == pytest.approx(PAYLOAD * 40e6, rel=0.25)
        assert goodput_bits_per_s(lab, [0], 4) == pytest.approx(PAYLOAD * 160e6, rel=0.25)


@pytest.mark.lab
def test_a_refusal_of_the_kernel_is_reported_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(lab_module, "link_commands", lambda device, _: [f"qdisc add dev {device} root nosuchqdisc"])
    before = network_namespaces(os.getpid())
    with pytest.raises(ConfigError, match=r"`tc qdisc add dev host0 root nosuchqdisc` failed: "), Lab(LabOptions()):
        pass
    assert network_namespaces(os.getpid()) == before


# --- the end


def network_namespaces(pid: int | str) -> set[str]:
    """The network namespaces that a process holds by a thread or a file descriptor, as `net:[inode]`."""
    found = set()
    for link in [*Path(f"/proc/{pid}/fd").glob("*"), *Path(f"/proc/{pid}/task").glob("*/ns/net")]:
        try:
            target = os.readlink(link)
        except OSError:
            continue  # ended in between
        if target.startswith("net:["):
            found.add(target)
    return found


def held(namespaces: set[str]) -> list[int]:
    """The processes that keep any of `namespaces` alive."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    return [pid for pid in pids if network_namespaces(pid) & namespaces]


def within(seconds: float, condition) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


# each rank leaves a child in its process group and another in a session of its own
RANK = """
import os, subprocess, sys, time
subprocess.Popen(["sleep", "300"])
subprocess.Popen(["sleep", "300"], start_new_session=True)
print("up", flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.02)
sys.exit(int(sys.argv[2]) if os.environ["RANK"] == "1" else time.sleep(int(sys.argv[3])))
"""


@pytest.mark.lab
@pytest.mark.parametrize(
    "how, status",
    [
        ("exits", 0),
        ("fails", 3),
        ("timeout", 124),
        (signal.SIGINT, 130),
        (signal.SIGTERM, 143),
        (signal.SIGHUP, 129),
        (signal.SIGKILL, -9),
    ],
)
def test_nothing_is_left_however_the_lab_ends(how, status, tmp_path):
    (tmp_path / "rank.py").write_text(RANK)
    go, logs = tmp_path / "go", tmp_path / "logs"
    arguments = ["--logs", str(logs), "--timeout", "1.5" if how == "timeout" else "60", "--", str(tmp_path / "rank.py")]
    arguments += [str(go), "3" if how == "fails" else "0", "300" if how == "fails" else "0"]
    devices = socket.if_nameindex()
    own = network_namespaces(os.getpid())
    lab = subprocess.Popen(
        [sys.executable, "-c", "from deepytorch.cli import main; main()", "lab", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
    )
    try:
        up = lambda: [log.read_text() for log in logs.glob("*.log")] == ["up\n"] * 2  # noqa: E731
        assert within(20, up), lab.communicate(timeout=20)
        made = network_namespaces(lab.pid) - own
        assert len(made) == 3, "two hosts and the switch"
        assert len(held(made)) == 2 + 2 * 3, "the lab and its keeper, and on each host a rank and its children"
        if how in ("exits", "fails"):
            go.touch()
        elif isinstance(how, signal.Signals):
            lab.send_signal(how)
        output, _ = lab.communicate(timeout=20)
    finally:
        lab.kill()
    assert lab.returncode == status, output
    if how == signal.SIGKILL:
        assert within(5, lambda: not held(made))
    assert held(made) == []
    assert socket.if_nameindex() == devices
    if how == "fails":
        assert "Rank 1 on host 1 exited with status 3" in output
        assert output.rstrip().endswith("up"), "the end of the failing rank's log"
    if isinstance(how, signal.Signals) and how != signal.SIGKILL:
        assert how.name in output


@pytest.mark.lab
def test_a_rank_that_ignores_sigterm_is_killed(tmp_path):
    on = console()
    command = ["sh", "-c", "trap '' TERM; echo deaf; if [ $RANK = 1 ]; then sleep 0.3; kill -SEGV $$; fi; sleep 300"]
    start = time.monotonic()
    assert run_lab(LabOptions(logs=tmp_path), command, on) == 128 + signal.SIGSEGV
    assert time.monotonic() - start < 10
    assert "Rank 1 on host 1 was ended by SIGSEGV" in shown(on)


@pytest.mark.lab
def test_ranks_end_even_if_ending_them_is_interrupted(tmp_path, monkeypatch):
    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Lab, "end", interrupt)
    with pytest.raises(KeyboardInterrupt), Lab(LabOptions(logs=tmp_path)) as lab:
        ranks = lab.start(["sleep", "300"])
    assert [rank.process.wait(5) for rank in ranks] == [-signal.SIGKILL] * 2


@pytest.mark.lab
def test_a_file_in_place_of_the_folder_for_logs_is_refused(tmp_path):
    (tmp_path / "logs").touch()
    with pytest.raises(ConfigError, match=r"The folder for logs is .*, expected one that can be made"):
        run_lab(LabOptions(logs=tmp_path / "logs"), ["true"], console())


@pytest.mark.lab
def test_two_labs_at_a_time_do_not_meet(tmp_path):
    with Lab(LabOptions(logs=tmp_path / "a")) as one, Lab(LabOptions(logs=tmp_path / "b")) as other:
        assert one.addresses == other.addresses
        with one.inside(0, lambda: socket.create_server((one.addresses[0], 4321))):
            one.inside(1, lambda: socket.create_connection((one.addresses[0], 4321), timeout=5)).close()
            with pytest.raises(ConnectionRefusedError):
                other.inside(1, lambda: socket.create_connection((other.addresses[0], 4321), timeout=5))
