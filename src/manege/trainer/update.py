"""One update: an optimiser step per mini-batch, and the new weights in service.

    weights that the engine shares      hold calls, settle those under way, step, publish, resume
    an engine apart                     step, while it serves on; then hold, settle, publish, resume

`resume` runs whatever happens. If a step fails, no step has happened: the old weights serve on. If publishing fails,
engines that have the new weights say so with every token, and the others serve the old ones. The error ends the run,
which can go on from its last checkpoint.

The proximal policy of `decoupled` is the one at the start of the update: for the later steps its log-probabilities are
computed before the first.
"""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from manege.client import Client
from manege.config import TrainConfig
from manege.engine.base import Weights
from manege.errors import ManegeError
from manege.logs import get_logger, kv
from manege.trainer.capabilities import check_engines
from manege.trainer.engines.base import StepReport, TrainEngine, WeightedSample
from manege.trainer.objective import Objective
from manege.types import PolicyVersion

__all__ = ["Update", "Updates", "run_update"]

_SUMS = ("trained_tokens", "unique_tokens", "total_tokens")
_LAST = ("learning_rate",)
# Later steps see weights that the earlier ones have moved: their distance to the sampler is no mismatch.
_FIRST = ("gap_mean", "gap_max", "gap_kl")

Threaded = Callable[..., Awaitable[Any]]
"""Runs a blocking function with its arguments in the train engine's thread."""

_log = get_logger("trainer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What an update was."""

    version: PolicyVersion
    """In service from now on."""
    metrics: Mapping[str, Any]


class Updates:
    """Of one run. Concurrency: one update at a time."""

    def __init__(
        self,
        client: Client,
        engine: TrainEngine,
        config: TrainConfig,
        objective: Objective,
        threaded: Threaded,
        clock: Callable[[], float],
    ) -> None:
        self._client, self._engine, self._config, self._objective = client, engine, config, objective
        self._threaded, self._clock = threaded, clock
        self._is_shared = engine.capabilities.publishes == "shared"
        self._last: Mapping[str, Any] = {}
        """The gateway's state after the last update; `begin` reads the first one."""

    async def begin(self) -> None:
        """Before training, which is when counting begins. Raises TrainerError for what the gateway's engines cannot do.
        A trainer that was killed in its update left the gateway paused."""
        self._last = await self._client.resume()
        check_engines(self._config, self._engine, self._last["engine"])

    async def publish(self) -> PolicyVersion:
        """Restored weights, without a step."""
        return (await self._change(lambda: self._threaded(self._engine.publish)))[0]

    async def run(
        self,
        mini_batches: Sequence[Sequence[WeightedSample]],
        version: PolicyVersion,
        while_held: Callable[[], Awaitable[None]],
    ) -> Update:
        """`version`: in service so far; `while_held`: called when no token of it can come any more."""
        reports: list[StepReport] = []

        async def step() -> Weights:
            report = await self._threaded(run_update, self._engine, mini_batches, self._objective)
            reports.append(report)
            return await self._threaded(self._engine.publish)

        async def held(prepared: Weights | None) -> Weights:
            await while_held()
            return prepared or await step()

        weights = None if self._is_shared else await step()
        new_version, engine_metrics = await self._change(lambda: held(weights))
        num_steps = sum(bool(part) for part in mini_batches)
        metrics = {"gap_by_distance": reports[0].gap_by_distance(version), "optimiser_steps": num_steps}
        return Update(version=new_version, metrics={**reports[0].metrics, **metrics, **engine_metrics})

    async def _change(self, make: Callable[[], Awaitable[Weights]]) -> tuple[PolicyVersion, Mapping[str, Any]]:
        """Hold, settle, make the weights, publish them, resume."""
        train, started = self._config, self._clock()
        try:
            before = await self._client.pause(
                drain_s=train.drain_s if train.inflight == "drain" else 0, keep=train.inflight == "keep"
            )
            drain_s = self._clock() - started
            version = await self._client.publish(await make())
        except ManegeError as error:
            # Before `resume`, which may fail for the same reason.
            _log.error(kv("the update failed; the old weights serve on", reason=error))
            raise
        finally:
            after = await asyncio.shield(self._client.resume())
        last, self._last = self._last, after
        return version, {
            "drain_s": drain_s,
            "unsettled_calls": before["inflight"],
            "held_calls": after["held_total"] - last["held_total"],
            "held_s": after["held_s"] - last["held_s"],
            # Engines that came or went begin anew.
            "engine_idle_s": max(0.0, after["engine"]["idle_s"] - last["engine"]["idle_s"]),
        }


def run_update(
    engine: TrainEngine, mini_batches: Sequence[Sequence[WeightedSample]], objective: Objective
) -> StepReport:
    """Blocking. Mini-batches without a sample are passed over; at least one has some."""
    parts = [part for part in mini_batches if part]
    if objective.ratio == "decoupled" and len(parts) > 1:
        parts = _with_proximal(engine, parts)
    if len(parts) == 1:
        return engine.step(parts[0], objective)
    with engine.undone_on_error():
        return _combined([engine.step(part, objective) for part in parts])


def _with_proximal(
    engine: TrainEngine, parts: Sequence[Sequence[WeightedSample]]
) -> Sequence[Sequence[WeightedSample]]:
    logprobs = iter(engine.logprobs([item.sample for part in parts for item in part]))
    return [[dataclasses.replace(item, proximal_M=next(logprobs)) for item in part] for part in parts]


def _combined(reports: Sequence[StepReport]) -> StepReport:
    """Tokens are added up, most others are means over the trained tokens."""
    rows = [report.metrics for report in reports]
    tokens = sum(row["trained_tokens"] for row in rows)

    def value(name: str) -> Any:
        if name in _SUMS:
            return sum(row[name] for row in rows)
        if name in _LAST:
            return rows[-1][name]
        if name in _FIRST:
            return rows[0][name]
        return sum(row[name] * row["trained_tokens"] for row in rows) / tokens

    metrics = {name: value(name) for name in rows[0]}
    metrics["unique_ratio"] = metrics["unique_tokens"] / metrics["total_tokens"]
    return StepReport(metrics=metrics, gap_by_version=reports[0].gap_by_version)
