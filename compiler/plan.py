"""The Plan: every decision about one region, made once, and then only read."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from typing import Any

from deepytorch.compiler.config import CompilerConfig


@dataclass(frozen=True)
class Plan:
    """The plan for one region (one graph that Dynamo captured).

    region: the region's name in reports. passes: class names in the order in which the passes run;
    `manager.passes_for` makes the passes.
    """

    region: str
    config: CompilerConfig
    passes: tuple[str, ...] = ()

    @classmethod
    def initial(cls, region: str, config: CompilerConfig) -> Plan:
        """Return the plan for a region of which nothing is known yet."""
        chosen = {"StripPadding": config.unpad, "FuseLinearLoss": config.fuse_loss is not False}
        return cls(region, config, passes=tuple(name for name, wanted in chosen.items() if wanted))

    def without(self, name: str) -> Plan:
        """Return the plan without one of its passes."""
        return replace(self, passes=tuple(each for each in self.passes if each != name))

    def to_json(self) -> dict[str, Any]:
        """Return every field as JSON."""
        return {
            "region": self.region,
            "config": self.config.to_json(),
            "passes": list(self.passes),
        }

    def digest(self) -> str:
        """Return the SHA-256 of the canonical JSON: equal plans have equal digests, in any process.

        The folder of graph dumps, the process that compiles and what is measured later are left out: they decide
        nothing here, and may differ from rank to rank.
        """
        decisions = self.to_json()
        for name in ("dump_graphs", "tune", "wait", "gpu_background"):
            del decisions["config"][name]
        if self.config.compiles_from_sizes:
            decisions["compiles_from_sizes"] = True  # Inductor decides less: see `inductor_options`
        canonical = json.dumps(decisions, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()
