"""Random sequences of collectives against a reference, for as long as one likes.

    python tests/comm/fuzz.py --sequences 10000 --ranks 2,3,4,5 [--seed 0] [--hosts]

Each sequence is drawn from a seed that all ranks know: kinds, sizes of 0 to 8 MB, dtypes, reductions, sub-groups,
asynchronous or not, views with offsets and strides. Every rank knows every rank's data, and compares with what plain
sums give. In one of ten sequences one rank makes one call that differs: then all ranks of the group have to get an
error that says so, and the group is made anew. Between hosts (`--hosts`) only the reduction differs: where gloo finds
other sizes than it expects it ends the process. Prints a line a hundred sequences; ends with 1 at the first fault.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SUM, AVG, MIN, MAX, PRODUCT = (
    dist.ReduceOp.SUM,
    dist.ReduceOp.AVG,
    dist.ReduceOp.MIN,
    dist.ReduceOp.MAX,
    dist.ReduceOp.PRODUCT,
)
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
WHOLE = (torch.int64, torch.int32, torch.int8, torch.uint8)
REDUCING = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_list", "coalesced")
KINDS = (
    *REDUCING,
    "broadcast",
    "all_gather",
    "all_gather_list",
    "gather",
    "scatter",
    "all_to_all",
    "all_to_all_list",
    "barrier",
    "chain",
)


class Fault(Exception):
    """A wrong number, or an error where none should be, or none where one should be."""


def draw_calls(rng: random.Random, sizes: list[int]) -> list[dict[str, Any]]:
    """The calls of one sequence; sizes: of the groups."""
    calls = []
    for _ in range(rng.randint(1, 7)):
        group = rng.randrange(len(sizes))
        kind = rng.choice(KINDS)
        most = rng.choice((0, 1, 7, 1000, 9000, 70_000)) if rng.random() < 0.93 else rng.choice((300_000, 1 << 20))
        dtype = rng.choice(FLOATS + WHOLE)
        ops = [SUM, MIN, MAX, PRODUCT] + ([AVG] if dtype.is_floating_point else [])
        calls.append(
            {
                "kind": kind,
                "group": group,
                "count": rng.randint(0, most),
                "dtype": dtype,
                "op": rng.choice(ops),
                "root": rng.randrange(sizes[group]),
                "async": rng.random() < 0.5,
                "offset": rng.choice((0, 0, 1, 3)),
                "strided": rng.random() < 0.15,
                "seed": rng.randrange(1 << 30),
            }
        )
    return calls


def values(call: dict[str, Any], peer: int, count: int, part: int = 0) -> torch.Tensor:
    """What rank `peer` of the group brings: small whole numbers, whose sums every dtype holds."""
    base = (torch.arange(count, dtype=torch.int64) * 7 + call["seed"] % 1000 + 13 * peer + 29 * part) % 3
    return (base + (0 if call["op"] == SUM else 1)).to(call["dtype"])


def reduced(call: dict[str, Any], parts: list[torch.Tensor]) -> torch.Tensor:
    stacked = torch.stack([part.double() for part in parts])
    op = call["op"]
    if op == MIN:
        found = stacked.amin(0)
    elif op == MAX:
        found = stacked.amax(0)
    elif op == PRODUCT:
        found = stacked.prod(0)
    else:
        found = stacked.sum(0) / (len(parts) if op == AVG else 1)
    return found.to(call["dtype"])


def placed(call: dict[str, Any], tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with these values, somewhere inside of other memory, perhaps with gaps."""
    if call["strided"] and tensor.numel() > 1 and tensor.dim() == 1:
        base = torch.zeros(tensor.numel(), 2, dtype=tensor.dtype)
        view = base[:, 0]
    else:
        base = torch.zeros(tensor.numel() + call["offset"], dtype=tensor.dtype)
        view = base[call["offset"] :]
    view.copy_(tensor)
    return view


