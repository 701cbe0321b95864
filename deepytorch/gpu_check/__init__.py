"""`deepytorch gpu-check`: checks that deepytorch's results on this GPU are right, and measures of its speed.

The check runs from a work tree with `PYTHONPATH` alone, without a network, in eight minutes at most. How data flows:

- `run` says what is to be made, and makes it. `checks` and `figures` list every `Check`, a module for each subject.
- `records` reads the result file of the device; what passed with the same `sources` and versions is left out.
- `plan` says how long the rest is expected to take; `packages` lets rivals be imported from a folder.
- `isolated` starts a process (`worker`) for each group of checks, and hears of each `Outcome` as soon as it is known.
- Each outcome is written to the result file at once. `page` makes tables of the result files of all devices.
"""
