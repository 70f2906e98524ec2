"""The training loop, read top to bottom: evaluate, then collect - credit - update - publish until done, then evaluate.

Order of an update: the gateway holds new calls and lets running ones end, the engine steps, the weights are published
under the next version, everything resumes; `resume` runs whatever happens. A checkpoint is written between steps only,
so that a resumed run repeats at most the steps since the last one.

What is asked for has names that follow from the run and from where it is, so a resumed run asks for the same and finds
what ended or still runs. A stopped run leaves its rollouts open for that.
"""

import asyncio
import dataclasses
import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from manege.client import Client
from manege.config import RunConfig
from manege.logs import get_logger, kv
from manege.trainer.algo.branches import Decode
from manege.trainer.batch import Batch, build_batch, is_informative
from manege.trainer.capabilities import check_capabilities
from manege.trainer.checkpoint import (
    AskedGroup,
    TrainerState,
    latest_checkpoint,
    load_checkpoint,
    remove_unfinished,
    save_checkpoint,
)
from manege.trainer.collect import Group, GroupFeed, new_nonce
from manege.trainer.diagnosis import check_trained, diagnose
from manege.trainer.durable import write_text
from manege.trainer.engines.base import TrainEngine
from manege.trainer.evaluate import evaluate, wilson
from manege.trainer.metrics import MetricsFile, read_metrics
from manege.trainer.objective import objective_of
from manege.trainer.plot import plot_curve
from manege.trainer.schedule import Drawn, Schedule, SyncSchedule
from manege.trainer.tasks import task_order
from manege.trainer.update import run_update
from manege.types import GroupId, PolicyVersion, RunId, Task

__all__ = ["Observer", "Trainer"]

_STOP_WINDOW = 3
"""Steps over which the success rate of `train.stop_success` is averaged."""

_log = get_logger("trainer")
_Result = TypeVar("_Result")


class Observer(Protocol):
    """Who wants to see rows of metrics as they are made."""

    def on_row(self, row: Mapping[str, Any]) -> None:
        """A step or an evaluation."""
        ...

    def on_phase(self, phase: str) -> None:
        """What is going on, for people."""
        ...


@dataclass(frozen=True, slots=True)
class _Paths:
    folder: Path

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def nonce(self) -> Path:
        return self.folder / "nonce"

    @property
    def metrics(self) -> Path:
        return self.folder / "metrics.jsonl"

    @property
    def model(self) -> Path:
        return self.folder / "model"