def start(
    call: dict[str, Any], groups: list[Any], rank_in: list[int]
) -> tuple[Any, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Make the call; returns its work and pairs (found, wanted), to be compared once it is done."""
    group, me, count, kind = groups[call["group"]], rank_in[call["group"]], call["count"], call["kind"]
    size, root = dist.get_world_size(group), call["root"]
    options = {"group": group, "async_op": call["async"]}
    peers = range(size)
    if kind == "barrier":
        return dist.barrier(**options), []
    if kind == "chain":
        return start_chain(call, group, me)
    if kind in ("all_reduce", "reduce"):
        mine = placed(call, values(call, me, count))
        wanted = reduced(call, [values(call, peer, count) for peer in peers])
        if kind == "all_reduce":
            return dist.all_reduce(mine, call["op"], **options), [(mine, wanted)]
        work = dist.reduce(mine, group_dst=root, op=call["op"], **options)
        return work, [(mine, wanted)] if me == root else []
    if kind == "coalesced":
        sizes = [count, count // 3, 1]
        mine_all = [placed(call, values(call, me, each, part)) for part, each in enumerate(sizes)]
        wanted_all = [
            reduced(call, [values(call, peer, each, part) for peer in peers]) for part, each in enumerate(sizes)
        ]
        return dist.all_reduce_coalesced(mine_all, call["op"], **options), list(zip(mine_all, wanted_all, strict=True))
    if kind == "broadcast":
        mine = placed(call, values(call, me, count))
        return dist.broadcast(mine, group_src=root, **options), [(mine, values(call, root, count))]
    if kind == "all_gather":
        out = placed(call, torch.zeros(size * count, dtype=call["dtype"]))
        wanted = torch.cat([values(call, peer, count) for peer in peers])
        return dist.all_gather_into_tensor(out, placed(call, values(call, me, count)), **options), [(out, wanted)]
    if kind == "all_gather_list":
        outs = [placed(call, torch.zeros(count, dtype=call["dtype"])) for _ in peers]
        work = dist.all_gather(outs, placed(call, values(call, me, count)), **options)
        return work, [(out, values(call, peer, count)) for peer, out in enumerate(outs)]
    if kind == "reduce_scatter":
        out = placed(call, torch.zeros(count, dtype=call["dtype"]))
        whole = [values(call, peer, size * count) for peer in peers]
        work = dist.reduce_scatter_tensor(out, placed(call, whole[me]), call["op"], **options)
        return work, [(out, reduced(call, whole)[me * count : (me + 1) * count])]
    if kind == "reduce_scatter_list":
        out = placed(call, torch.zeros(count, dtype=call["dtype"]))
        given = [placed(call, values(call, me, count, to)) for to in peers]
        work = dist.reduce_scatter(out, given, call["op"], **options)
        return work, [(out, reduced(call, [values(call, peer, count, me) for peer in peers]))]
    if kind == "gather":
        outs = [placed(call, torch.zeros(count, dtype=call["dtype"])) for _ in peers] if me == root else None
        work = dist.gather(placed(call, values(call, me, count)), outs, group_dst=root, **options)
        return work, [(out, values(call, peer, count)) for peer, out in enumerate(outs or [])]
    if kind == "scatter":
        out = placed(call, torch.zeros(count, dtype=call["dtype"]))
        given = [placed(call, values(call, root, count, to)) for to in peers] if me == root else None
        return dist.scatter(out, given, group_src=root, **options), [(out, values(call, root, count, me))]
    if kind == "all_to_all":
        splits = [count // (1 + (me + to) % 3) + to for to in peers]
        theirs = [count // (1 + (peer + me) % 3) + me for peer in peers]
        out = placed(call, torch.zeros(sum(theirs), dtype=call["dtype"]))
        given = placed(call, torch.cat([values(call, me, n, to) for to, n in enumerate(splits)]))
        work = dist.all_to_all_single(out, given, theirs, splits, **options)
        wanted = torch.cat([values(call, peer, n, me) for peer, n in enumerate(theirs)])
        return work, [(out, wanted)]
    outs = [placed(call, torch.zeros(count + me, dtype=call["dtype"])) for _ in peers]
    given = [placed(call, values(call, me, count + to, to)) for to in peers]
    work = dist.all_to_all(outs, given, **options)
    return work, [(out, values(call, peer, count + me, me)) for peer, out in enumerate(outs)]


class Works:
    """Several works, waited for from the last to the first."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        for each in reversed(self._works):
            each.wait()


def start_chain(call: dict[str, Any], group: Any, me: int) -> tuple[Any, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Calls on one tensor, each of which needs what the one before it leaves; nobody waits in between."""
    size, count, dtype = dist.get_world_size(group), call["count"], call["dtype"]
    call = {**call, "op": call["op"] if call["op"] in (MIN, MAX) else SUM}
    mine = placed(call, values(call, me, count))
    first = reduced(call, [values(call, peer, count) for peer in range(size)])
    multiplies = dtype in (torch.float32, torch.float64, torch.int32, torch.int64)  # which hold the result
    wanted = first.pow(size) if multiplies else first * size
    outs = [placed(call, torch.zeros(count, dtype=dtype)) for _ in range(size)]
    works = Works(
        [
            dist.all_reduce(mine, call["op"], group=group, async_op=True),
            dist.all_reduce(mine, PRODUCT if multiplies else SUM, group=group, async_op=True),
            dist.all_gather(outs, mine, group=group, async_op=True),
        ]
    )
    if not call["async"]:
        works.wait()
    return works if call["async"] else None, [(each, wanted) for each in (mine, *outs)]


def changed(rng: random.Random, call: dict[str, Any], what: str) -> dict[str, Any]:
    """The same call but for `what`, so that the ranks disagree."""
    other = dict(call)
    if what == "kind":
        other["kind"] = rng.choice([kind for kind in KINDS if kind.split("_list")[0] != call["kind"].split("_list")[0]])
    elif what == "dtype" and call["kind"] != "barrier":
        other["dtype"] = rng.choice([d for d in FLOATS if d != call["dtype"]])
    elif what == "op" and call["kind"] in REDUCING:
        other["op"] = rng.choice([op for op in (SUM, MIN, MAX, PRODUCT) if op != call["op"]])
    elif what == "root" and call["kind"] in ("broadcast", "reduce", "gather", "scatter"):
        other["root"] = call["root"] + 1
    else:
        other["count"] = call["count"] + 5
        if call["kind"] == "barrier":
            other["kind"] = "all_reduce"
    return other


def run_sequence(
    seed: int, groups: list[Any], rank: int, members: list[list[int]], store: dist.Store, hosts: bool
) -> bool:
    """One sequence. Returns whether the groups have to be made anew. Raises `Fault`.

    store: where ranks meet before one of them differs. A rank that still waits in the sequence before would hear of it
    there: what fails takes all of the group's calls with it, and this one could be told from no fault of ours.
    """
    rng = random.Random(seed)
    sizes = [len(each) for each in members]
    calls = draw_calls(rng, sizes)
    mismatch = rng.random() < 0.1
    odd_call = rng.randrange(len(calls))
    odd_rank = rng.choice(members[calls[odd_call]["group"]])
    if mismatch:  # in one group: another one would wait for ranks that have ended the sequence
        for call in calls:
            call["group"] = calls[odd_call]["group"]
            call["root"] %= sizes[call["group"]]
    what = rng.choice(("kind", "count", "dtype", "op", "root"))
    if hosts:
        for call in calls:
            if call["kind"] == "all_to_all_list":
                call["kind"] = "all_to_all"  # gloo has no form of a list
        what, calls[odd_call]["kind"] = "op", rng.choice(REDUCING)
        if calls[odd_call]["op"] not in (SUM, MIN, MAX, PRODUCT):
            calls[odd_call]["op"] = SUM
    variant = changed(rng, calls[odd_call], what)
    variant["root"] %= sizes[variant["group"]]
    if variant["root"] == calls[odd_call]["root"] and all(
        variant[key] == calls[odd_call][key] for key in ("kind", "count", "dtype", "op")
    ):
        mismatch = False
    if mismatch:
        store.set(f"at {seed}/{rank}", "here")
        store.wait([f"at {seed}/{peer}" for peer in members[0]], timedelta(seconds=60))
    mine = list(calls)
    if mismatch and rank == odd_rank:
        mine[odd_call] = variant
    rank_in = [each.index(rank) if rank in each else -1 for each in members]
    pending: list[tuple[dict[str, Any], Any, list[tuple[torch.Tensor, torch.Tensor]]]] = []
    error = None
    try:
        for call in mine:
            if rank_in[call["group"]] < 0:
                continue
            work, pairs = start(call, groups, rank_in)
            pending.append((call, work, pairs))
        for _, work, _ in pending:
            if work is not None:
                work.wait()
        if mismatch and rank in members[calls[odd_call]["group"]]:
            group, deadline = groups[calls[odd_call]["group"]], time.monotonic() + 3.0
            dist.barrier(group)  # where a call that was handed on is found out at the latest on one host
            while hosts and time.monotonic() < deadline:
                time.sleep(0.05)
                dist.barrier(group)
    except Exception as failure:
        error = str(failure)
    if error is not None and not mismatch:
        raise Fault(f"seed {seed}: an error where none should be: {error}")
    if mismatch:
        if rank in members[calls[odd_call]["group"]] and (error is None or not _names_both(error)):
            raise Fault(f"seed {seed}: ranks differed in {calls[odd_call]} and {variant}, but rank {rank} saw: {error}")
        return True
    for call, _, pairs in pending:
        for found, wanted in pairs:
            if not (_about_equal(found, wanted) if hosts and call["op"] == AVG else torch.equal(found, wanted)):
                raise Fault(
                    f"seed {seed}: wrong numbers in {call}: {found.flatten()[:8]}, expected {wanted.flatten()[:8]}"
                )
    return False


def _about_equal(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """For averages between hosts: what a rank gives is divided first, since half types may not hold the sum."""
    if not found.is_floating_point():
        return torch.equal(found, wanted)
    return torch.allclose(found.double(), wanted.double(), rtol=2 * torch.finfo(found.dtype).eps)


def _names_both(error: str) -> bool:
    return "disagree" in error or "sends" in error or "other host" in error


def work(arguments: argparse.Namespace) -> None:
    """What one rank does."""
    import deepytorch
    from deepytorch.switch import SWITCH

    del deepytorch
    SWITCH.enabled = False
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if arguments.hosts:
        from dataclasses import replace

        from deepytorch.comm.group import backend

        here = backend.discover_host()
        backend.discover_host = lambda: replace(here, id=f"host {rank // 2}")
    members = [list(range(size))] + ([[0, size - 1], list(range(1, size))] if size > 2 else [])
    life, store = 0, dist.TCPStore("127.0.0.1", int(os.environ["FUZZ_PORT"]), size, rank == 0, timedelta(seconds=60))

    def make() -> list[Any]:
        nonlocal life
        life += 1
        dist.init_process_group(
            "deepytorch",
            store=dist.PrefixStore(f"life{life}", store),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=60),
        )
        return [dist.group.WORLD] + [dist.new_group(each, backend="deepytorch") for each in members[1:]]

    groups = make()
    mismatches = 0
    for number in range(arguments.sequences):
        if run_sequence(arguments.seed + number, groups, rank, members, store, arguments.hosts):
            mismatches += 1
            dist.destroy_process_group()
            groups = make()
        if rank == 0 and (number + 1) % 100 == 0:
            print(f"{size} ranks: {number + 1} sequences, {mismatches} of them with a rank that differed", flush=True)
    dist.destroy_process_group()


def main() -> int:
    """Start the ranks of each size in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=200, help="for each number of ranks")
    parser.add_argument("--ranks", default="2,3,4,5")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hosts", action="store_true", help="every two ranks are a host of their own")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds for each number of ranks")
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        work(arguments)
        return 0
    failed = 0
    for size in map(int, arguments.ranks.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            failed |= _run_ranks(size, arguments, Path(folder))
    return failed


def _run_ranks(size: int, arguments: argparse.Namespace, folder: Path) -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    for rank in range(size):
        env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(size), "FUZZ_PORT": str(port)}
        # groups wait for the C++ to be compiled: stock gloo, on which they would begin, runs two calls at a time
        env |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "DEEPYTORCH_COMPILE": "wait"}
        log = (folder / f"rank{rank}.log").open("w") if rank else None
        ranks.append(subprocess.Popen([sys.executable, *sys.argv], env=env, stdout=log, stderr=log))
    deadline = time.monotonic() + arguments.timeout
    while any(process.poll() is None for process in ranks):
        if any(process.poll() for process in ranks):  # the others may see what it is, or wait for a rank that is gone
            deadline = min(deadline, time.monotonic() + 20)
        if time.monotonic() > deadline:
            for process in ranks:
                process.kill()
        time.sleep(0.05)
    codes = [process.wait() for process in ranks]
    if any(codes):
        print(f"{size} ranks ended with {codes}", flush=True)
        for rank in range(1, size):
            print(f"--- rank {rank}\n" + (folder / f"rank{rank}.log").read_text()[-1500:], flush=True)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
