"""Tells a gateway that is stuck from one that is slow: what waits, since when, and when anything last moved.

Kinds of waiting things: `queued` and `running` rollouts and the `raw_call` that is not indexed yet (the store knows
them), `call_in_flight`, `call_held`, `pause`, and `engine`: how long one that has calls has been silent. Progress is a
call that ended, a token that arrived, a rollout that changed its state. Slow is not stuck: a run is stuck when
something has been waiting for STUCK_S and nothing at all has moved for as long; for LONG_PAUSE_S during a pause, since
a step of training may take minutes.
"""

from collections.abc import Callable, Mapping

from manege.logs import get_logger, kv

__all__ = ["STUCK_S", "Progress", "Watchdog", "ages", "quiet_s"]

STUCK_S = 60.0
"""Longer than a rollout of a healthy run goes without a token, shorter than anyone watches a bar that does not move."""
LONG_PAUSE_S = 1800.0

_log = get_logger("gateway")


class Progress:
    """When something last moved, in seconds since the epoch."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.last_s = self.last_token_s = clock()

    def made(self) -> None:
        """A call ended, or a rollout changed its state."""
        self.last_s = self._clock()

    def token(self) -> None:
        """An engine sampled something."""
        self.last_s = self.last_token_s = self._clock()


class Watchdog:
    """Says it once when a run is stuck, and once when it goes on."""

    def __init__(self) -> None:
        self._is_stuck = False

    def look(self, oldest: Mapping[str, float], progress_s: float, now_s: float) -> None:
        """`oldest`: since when the oldest thing of each kind waits. `progress_s`: when anything last moved."""
        was_stuck, quiet = self._is_stuck, quiet_s(oldest, progress_s, now_s)
        self._is_stuck = quiet >= (LONG_PAUSE_S if "pause" in oldest else STUCK_S)
        if self._is_stuck and not was_stuck:
            waiting = {kind: f"{age:.0f}s" for kind, age in ages(oldest, now_s).items()}
            _log.warning(kv("stuck: nothing has moved", for_s=round(quiet), **waiting))
        elif was_stuck and not self._is_stuck:
            _log.info("not stuck any more")


def quiet_s(oldest: Mapping[str, float], progress_s: float, now_s: float) -> float:
    """For how long something has been waiting without any progress; 0: nothing waits."""
    return max(now_s - max(progress_s, min(oldest.values())), 0.0) if oldest else 0.0


def ages(oldest: Mapping[str, float], now_s: float) -> dict[str, float]:
    """In seconds, the oldest first."""
    kinds = sorted(oldest, key=lambda kind: oldest[kind])
    return {kind: round(max(now_s - oldest[kind], 0.0), 1) for kind in kinds}
