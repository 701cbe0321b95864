"""Machine code of Triton kernels, made with or without a GPU: its use of a multiprocessor, and its faults.

A module with kernels lists in `VARIANTS` how they are launched on real models; `compile_for` builds one of them for a
GPU that need not be present. In a process with `TRITON_INTERPRET=1` kernels cannot be compiled.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from deepytorch.errors import ConfigError

CAPABILITIES = (80, 90, 100)  # A100, H100 and H200, B200
# CUDA programming guide, "Technical Specifications per Compute Capability": most of one block.
_MOST_SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
_MATRIX = {80: "mma.sync", 90: "wgmma", 100: "tcgen05"}
_INSTRUCTIONS = ("mma.sync", "wgmma", "tcgen05", "cp.async", "atom", "red.global")


@dataclass(frozen=True)
class Variant:
    """One way in which a kernel is launched.

    Attributes:
        kernel: "module:function" of a `triton.jit` function.
        label: the name of this variant among the kernel's, such as "bf16, head 128".
        signature: the type of each argument as Triton spells it ("*bf16", "i32"), "constexpr" for constants.
        constants: values of the constants.
        num_warps, num_stages: as the launch gives them.
        matrix: whether products have to run on tensor cores.
        aligned: arguments that a launch finds to be multiples of 16: addresses, strides of rows that are loaded whole.
    """

    kernel: str
    label: str
    signature: Mapping[str, str]
    constants: Mapping[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 2
    matrix: bool = False
    aligned: tuple[str, ...] = ()

    def function(self) -> Any:
        """Return the kernel. Raises `ConfigError` if the kernel was loaded for the interpreter."""
        module, _, name = self.kernel.partition(":")
        found = getattr(import_module(module), name)
        if type(found).__name__ != "JITFunction":
            raise ConfigError(
                f"{self.kernel} is a {type(found).__name__}; expected a function that Triton compiles: unset "
                "TRITON_INTERPRET before it is imported"
            )
        return found


@dataclass(frozen=True)
class MachineCode:
    """The resources of a compiled kernel. registers: of a thread. spilled_bytes: of a thread, stored and loaded."""

    capability: int
    registers: int
    spilled_bytes: int
    shared_bytes: int
    instructions: tuple[str, ...]  # those of `_INSTRUCTIONS` that it has


def compile_for(variant: Variant, capability: int) -> MachineCode:
    """Build `variant` for a GPU of a compute capability (90 for sm_90). Raises Triton's own errors."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = variant.function()
    multiples = {(function.arg_names.index(name),): [["tt.divisibility", 16]] for name in variant.aligned}
    source = ASTSource(function, dict(variant.signature), dict(variant.constants), multiples)
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    ptx = compiled.asm["ptx"]
    registers, spilled = _resources(ptx, Path(triton.__file__).parent / "backends/nvidia/bin", capability)
    found = tuple(each for each in _INSTRUCTIONS if re.search(rf"\b{re.escape(each)}", ptx))
    return MachineCode(capability, registers, spilled, int(compiled.metadata.shared), found)


def troubles(variant: Variant, code: MachineCode) -> list[str]:
    """Return the faults of a compiled kernel, in words; an empty list if there are none."""
    found = []
    if code.spilled_bytes:
        found.append(f"spills {code.spilled_bytes} bytes a thread at {code.registers} registers; expected none")
    most = _MOST_SHARED_BYTES[code.capability]
    if code.shared_bytes > most:
        found.append(f"takes {code.shared_bytes} bytes of shared memory; sm_{code.capability} has {most}")
    if variant.matrix and _MATRIX[code.capability] not in code.instructions:
        found.append(f"has none of {_MATRIX[code.capability]}, found {', '.join(code.instructions) or 'nothing'}")
    return found


def _resources(ptx: str, tools: Path, capability: int) -> tuple[int, int]:
    """Return registers and spilled bytes of a thread, as `ptxas` reports them."""
    match = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)
    assert match is not None, "PTX without a target"
    assembler = tools / ("ptxas-blackwell" if capability >= 100 else "ptxas")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.ptx")
        path.write_text(ptx)
        command = [str(assembler), "-v", f"-arch={match[1]}", str(path), "-o", str(Path(folder, "kernel.cubin"))]
        told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stderr
    registers = re.search(r"Used (\d+) registers", told)
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", told)
    assert registers is not None, told
    return int(registers[1]), sum(map(int, spills))
