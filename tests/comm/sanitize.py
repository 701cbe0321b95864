"""A command with the process group's C++ built under AddressSanitizer or ThreadSanitizer: the fault tests, by default.

    python tests/comm/sanitize.py address|thread [COMMAND ...]

The module is compiled by a g++ that adds the sanitizer, into caches of its own. torch and Python are not built with it:
reports in which no frame is ours are counted, but not held against us. Ends with 1 where the command fails or a report
names our C++; the reports are printed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = [
    "test_faults.py", "test_order.py", "test_moves.py", "test_differences.py", "test_lifetimes.py",
    "test_error_reach.py", "test_futures.py", "test_counterexamples.py", "test_survivors.py", "test_calibrate.py",
]  # fmt: skip
COMMAND = [sys.executable, "-m", "pytest", "-q", "--tb=short", *(f"{Path(__file__).parent}/{name}" for name in TESTS)]
# The last reference to a work is often dropped inside of torch, whose atomic counters ThreadSanitizer does not see.
SUPPRESSED = "race:deepytorch::Backend::OwnWork::~OwnWork\n"
_OURS = re.compile(r"#\d+ .*(deepytorch::|comm/csrc/|deepytorch_comm\.so)")


def main(kind: str, command: list[str]) -> int:
    """Build and run."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        compiler, caches = folder / "g++", folder / "caches"
        flags = f"-fsanitize={kind} -g -fno-omit-frame-pointer"
        compiler.write_text(f'#!/bin/sh\nLD_PRELOAD= exec g++ {flags} "$@"\n')
        compiler.chmod(0o700)
        caches.mkdir(mode=0o700)
        suppressions = folder / "suppressions"
        suppressions.write_text(SUPPRESSED)
        options = f"log_path={folder}/report:exitcode=0:halt_on_error=0:abort_on_error=0"
        env = {
            **os.environ,
            "CXX": str(compiler),
            "XDG_CACHE_HOME": str(caches),
            # Its own library comes first, and that of C++ before torch's: else it would find no `__cxa_throw` to wrap.
            "LD_PRELOAD": " ".join(
                map(_library, ({"address": "libasan.so", "thread": "libtsan.so"}[kind], "libstdc++.so.6"))
            ),
            "ASAN_OPTIONS": f"detect_leaks=0:{options}",  # Python keeps what it has to the end
            "TSAN_OPTIONS": "report_signal_unsafe=0:ignore_noninstrumented_modules=1:"
            f"suppressions={suppressions}:{options}",
        }
        # ThreadSanitizer wants addresses as they are without randomisation.
        code = subprocess.run(["setarch", "--addr-no-randomize", *command], env=env, check=False).returncode
        reports = [path.read_text(errors="replace") for path in folder.glob("report.*")]
    found = [each for text in reports for each in re.split(r"(?m)^={10,}$", text) if "SUMMARY" in each]
    ours = [each for each in found if _OURS.search(each)]
    for each in ours:
        print(each)
    print(f"{kind}: {len(found)} reports, {len(ours)} of them name our C++; the command ended with {code}")
    return int(bool(ours) or code != 0)


def _library(name: str) -> str:
    asked = subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return asked.stdout.strip()


if __name__ == "__main__":
    if sys.argv[1:2] not in (["address"], ["thread"]):
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1], sys.argv[2:] or COMMAND))
