"""The switch of what the import arms: one place, light enough for the command line and for every rank to look at."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Switch:
    """The switch of this process.

    Attributes:
        enabled: Whether modules are armed.
        paused: The number of `with paused()` blocks that this process is in.
        process_groups: Whether process groups get the deepytorch backend.
        group_options: The options of such groups, a `deepytorch.comm.Options` or None.
    """

    enabled: bool = True
    paused: int = 0
    process_groups: bool = True
    group_options: object = None


SWITCH = Switch()
