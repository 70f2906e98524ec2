"""How long a rollout's tools take: drawn for its place, so that every schedule meets the same times. Pure.

The place is the index of its group and its number in it, which its id ends with; the id of an evaluation's rollout has
another form, and no tool of it waits.
"""

import math
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["ToolTime", "place_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolTime:
    """A distribution of seconds per rollout."""

    mean_s: float
    sigma: float
    """Of the logarithm; 0: constant."""
    seed: int

    @classmethod
    def parse(cls, text: str) -> "ToolTime":
        """Mean, sigma and seed, as `str` gives them."""
        mean_s, sigma, seed = text.split()
        return cls(mean_s=float(mean_s), sigma=float(sigma), seed=int(seed))

    def __str__(self) -> str:
        return f"{self.mean_s:g} {self.sigma:g} {self.seed}"

    def seconds(self, index: int, member: int) -> float:
        """Of one rollout."""
        rng = random.Random(f"{self.seed}:{index}:{member}")
        # The mean of a lognormal is exp(mu + sigma^2 / 2).
        return self.mean_s * math.exp(rng.gauss(0, self.sigma) - self.sigma**2 / 2) if self.sigma else self.mean_s

    def waits(self, index: int, member: int) -> Iterator[float]:
        """Half of what is left at each tool call, since nobody knows which one is the last; then `rest`."""
        left_s = self.seconds(index, member)
        while True:
            left_s /= 2
            yield left_s


def place_of(rollout_id: str) -> tuple[int, int] | None:
    """Index of the group and number in it; None: it belongs to an evaluation."""
    found = re.fullmatch(r"[0-9a-f]+-(\d+)-(\d+)", rollout_id)
    return (int(found[1]), int(found[2])) if found else None
