"""When held-out tasks are evaluated: before and after training, alone, and every few steps during it.

With `sync` training waits for the latter. With `async` it goes on beside them; their rows come when they are complete,
with the versions that sampled them. What an earlier life of the run did at a step is not done again, and what it had
begun is found again by its name.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from manege.config import RunConfig
from manege.trainer.collect import GroupFeed
from manege.trainer.evaluate import Evaluation, PendingEvaluation, wilson
from manege.trainer.intake import Intake
from manege.trainer.metrics import read_metrics
from manege.types import PolicyVersion, Task

__all__ = ["Evaluations"]


class Evaluations:
    """Of one run."""

    def __init__(
        self,
        config: RunConfig,
        tasks: Sequence[Task],
        feed: GroupFeed,
        intake: Intake,
        *,
        lineage: str,
        metrics: Path,
        emit: Callable[[Mapping[str, Any]], None],
        on_phase: Callable[[str], None],
    ) -> None:
        """`tasks`: held-out ones, none: nothing is evaluated. `lineage`: what ids begin with. `metrics`: where `emit`
        writes rows."""
        self._config, self._tasks, self._feed, self._intake = config, tasks, feed, intake
        self._lineage, self._emit, self._on_phase = lineage, emit, on_phase
        self._known = [row for row in read_metrics(metrics) if row["kind"] == "evaluation"]
        self._interim: list[int] = []

    @property
    def under_way(self) -> Sequence[int]:
        """Steps whose evaluation beside training is not complete."""
        return list(self._interim)

    async def all(self, step: int, version: PolicyVersion) -> None:
        """All tasks at every temperature, one after the other."""
        for temperature in self._config.evaluation.temperatures:
            name = "greedy" if temperature == 0 else f"at temperature {temperature:g}"
            self._on_phase(f"evaluating {len(self._tasks)} held-out tasks, {name}")
            if (pending := await self._begin(step, version, temperature, self._tasks)) is not None:
                await self._intake.finish(pending)

    async def interim(self, step: int, version: PolicyVersion) -> None:
        """Some tasks at the first temperature, if it is time."""
        every = self._config.evaluation.every
        if not every or not step or step % every:
            return
        tasks = self._tasks[: self._config.evaluation.num_interim]
        pending = await self._begin(step, version, self._config.evaluation.temperatures[0], tasks)
        if pending is None:
            return
        self._interim.append(step)
        if self._config.train.schedule == "sync":
            self._on_phase(f"evaluating {len(tasks)} held-out tasks")
            await self._intake.finish(pending)

    async def again(self, steps: Sequence[int], version: PolicyVersion) -> None:
        """Those that an earlier life of the run had under way."""
        for step in steps:
            await self.interim(step, version)

    async def _begin(
        self, step: int, version: PolicyVersion, temperature: float, tasks: Sequence[Task]
    ) -> PendingEvaluation | None:
        row = {"kind": "evaluation", "step": step, "temperature": temperature, "num_tasks": len(tasks)}
        if not tasks or any(row.items() <= known.items() for known in self._known):
            return None
        pending = PendingEvaluation(
            tasks,
            name=f"{self._lineage}-e{step:06d}",
            temperature=temperature,
            success_reward=self._config.scorer.success_reward,
            on_complete=partial(self._complete, row, version),
        )
        self._intake.begin(pending)
        await pending.start(self._feed)
        return pending

    def _complete(self, row: Mapping[str, Any], version: PolicyVersion, result: Evaluation) -> None:
        low, high = wilson(result.num_success, result.num_tasks)
        oldest, newest = result.versions or (version, version)
        self._known.append(row)
        if row["step"] in self._interim:
            self._interim.remove(row["step"])
        self._emit(
            {
                **row,
                "policy_version": oldest,
                "policy_version_last": newest,
                "success_rate": result.success_rate,
                "low": low,
                "high": high,
                "reward_mean": result.reward_mean,
            }
        )
