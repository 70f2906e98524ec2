"""How many attempts a controller runs at once: as many as the engine has room for. Pure.

In: what each look at the gateway saw. Out: a limit between two bounds. Additive increase and multiplicative decrease
share an engine fairly among controllers that do not know of each other: Chiu and Jain 1989
(https://www.cse.wustl.edu/~jain/papers/ftp/cong_av.pdf). As in TCP (https://www.rfc-editor.org/rfc/rfc5681), what is
lowered is what is under way, not a limit that nobody uses, and once per reaction time.

It begins at its upper bound: then an engine with room never idles while a limit climbs, and one without makes requests
wait in its queue, which costs nothing but their time, until a few looks later. A lower limit stops new attempts only.
"""

__all__ = ["Concurrency"]

_QUEUE = 0.25
"""Overload is a longer queue than this share of what is decoded: a shorter one keeps the batch full."""
_DECREASE = 1 / (1 + _QUEUE)
"""Takes such a queue away, and nothing of the batch."""
_FULL_CACHE = 0.9
"""Share of the cache beyond which answers that grow drive each other out."""
_NUM_LOOKS = 2
"""Overloaded ones in a row that count: a burst of new attempts is gone by the second."""
_INCREASE = 1 / 128
"""Of the upper bound, per look, at least one attempt: the way back up takes as long for large controllers."""


class Concurrency:
    """One controller's limit."""

    def __init__(self, *, lower: int, upper: int) -> None:
        self._lower, self._upper = lower, upper
        self._limit = float(upper)
        self._num_overloaded = 0

    @property
    def limit(self) -> int:
        """Attempts at once."""
        return int(self._limit)

    def observe(self, *, running: int, waiting: int, cache_usage: float, num_attempts: int, paused: bool) -> None:
        """A look: requests that the engine decodes and that wait in its queue, the share of its cache in use, attempts
        of this controller. A look at a paused engine says nothing."""
        if paused:
            return
        if waiting > _QUEUE * running or cache_usage > _FULL_CACHE:
            self._num_overloaded += 1
            # Until the attempts have come down to the last decrease, what is seen is not yet its effect.
            if self._num_overloaded >= _NUM_LOOKS and num_attempts <= self.limit:
                self._limit = max(self._lower, _DECREASE * num_attempts)
                self._num_overloaded = 0
        else:
            self._num_overloaded = 0
            if num_attempts >= self.limit:
                self._limit = min(self._upper, self._limit + max(1.0, _INCREASE * self._upper))
