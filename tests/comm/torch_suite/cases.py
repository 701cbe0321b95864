"""torch's own tests of process groups, on stock gloo or with the import line alone; prints outcomes as JSON.

    SUITE_IMPORT=1 BACKEND=gloo WORLD_SIZE=2 TEMP_DIR=... python cases.py [test_name ...]

Ranks are forked for each test. See run.py, which makes the environment and compares.
"""

from __future__ import annotations

import json
import os
import sys
import time
import unittest
import warnings

warnings.simplefilter("ignore")
if os.environ.get("SUITE_IMPORT"):
    import deepytorch  # noqa: F401, the line that is tried

import torch.distributed as dist  # noqa: E402
import torch.multiprocessing  # noqa: E402
from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend  # noqa: E402


class TestDistributed(TestDistBackend, DistributedTest._DistTestBase):  # type: ignore[misc]
    """Every test of torch's, each with ranks of its own."""

    def setUp(self) -> None:
        super().setUp()
        self._start_processes(torch.multiprocessing.get_context("fork").Process)


def main(names: list[str]) -> int:
    """Run the named tests, or all."""
    if os.environ.get("SUITE_IMPORT"):
        from deepytorch.comm.group.native import native

        native.load()
    loader = unittest.TestLoader()
    found: dict[str, tuple[str, float, str]] = {}
    for name in names or loader.getTestCaseNames(TestDistributed):
        result, started = unittest.TestResult(), time.monotonic()
        try:
            TestDistributed(name).run(result)
        except Exception as error:  # of a fixture of torch's
            result.errors.append((TestDistributed(name), repr(error)))
        outcome = "failed" if result.failures or result.errors else "skipped" if result.skipped else "passed"
        why = "".join(text for _, text in result.failures + result.errors)[-3000:]
        found[name] = (outcome, time.monotonic() - started, why)
        print(f"{name}: {outcome} {found[name][1]:.2f} s", file=sys.stderr, flush=True)
    print("OUTCOMES " + json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    assert dist.is_gloo_available()
    sys.exit(main(sys.argv[1:]))
