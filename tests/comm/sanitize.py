"""The process group's tests with its C++ built under AddressSanitizer or ThreadSanitizer.

    python tests/comm/sanitize.py address|thread [pytest arguments, tests/comm/test_faults.py ... by default]

Compiles into a cache of its own and runs the tests with the sanitizer's library loaded first. torch and Python are not
built with it: ThreadSanitizer does not see their locks, so what it says of frames in them is left out of account.
Ends with 1 where a test fails or the sanitizer reports something in our C++.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = ["tests/comm/test_faults.py", "tests/comm/test_promises.py", "tests/comm/test_counterexamples.py"]
_BUILD = """
import sys
from deepytorch.comm import native
native.compile_here.__globals__["_FLAGS"] = native._FLAGS + tuple(sys.argv[2:])
native.compile_here()
"""
_WHERE = "from deepytorch.comm import native; print(native.cache_directory() / 'native' / native.digest())"


def main(kind: str, arguments: list[str]) -> int:
    """Build and run."""
    flags = [f"-fsanitize={kind}", "-g", "-fno-omit-frame-pointer"]
    library = {"address": "libasan.so", "thread": "libtsan.so"}[kind]
    preload = subprocess.run(["g++", f"-print-file-name={library}"], capture_output=True, text=True, check=True)
    with tempfile.TemporaryDirectory() as folder:
        reports = Path(folder) / "report"
        env = {**os.environ, "XDG_CACHE_HOME": folder, "PYTHONPATH": str(Path.cwd())}
        where = Path(
            subprocess.run(
                [sys.executable, "-c", _WHERE], env=env, capture_output=True, text=True, check=True
            ).stdout.strip()
        )
        scratch = Path(folder) / "build"
        scratch.mkdir()
        for directory in (where.parents[1], where.parent, where):
            directory.mkdir(mode=0o700, exist_ok=True)
        ldflags = {**env, "LDFLAGS": f"-fsanitize={kind}", "LD_PRELOAD": ""}
        subprocess.run(
            [sys.executable, "-c", _BUILD, str(scratch), *flags], env=ldflags, check=True, stdout=subprocess.DEVNULL
        )
        (scratch / "deepytorch_comm.so").rename(where / "deepytorch_comm.so")
        options = f"log_path={reports}:exitcode=0:halt_on_error=0"
        env |= {
            "LD_PRELOAD": preload.stdout.strip(),
            "ASAN_OPTIONS": f"detect_leaks=0:{options}",  # Python keeps what it has to the end
            "TSAN_OPTIONS": f"report_signal_unsafe=0:ignore_noninstrumented_modules=1:{options}",
        }
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-n",
            "1",
            "-q",
            "--tb=line",
            "-p",
            "no:cacheprovider",
            *(arguments or TESTS),
        ]
        code = subprocess.run(command, env=env, check=False).returncode
        found = [path.read_text() for path in Path(folder).glob("report*")]
    ours = [text for text in found if "deepytorch" in text or "csrc" in text]
    for text in ours[:5]:
        print(text[:4000])
    print(f"{kind}: {len(found)} reports, {len(ours)} of them name our C++; the tests ended with {code}")
    return int(bool(ours) or code != 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
