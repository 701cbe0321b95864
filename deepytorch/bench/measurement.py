"""The timing of several setups in turns, and statistics of their times."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeVar

T = TypeVar("T")


def rotated(items: Sequence[T], turn: int) -> list[T]:
    """Return `items` beginning at another one for each `turn`, so that none always runs first."""
    start = turn % len(items)
    return [*items[start:], *items[:start]]


def quantiles(values: list[float], parts: int) -> list[float]:
    """Return the cuts of values into so many equal parts: their quartiles for 4, their percentiles for 100."""
    return statistics.quantiles(values, n=parts, method="inclusive") if len(values) > 1 else values * (parts - 1)


@dataclass(frozen=True, slots=True)
class Measurement:
    """Times of setups on the same batches: `seconds[setup][batch]` holds one time per round."""

    seconds: Mapping[str, Sequence[list[float]]]

    @staticmethod
    def in_turns(
        setups: Mapping[str, Callable[[int], float]],
        num_batches: int,
        rounds: int,
        notify: Callable[[str], None] = lambda text: None,
        after_batch: Callable[[int, int], None] = lambda turn, index: None,
    ) -> Measurement:
        """Take every batch through every setup, `rounds` times.

        The order of the setups is rotated from batch to batch and from round to round, so that a change of the
        machine's speed affects all setups alike.

        Args:
            setups: By name, a function that runs the batch of a number and returns its seconds.
            num_batches: The number of batches.
            rounds: How often each batch is run in each setup.
            notify: Is told the current activity.
            after_batch: Called with the numbers of the round and of the batch, once all setups have run it.
        """
        found = Measurement({name: [[] for _ in range(num_batches)] for name in setups})
        for turn, index in product(range(rounds), range(num_batches)):
            notify(f"Measuring: round {turn + 1} of {rounds}, batch {index + 1} of {num_batches}")
            for name in rotated(list(setups), turn + index):
                found.seconds[name][index].append(setups[name](index))
            after_batch(turn, index)
        return found

    def steady(self, setup: str) -> list[float]:
        """Return the median over the rounds, in seconds, of each batch."""
        return [statistics.median(rounds) for rounds in self.seconds[setup]]

    def ratio(self, setup: str, against: str = "deepytorch") -> float:
        """Return the time of all batches in `setup` over their time in `against`."""
        return sum(self.steady(setup)) / sum(self.steady(against))

    def ratio_quartiles(self, setup: str, against: str = "deepytorch") -> list[float]:
        """Return the quartiles, over the batches, of one batch's ratio: how evenly the gain is spread."""
        ratios = [time / other for time, other in zip(self.steady(setup), self.steady(against), strict=True)]
        return quantiles(ratios, 4)
