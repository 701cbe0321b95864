"""Whether what the import arms is on: one place, light enough for the command line and for every rank to look at."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Switch:
    """enabled: off, and nothing is armed any more. paused: how many `with paused()` this process is in. process_groups:
    whether groups are ours. group_options: what such groups are told, a `deepytorch.comm.Options` or None.
    """

    enabled: bool = True
    paused: int = 0
    process_groups: bool = True
    group_options: object = None


SWITCH = Switch()
