"""Times of several arms over the same batches, and statistics of them."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field


@dataclass(slots=True)
class Measurement:
    """The results of alternating runs: `seconds[arm][batch]` holds one time per round; differences are to eager."""

    seconds: dict[str, list[list[float]]]
    max_loss_rel_diff: dict[str, float] = field(default_factory=dict)
    max_grad_rel_diff: dict[str, float] = field(default_factory=dict)

    def steady(self, arm: str) -> list[float]:
        """Return the median over the rounds, in seconds, of each batch."""
        return [statistics.median(rounds) for rounds in self.seconds[arm]]

    def ratio(self, arm: str, against: str = "deepytorch") -> float:
        """Return the time of all batches in `arm` over their time in `against`."""
        return sum(self.steady(arm)) / sum(self.steady(against))

    def ratio_quartiles(self, arm: str, against: str = "deepytorch") -> list[float]:
        """Return the quartiles, over the batches, of one batch's ratio: how evenly the gain is spread."""
        ratios = [time / other for time, other in zip(self.steady(arm), self.steady(against), strict=True)]
        return quantiles(ratios, 4)


def quantiles(values: list[float], parts: int) -> list[float]:
    """Return the cuts of values into so many equal parts: their quartiles for 4, their percentiles for 100."""
    return statistics.quantiles(values, n=parts, method="inclusive") if len(values) > 1 else values * (parts - 1)
