"""torch's own suite on stock gloo and on our group, one beside the other.

    python tests/comm/torch_suite/run.py --ranks 2,4 [--rounds 3] [--json FILE] [test_name ...]

Fails where a test passes on stock gloo and not on ours, or takes more than 1.5 times as long (the median of the rounds,
half a second left out of account). Needs `expecttest`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

_MOST, _GRACE_SECONDS = 1.5, 0.5
Outcomes = dict[str, tuple[str, float, str]]


def run_suite(ours: bool, num_ranks: int, names: list[str], timeout: float = 3600.0) -> Outcomes:
    """Outcome, seconds and message of every test, on stock gloo or on our group."""
    with tempfile.TemporaryDirectory() as folder:
        for part in ("barrier", "test_dir", "init_dir"):
            (Path(folder) / part).mkdir()
        env = {
            **os.environ,
            "BACKEND": "gloo",
            "WORLD_SIZE": str(num_ranks),
            "TEMP_DIR": folder,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "0",
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
        }
        env.pop("SUITE_IMPORT", None)
        if ours:
            env["SUITE_IMPORT"] = "1"
        done = subprocess.run(
            [sys.executable, str(Path(__file__).with_name("cases.py")), *names],
            env=env, capture_output=True, text=True, timeout=timeout, check=False,
        )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("OUTCOMES ")]
    if not lines:
        raise RuntimeError(f"the suite ended with {done.returncode}:\n{done.stderr[-3000:]}")
    found: Outcomes = json.loads(lines[-1].removeprefix("OUTCOMES "))
    return found


def compare(stock: list[Outcomes], ours: list[Outcomes]) -> list[str]:
    """What is wrong with ours, a line each."""
    wrong = []
    for name, (outcome, _, _) in stock[0].items():
        if outcome != "passed":
            continue
        mine = [each[name] for each in ours]
        if any(each[0] != "passed" for each in mine):
            why = next(each[2] for each in mine if each[0] != "passed").strip().splitlines()
            wrong.append(f"{name}: passes on stock gloo, {mine[0][0]} on ours: {why[-1] if why else ''}")
            continue
        seconds, other = (statistics.median(each[name][1] for each in arm) for arm in (ours, stock))
        if seconds > _MOST * other + _GRACE_SECONDS:
            wrong.append(f"{name}: {seconds:.1f} s on ours, {other:.1f} s on stock gloo")
    return wrong


def main() -> int:
    """Run both arms in turn; 1 where something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("names", nargs="*")
    arguments = parser.parse_args()
    failed, content = 0, {}
    for num_ranks in map(int, arguments.ranks.split(",")):
        stock, ours = [], []
        for _ in range(arguments.rounds):
            stock.append(run_suite(False, num_ranks, arguments.names))
            ours.append(run_suite(True, num_ranks, arguments.names))
        counts = {
            arm: {kind: sum(each[0] == kind for each in found[0].values()) for kind in ("passed", "failed", "skipped")}
            for arm, found in (("stock gloo", stock), ("deepytorch", ours))
        }
        wrong = compare(stock, ours)
        print(f"{num_ranks} ranks: {counts}")
        print("\n".join(wrong) or "nothing that passes on stock gloo fails or is slow on ours", flush=True)
        failed |= bool(wrong)
        content[num_ranks] = {
            "counts": counts,
            "wrong": wrong,
            "tests": {
                name: {"stock": stock[0][name][:2], "ours": ours[0].get(name, ("missing", 0.0))[:2]}
                for name in stock[0]
            },
        }
    if arguments.json:
        arguments.json.write_text(json.dumps(content, indent=1))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
