"""Numbers of all workers of one gateway, since a scrape or a trainer reaches whichever worker there is.

Each worker tells its own in its sign of life (`presence.py`); who is asked adds to its own what the others said last,
at most a beat ago. A worker that takes the place of a dead one goes on from what that one told last, so that no total
falls. A gateway of one process tells them, too, and adds nothing.
"""

from collections.abc import Iterable, Mapping

from manege.gateway.hold import Gate
from manege.gateway.metrics import Counters
from manege.types import JsonObject

__all__ = ["Totals"]

_HELD, _IN_FLIGHT = "manege_calls_held", "manege_calls_in_flight"


class Totals:
    """Of one process."""

    def __init__(self, counters: Counters, gate: Gate, group: str | None) -> None:
        """`group`: the gateway that it is a worker of."""
        self._counters, self._gate, self._group = counters, gate, group
        self._before: Mapping[str, float] = {}

    def told(self) -> JsonObject:
        """For the sign of life."""
        return {"group": self._group, "totals": self._totals()}

    def go_on_from(self, state: JsonObject) -> None:
        """The last sign of life of the worker whose place this one takes."""
        self._before = state.get("totals", {})

    def of_all(self, others: Iterable[JsonObject]) -> dict[str, float]:
        """By the names of metrics. `others`: signs of life of other gateways, of which some may be workers of this."""
        sums = self._totals() | self._gauges()
        for state in others:
            if self._group is not None and state.get("group") == self._group:
                gauges = {_IN_FLIGHT: state["in_flight"], _HELD: state["held"]}
                for name, value in {**state["totals"], **gauges}.items():
                    sums[name] = sums.get(name, 0) + value
        return sums

    def _totals(self) -> dict[str, float]:
        own = {
            **self._counters.values,
            "manege_calls_held_total": self._gate.held_total,
            "manege_calls_held_seconds_total": self._gate.held_s,
        }
        return {name: value + self._before.get(name, 0) for name, value in own.items()}

    def _gauges(self) -> dict[str, float]:
        return {_IN_FLIGHT: self._gate.num_in_flight, _HELD: self._gate.num_held}
