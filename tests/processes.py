"""Processes that a test has started, and those that they have started."""

from __future__ import annotations

import subprocess


def is_running(pid: int) -> bool:
    """Whether a process runs; one that has ended may wait for somebody to ask how."""
    found = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return found.stdout.strip() != "" and not found.stdout.startswith("Z")


def children_of(pid: int) -> list[int]:
    """The processes that a process has started and not waited for."""
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    return [int(each) for each in found.stdout.split()]
