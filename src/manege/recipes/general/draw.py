"""What a generated task is made of, drawn from a seed and from the words of one split alone.

Every fourth word of each list belongs to the held-out tasks, and so do codes that end in 3 or 7. Each family puts a
word or a code into what the agent sees, so that no task of one split can be a task of the other.
"""

import random
from collections.abc import Sequence

__all__ = ["CITIES", "NAMES", "WORDS", "Draw", "is_heldout"]

# fmt: off
WORDS = (
    "apple", "maple", "cedar", "plum", "river", "stone", "cloud", "tiger", "lemon", "copper", "candle", "basket",
    "violin", "harbor", "meadow", "pepper", "rocket", "silver", "garden", "wagon", "anchor", "bottle", "carpet",
    "dragon", "engine", "falcon", "guitar", "hammer", "island", "jacket", "kettle", "ladder", "magnet", "needle",
    "orange", "pencil", "rabbit", "saddle", "timber", "velvet", "walnut", "zipper", "bridge", "castle", "desert",
    "feather", "glacier", "helmet", "igloo", "jungle", "lantern", "marble", "nectar", "oyster", "pebble", "quartz",
    "ribbon", "saffron", "teapot", "urchin",
)
NAMES = (
    "Ada", "Ben", "Cora", "Dan", "Eva", "Finn", "Gina", "Hugo", "Iris", "Jonas", "Kira", "Leo", "Mona", "Nils",
    "Olga", "Paul", "Rosa", "Sam", "Tara", "Uwe", "Vera", "Will", "Xenia", "Yann", "Zoe", "Amir", "Bella", "Carl",
    "Dina", "Emil", "Flora", "Gus", "Hana", "Ivan", "Julia", "Karl", "Lena", "Max", "Nora", "Otto", "Petra", "Ralf",
    "Selma", "Theo", "Ulla", "Victor", "Wanda", "Yusuf",
)
CITIES = (
    "Oslo", "Lima", "Cairo", "Paris", "Quito", "Delhi", "Tokyo", "Sofia", "Berlin", "Madrid", "Nairobi", "Dublin",
    "Vienna", "Warsaw", "Lisbon", "Athens", "Havana", "Zurich", "Prague", "Geneva", "Boston", "Denver", "Austin",
    "Dallas",
)
# fmt: on
_HELDOUT_DIGITS = "37"


def is_heldout(pool: Sequence[str], word: str) -> bool:
    """Whether a word of a list belongs to the held-out tasks."""
    return pool.index(word) % 4 == 3


class Draw:
    """Draws of one task."""

    def __init__(self, rng: random.Random, *, heldout: bool) -> None:
        self.rng = rng
        self._heldout = heldout

    def words(self, num: int, pool: Sequence[str] = WORDS) -> list[str]:
        """Different ones, of this split."""
        return self.rng.sample([word for word in pool if is_heldout(pool, word) == self._heldout], num)

    def word(self, pool: Sequence[str] = WORDS) -> str:
        """One of this split."""
        return self.words(1, pool)[0]

    def code(self) -> str:
        """Three digits, of this split."""
        return self.codes(1)[0]

    def codes(self, num: int) -> list[str]:
        """Different ones, of this split."""
        return self.rng.sample(
            [str(n) for n in range(100, 1000) if (str(n)[-1] in _HELDOUT_DIGITS) == self._heldout], num
        )

    def between(self, low: int, high: int) -> int:
        """Both included."""
        return self.rng.randint(low, high)
