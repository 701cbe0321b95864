"""`deepytorch bench kernels`: the compiled form of each Triton kernel, also for GPUs that are not present."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Annotated, Any

from typer import Option

from deepytorch.bench.benchmark import Benchmark, Cell, Place, Setup
from deepytorch.bench.results import Results, Row
from deepytorch.bench.run import words_of
from deepytorch.bench.table import Table
from deepytorch.errors import BuildError, ConfigError
from deepytorch.machine_code import CAPABILITIES, Variant, compile_for, troubles

MODULES = (
    "deepytorch.comm.kernels.buckets_triton",
    "deepytorch.comm.kernels.symmetric_triton",
    "deepytorch.passes.ops.linear_cross_entropy_kernels",
    "deepytorch.passes.ops.pack_facts_triton",
    "deepytorch.passes.ops.pack_triton",
    "deepytorch.passes.ops.varlen_attention_triton",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelsOptions:
    """Compile every Triton kernel to machine code, no GPU needed: registers, spills, shared memory, instructions.

    Ends with status 2 where one spills, takes more shared memory than there is, or multiplies without tensor cores.
    """

    named: Annotated[str, Option(metavar="TEXT", help="Only kernels with this in their names.")] = ""
    capabilities: Annotated[
        tuple[int, ...], Option(help="Compute capabilities of GPUs, with commas: 80 is A100, 90 H100 and H200.")
    ] = CAPABILITIES

    def __post_init__(self) -> None:
        """Raise `ConfigError` for a value that is not accepted."""
        unknown = [each for each in self.capabilities if each not in CAPABILITIES]
        if unknown:
            raise ConfigError(f"capability {unknown[0]}; expected some of {', '.join(map(str, CAPABILITIES))}.")


def variants(named: str = "") -> Iterator[Variant]:
    """Yield every kernel as real models launch it; only those with `named` in their names.

    Raises `ConfigError` if Triton is not installed, or no kernel has that name.
    """
    try:
        import_module("triton")
    except ImportError:
        raise ConfigError("Triton is not installed: `pip install 'deepytorch[interpreter]'`.") from None
    found = [each for module in MODULES for each in import_module(module).VARIANTS if named in each.kernel]
    if not found:
        raise ConfigError(f"No kernel has {named!r} in its name; expected a part of one of {', '.join(MODULES)}.")
    yield from found


class Kernels(Benchmark[KernelsOptions]):
    """See this module."""

    name = "kernels"
    options = KernelsOptions
    selects = ("named", "capabilities")

    def cells(self, options: KernelsOptions) -> Sequence[Cell]:
        """Return a cell for each way to launch a kernel on each GPU."""
        return [
            Cell(
                key={"kernel": variant.kernel.rpartition(":")[2].lstrip("_"), "variant": variant.label},
                setups=[Setup(name=f"sm_{capability}", job=(variant, capability))],
                place=Place(),
                row_key="gpu",
            )
            for variant in variants(options.named)
            for capability in options.capabilities
        ]

    def measure(
        self, options: KernelsOptions, cell: Cell, timeout_s: float, notify: Callable[[str], None]
    ) -> dict[str, list[dict[str, Any]]]:
        """Compile one. Triton's errors are passed on."""
        [setup] = cell.setups
        begin = time.perf_counter()
        code = compile_for(*setup.job)
        figures = {
            "registers": code.registers,
            "spilled_bytes": code.spilled_bytes,
            "shared_bytes": code.shared_bytes,
            "compile_s": round(time.perf_counter() - begin, 2),
        }
        texts = {"instructions": ", ".join(code.instructions), "troubles": "; ".join(troubles(setup.job[0], code))}
        return {setup.name: [{"figures": figures, "texts": texts}]}

    def rows(self, options: KernelsOptions, cell: Cell, found: Mapping[str, list[dict[str, Any]]]) -> list[Row]:
        """Return the row of a cell."""
        return [Row(key=key, **each) for key, [each] in zip(cell.keys, found.values(), strict=True)]

    def tables(self, results: Results) -> list[Table]:
        """Return what all variants of a kernel need at most on each GPU."""
        columns = ("kernel", "GPU", "variants", "registers", "spilled", "shared", "instructions", "seconds")
        rows = []
        for kernel, gpu in dict.fromkeys((str(row.key["kernel"]), str(row.key["gpu"])) for row in results.rows):
            these = results.having(kernel=kernel, gpu=gpu)
            registers, spilled, shared = (
                max(row.figures[name] for row in these) for name in ("registers", "spilled_bytes", "shared_bytes")
            )
            found = dict.fromkeys(each for row in these for each in row.texts["instructions"].split(", ") if each)
            seconds = sum(row.figures["compile_s"] for row in these)
            used = (f"{registers:.0f}", f"{spilled:.0f} B", f"{shared / 1024:.0f} KB", ", ".join(found))
            rows.append((kernel, gpu, str(len(these)), *used, f"{seconds:.1f}"))
        title, left = "Machine code of kernels: the most of all variants", ("kernel", "GPU", "instructions")
        return [Table(title, columns, tuple(rows), left, tuple(faults(results)))]

    def verdict(self, results: Results) -> None:
        """Raise `BuildError` if a kernel has a fault."""
        if wrong := faults(results):
            raise BuildError("\n".join(wrong))


def faults(results: Results) -> list[str]:
    """Return what is wrong with which kernel."""
    return [f"{words_of(row.key)}: {row.texts['troubles']}" for row in results.rows if row.texts.get("troubles")]
