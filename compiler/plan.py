"""The Plan: every decision about one region, made once, and then only read."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from typing import Any

from deepytorch.compiler.config import CompilerConfig


@dataclass(frozen=True)
class Plan:
    """How one region (one graph that Dynamo captured) is compiled.

    `region`: its name in reports. `passes`: class names, in the order in which they run (`pipeline.passes_for` makes
    them).
    """

    region: str
    config: CompilerConfig
    passes: tuple[str, ...] = ()

    @classmethod
    def initial(cls, region: str, config: CompilerConfig) -> Plan:
        """What is tried on a region that nothing is known of yet."""
        chosen = {"StripPadding": config.unpad, "FuseLinearLoss": config.fuse_loss is not False}
        return cls(region, config, passes=tuple(name for name, wanted in chosen.items() if wanted))

    def without(self, name: str) -> Plan:
        """The same plan without one of its passes."""
        return replace(self, passes=tuple(each for each in self.passes if each != name))

    def to_json(self) -> dict[str, Any]:
        """Every field, as JSON can hold it."""
        return {
            "region": self.region,
            "config": self.config.to_json(),
            "passes": list(self.passes),
        }

    def digest(self) -> str:
        """SHA-256 of the canonical JSON: equal plans have equal digests, in any process.

        Where graphs are dumped and who compiles is left out: it decides nothing, and differs from rank to rank.
        """
        decisions = self.to_json()
        for name in ("dump_graphs", "wait"):
            del decisions["config"][name]
        canonical = json.dumps(decisions, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()