class Trainer:
    """One training. `run` may be cancelled at any time; `resume=True` goes on from the last checkpoint."""

    def __init__(
        self,
        config: RunConfig,
        client: Client,
        engine: TrainEngine,
        observer: Observer,
        *,
        train_tasks: Sequence[Task],
        heldout_tasks: Sequence[Task],
        clock: Callable[[], float],
        decode: Decode,
        resume: bool = False,
    ) -> None:
        """`decode`: the trained model's. Raises TrainerError for a setting that the engine cannot carry out."""
        check_capabilities(config, engine)
        self._config, self._client, self._engine, self._observer = config, client, engine, observer
        self._clock, self._decode, self._resume = clock, decode, resume
        self._paths = _Paths(config.run_folder)
        self._run = RunId(config.name)
        self._metrics = MetricsFile(self._paths.metrics)
        self._train_tasks, self._heldout_tasks = train_tasks, heldout_tasks
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="train-engine")
        self._max_sample_tokens = config.train.max_sample_tokens or engine.capabilities.max_sample_tokens
        self._warned = False
        self._version, self._config_hash = PolicyVersion(0), config.digest()
        self._state = TrainerState(
            nonce="",
            config_hash=self._config_hash,
            step=0,
            tasks_taken=0,
            asked=[],
            policy_version=self._version,
            train_s=0.0,
            successes=[],
        )

    async def run(self) -> Sequence[Mapping[str, Any]]:
        """Train to the end; returns all rows of metrics."""
        await self._client.put_run(self._run, self._config.to_json())
        await self._in_engine(remove_unfinished, self._paths.checkpoints)
        await (self._restore() if self._resume else self._begin())
        feed = GroupFeed(
            self._client,
            self._run,
            # Whatever ended before, the gateway tells when it is asked for it again.
            cursor=(await self._client.terminal(run=self._run, after=0, limit=1)).num_ended,
            reward_from=self._config.scorer.reward_from,
            max_attempts=self._config.controller.max_attempts,
            call_rewards=self._config.credit.advantage == "returns",
        )
        if self._state.step == 0:
            await self._evaluate_all(feed)
        await self._train(feed)
        await self._evaluate_all(feed)
        await self._cancel_open(is_ours=True)
        await self._in_engine(self._engine.export, self._paths.model)
        rows = read_metrics(self._paths.metrics)
        plot_curve(rows, self._paths.folder / "curve", title=self._config.name)
        return rows

    async def _in_engine(self, function: Callable[..., _Result], *arguments: Any) -> _Result:
        """Run a blocking call of the train engine in its thread, always the same one: every thread that allocates
        gigabytes keeps them in an arena of its own."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    async def _train(self, feed: GroupFeed) -> None:
        schedule: Schedule = SyncSchedule(
            lambda: self._start_group(feed), feed.next_group, self._config.train.groups, keep=self._is_worth_training
        )
        for group in self._state.asked:
            await self._ask(feed, group.index)
        while not self._finished():
            await self._evaluate_interim(feed)
            self._observer.on_phase("collecting rollouts")
            started = self._clock()
            drawn = await schedule.next_batch()
            collected = self._clock()
            batch = self._build(drawn)
            self._observer.on_phase("updating the model")
            update = await self._update(batch)
            self._finish_step(drawn, batch, update, collected - started, self._clock() - collected)
            await self._checkpoint_if_due()

    def _build(self, drawn: Drawn) -> Batch:
        """Raises TrainerError where there is too little to train on."""
        diagnose([*drawn.groups, *drawn.replaced], self._config.train.max_failed_fraction)
        batch = build_batch(
            drawn.groups,
            self._config.credit,
            success_reward=self._config.scorer.success_reward,
            rng=random.Random(f"{self._config.seed}:shuffle:{self._state.step}"),
            num_mini_batches=self._config.train.mini_batches,
            max_sample_tokens=self._max_sample_tokens,
            replaced=drawn.replaced,
            decode=self._decode,
        )
        check_trained(batch.ledger, self._config.credit.min_trained_fraction)
        if batch.metrics["lone_groups"] and not self._warned:
            self._warned = True
            _log.warning(
                kv(
                    "groups with a single verdict have nothing to be compared with (said once; see "
                    "the metric lone_groups)",
                    groups=batch.metrics["lone_groups"],
                    step=self._state.step + 1,
                )
            )
        return batch

    def _is_worth_training(self, group: Group) -> bool:
        credit = self._config.credit
        return credit.zero_variance == "keep" or is_informative(group, credit, self._max_sample_tokens)

    async def _start_group(self, feed: GroupFeed) -> None:
        group = AskedGroup(index=self._state.tasks_taken, policy_version=self._version)
        self._state = dataclasses.replace(self._state, tasks_taken=group.index + 1, asked=[*self._state.asked, group])
        await self._ask(feed, group.index)

    async def _ask(self, feed: GroupFeed, index: int) -> None:
        [position] = task_order(len(self._train_tasks), index, 1, seed=self._config.seed)
        await feed.start(
            self._train_tasks[position],
            group=self._group_id(index),
            size=self._config.train.group_size,
            is_train=True,
            temperature=self._config.sampling.temperature,
        )

    def _group_id(self, index: int) -> GroupId:
        return GroupId(f"{self._lineage}-{index:06d}")

    @property
    def _lineage(self) -> str:
        """What ids begin with. Under another config the same run asks anew: what it has would be of other settings."""
        return hashlib.sha256(f"{self._state.nonce}:{self._config_hash}".encode()).hexdigest()[:8]

    async def _update(self, batch: Batch) -> Mapping[str, Any]:
        """The optimiser steps and the new weights in service; without a gradient there is nothing to do."""
        if not batch.samples:
            _log.info(kv("step skipped: all rewards of every group are equal", step=self._state.step + 1))
            return {"optimiser_steps": 0}
        objective = objective_of(self._config.credit)
        await self._client.pause()
        try:
            report = await self._in_engine(run_update, self._engine, batch.mini_batches, objective)
            gaps = report.gap_by_distance(self._version)
            self._version = await self._client.publish(self._engine.publish())
        finally:
            await asyncio.shield(self._client.resume())
        num_steps = sum(bool(part) for part in batch.mini_batches)
        return {**report.metrics, "gap_by_distance": gaps, "optimiser_steps": num_steps}

    def _finish_step(
        self,
        drawn: Drawn,
        batch: Batch,
        update: Mapping[str, Any],
        collect_s: float,
        update_s: float,
    ) -> None:
        step = self._state.step + 1
        ended = {group.id for group in [*drawn.groups, *drawn.replaced]}
        successes = [*self._state.successes, batch.metrics["success_rate"]]
        self._state = dataclasses.replace(
            self._state,
            config_hash=self._config_hash,
            step=step,
            asked=[group for group in self._state.asked if self._group_id(group.index) not in ended],
            policy_version=self._version,
            train_s=self._state.train_s + collect_s + update_s,
            successes=successes[-_STOP_WINDOW:],
        )
        self._emit(
            {
                "kind": "step",
                "step": step,
                "policy_version": self._version,
                "train_s": self._state.train_s,
                "collect_s": collect_s,
                "update_s": update_s,
                "tokens_per_s": batch.metrics["sampled_tokens"] / max(collect_s, 1e-9),
                "groups": [group.id for group in drawn.groups],
                "replaced": [group.id for group in drawn.replaced],
                "refilled_groups": len(drawn.replaced),
                **batch.metrics,
                **update,
            }
        )

    def _finished(self) -> bool:
        """All steps done, or good enough for some steps in a row."""
        target, window = self._config.train.stop_success, self._state.successes
        good = target is not None and len(window) == _STOP_WINDOW and sum(window) / _STOP_WINDOW >= target
        return good or self._state.step >= self._config.train.steps

    async def _checkpoint_if_due(self) -> None:
        if self._finished() or self._state.step % self._config.train.checkpoint_every == 0:
            save = partial(save_checkpoint, num_kept=self._config.train.keep_checkpoints)
            await self._in_engine(save, self._paths.checkpoints, self._engine, self._state)

    async def _evaluate_all(self, feed: GroupFeed) -> None:
        """At every temperature."""
        for temperature in self._config.evaluation.temperatures:
            await self._evaluate(feed, temperature, self._heldout_tasks)

    async def _evaluate_interim(self, feed: GroupFeed) -> None:
        every, step = self._config.evaluation.every, self._state.step
        if every and step and step % every == 0:
            tasks = self._heldout_tasks[: self._config.evaluation.num_interim]
            await self._evaluate(feed, self._config.evaluation.temperatures[0], tasks)

    async def _evaluate(self, feed: GroupFeed, temperature: float, tasks: Sequence[Task]) -> None:
        """Unless there is nothing to do, or an earlier life of this run did it at this step."""
        step, num_tasks = self._state.step, len(tasks)
        wanted = {"kind": "evaluation", "step": step, "temperature": temperature, "num_tasks": num_tasks}
        if not tasks or any(wanted.items() <= row.items() for row in read_metrics(self._paths.metrics)):
            return
        name = "greedy" if temperature == 0 else f"at temperature {temperature:g}"
        self._observer.on_phase(f"evaluating {len(tasks)} held-out tasks, {name}")
        result = await evaluate(
            feed,
            tasks,
            name=f"{self._lineage}-e{step:06d}",
            temperature=temperature,
            success_reward=self._config.scorer.success_reward,
        )
        low, high = wilson(result.num_success, result.num_tasks)
        self._emit(
            {
                **wanted,
                "policy_version": self._version,
                "success_rate": result.success_rate,
                "low": low,
                "high": high,
                "reward_mean": result.reward_mean,
            }
        )

    def _emit(self, row: Mapping[str, Any]) -> None:
        row = {**row, "time_s": self._clock()}
        self._metrics.write(row)
        self._observer.on_row(row)

    async def _begin(self) -> None:
        self._read_nonce()
        # A trainer that was killed in its update left the gateway paused.
        await self._client.resume()
        self._version = PolicyVersion((await self._client.state())["version"])

    def _read_nonce(self) -> None:
        """Drawn once per run folder, before anything is asked for."""
        path = self._paths.nonce
        if not path.exists():
            write_text(path, new_nonce())
        self._state = dataclasses.replace(self._state, nonce=path.read_text(encoding="utf-8"))

    async def _restore(self) -> None:
        """Weights of the last checkpoint under a new version; metrics after it are forgotten."""
        checkpoint = latest_checkpoint(self._paths.checkpoints)
        if checkpoint is not None:
            self._state = await self._in_engine(load_checkpoint, checkpoint, self._engine)
        else:
            _log.warning(kv("no checkpoint yet, starting from the first step", folder=self._paths.checkpoints))
            self._read_nonce()
        if self._state.config_hash != self._config_hash:
            _log.info(kv("the config is another one than that of the checkpoint", checkpoint=checkpoint))
        self._metrics.truncate(step=self._state.step)
        for row in read_metrics(self._paths.metrics):
            self._observer.on_row(row)
        await self._client.pause()
        try:
            self._version = await self._client.publish(self._engine.publish())
        finally:
            await asyncio.shield(self._client.resume())
        if self._version <= self._state.policy_version:
            _log.warning(
                kv(
                    "the gateway has lost the history of this run: versions begin anew",
                    policy_version=self._version,
                    checkpoint=self._state.policy_version,
                )
            )
        await self._cancel_open(is_ours=False)

    async def _cancel_open(self, *, is_ours: bool) -> None:
        """Of this run: what nobody waits for any more, or what was asked for under another config."""
        for rollout in await self._client.open_rollouts(self._run):
            if rollout.spec.id.startswith(f"{self._lineage}-") is is_ours:
                await self._client.cancel(rollout.spec.id)
