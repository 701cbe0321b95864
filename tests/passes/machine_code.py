"""Kernels compiled for GPUs that need not be there."""

from __future__ import annotations

import json
import os
import subprocess
import sys

_COMPILE = """
import json, sys
from importlib import import_module
from deepytorch.machine_code import CAPABILITIES, compile_for, troubles
modules, kernel, label = json.loads(sys.argv[1])
found = {}
for variant in (each for module in modules for each in import_module(module).VARIANTS):
    if variant.kernel.endswith(kernel) and label in variant.label:
        for capability in CAPABILITIES:
            code = compile_for(variant, capability)
            atomics = [each for each in code.instructions if each in ("atom", "red.global")]
            found[f"{variant.kernel}, {variant.label}, sm_{capability}"] = troubles(variant, code) + atomics
print(json.dumps(found))
"""


def troubles_of(*modules: str, kernel: str = "", label: str = "") -> dict[str, list[str]]:
    """What is wrong with each variant of these modules for each GPU, such as spills and atomics.

    kernel, label: the end of a kernel's name and a part of a variant's label, where not all are asked for.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", _COMPILE, json.dumps((modules, kernel, label))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)
