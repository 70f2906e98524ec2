"""The training loop, read top to bottom: evaluate, then collect - credit - update - publish until done, then evaluate.

What is under way meanwhile is the intake's (intake.py), what an update is stands in update.py. With `sync` a step's
groups are asked for when the last update is done, with `async` before it begins, so that agents are always at work. A
checkpoint is written between steps only, so that a resumed run repeats at most the steps since the last one.

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
from manege.trainer.evaluations import Evaluations
from manege.trainer.intake import Intake, StepGroups
from manege.trainer.metrics import MetricsFile, read_metrics
from manege.trainer.objective import objective_of
from manege.trainer.plot import plot_curve
from manege.trainer.staleness import staleness_metrics
from manege.trainer.update import Update, Updates
from manege.types import PolicyVersion, RolloutSpec, RunId, Task

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
        self._updates = Updates(client, engine, config.train, objective_of(config.credit), self._in_engine, clock)
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
        await self._updates.begin()
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
        intake = Intake(
            feed,
            self._client,
            self._config,
            self._train_tasks,
            lineage=self._lineage,
            num_taken=self._state.tasks_taken,
            teaches=self._teaches,
        )
        evaluations = Evaluations(
            self._config,
            self._heldout_tasks,
            feed,
            intake,
            lineage=self._lineage,
            metrics=self._paths.metrics,
            emit=self._emit,
            on_phase=self._observer.on_phase,
        )
        if self._state.config_hash == self._config_hash:
            await evaluations.again(self._state.evaluating, self._version)
        if self._state.step == 0:
            await evaluations.all(0, self._version)
        await self._train(intake, evaluations)
        # Evaluations that are still under way are finished.
        await self._cancel_open(lambda spec: spec.is_train and self._is_ours(spec))
        await intake.finish_evaluations()
        await evaluations.all(self._state.step, self._version)
        await self._in_engine(self._engine.export, self._paths.model)
        rows = read_metrics(self._paths.metrics)
        plot_curve(rows, self._paths.folder / "curve", title=self._config.name)
        return rows

    async def _in_engine(self, function: Callable[..., _Result], *arguments: Any) -> _Result:
        """Run a blocking call of the train engine in its thread, always the same one: every thread that allocates
        gigabytes keeps them in an arena of its own."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    async def _train(self, intake: Intake, evaluations: Evaluations) -> None:
        if not self._finished():
            await intake.ask_again(self._state.asked)
        while not self._finished():
            await evaluations.interim(self._state.step, self._version)
            self._observer.on_phase("collecting rollouts")
            started = self._clock()
            taken = await intake.next_batch(self._version, self._num_left)
            carried = intake.asked
            collected = self._clock()
            batch = self._build(taken)
            if self._config.train.schedule == "async":
                left = self._num_left - self._config.train.groups
                await intake.ask_wanted(self._version, left, trains=self._version + 1)
            self._observer.on_phase("updating the model")
            update = await self._update(batch, intake)
            self._finish_step(taken, carried, batch, update, collected - started, self._clock() - collected)
            self._state = dataclasses.replace(
                self._state, tasks_taken=intake.num_taken, asked=intake.asked, evaluating=evaluations.under_way
            )
            await self._checkpoint_if_due()

    @property
    def _num_left(self) -> int:
        """Groups that the rest of the run trains."""
        return (self._config.train.steps - self._state.step) * self._config.train.groups

    def _build(self, taken: StepGroups) -> Batch:
        """Raises TrainerError where there is too little to train on."""
        diagnose([*taken.groups, *taken.replaced], self._config.train.max_failed_fraction)
        batch = build_batch(
            taken.groups,
            self._config.credit,
            success_reward=self._config.scorer.success_reward,
            rng=random.Random(f"{self._config.seed}:shuffle:{self._state.step}"),
            num_mini_batches=self._config.train.mini_batches,
            max_sample_tokens=self._max_sample_tokens,
            replaced=[*taken.replaced, *taken.dropped],
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

    def _teaches(self, group: Group) -> bool:
        credit = self._config.credit
        return credit.zero_variance == "keep" or is_informative(group, credit, self._max_sample_tokens)

    @property
    def _lineage(self) -> str:
        """What ids begin with. Under another config the same run asks anew: what it has would be of other settings."""
        return hashlib.sha256(f"{self._state.nonce}:{self._config_hash}".encode()).hexdigest()[:8]

    async def _update(self, batch: Batch, intake: Intake) -> Update:
        """Without a gradient there is nothing to do."""
        if not batch.samples:
            _log.info(kv("step skipped: all rewards of every group are equal", step=self._state.step + 1))
            return Update(version=self._version, metrics={"optimiser_steps": 0})
        return await self._updates.run(batch.mini_batches, self._version, partial(intake.note_begun, self._version))

    def _finish_step(
        self,
        taken: StepGroups,
        carried: Sequence[AskedGroup],
        batch: Batch,
        update: Update,
        trainer_idle_s: float,
        update_s: float,
    ) -> None:
        """`carried`: groups that were under way when the step was drawn."""
        step, trained = self._state.step + 1, self._version
        self._version = update.version
        successes = [*self._state.successes, batch.metrics["success_rate"]]
        step_s = trainer_idle_s + update_s
        self._state = dataclasses.replace(
            self._state,
            config_hash=self._config_hash,
            step=step,
            policy_version=self._version,
            train_s=self._state.train_s + step_s,
            successes=successes[-_STOP_WINDOW:],
        )
        self._emit(
            {
                "kind": "step",
                "step": step,
                "policy_version": self._version,
                "train_s": self._state.train_s,
                "trainer_idle_s": trainer_idle_s,
                "update_s": update_s,
                "tokens_per_s": batch.metrics["sampled_tokens"] / max(step_s, 1e-9),
                "rollouts_per_s": batch.metrics["num_rollouts"] / max(step_s, 1e-9),
                "groups": [group.id for group in taken.groups],
                "replaced": [group.id for group in taken.replaced],
                "refilled_groups": len(taken.replaced),
                "carried_over": len(carried),
                "carried_age_max": max((trained - group.policy_version for group in carried), default=0),
                **staleness_metrics(taken.groups, taken.dropped, trained),
                **batch.metrics,
                **update.metrics,
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

    def _emit(self, row: Mapping[str, Any]) -> None:
        row = {**row, "time_s": self._clock()}
        self._metrics.write(row)
        self._observer.on_row(row)

    async def _begin(self) -> None:
        self._read_nonce()
        if self._engine.capabilities.publishes == "shared":
            self._version = PolicyVersion((await self._client.state())["version"])
        else:
            # An engine apart may have any weights, under any version.
            self._version = await self._updates.publish()

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
        self._version = await self._updates.publish()
        if self._version <= self._state.policy_version:
            _log.warning(
                kv(
                    "the gateway has lost the history of this run: versions begin anew",
                    policy_version=self._version,
                    checkpoint=self._state.policy_version,
                )
            )
        await self._cancel_open(lambda spec: not self._is_ours(spec))

    def _is_ours(self, spec: RolloutSpec) -> bool:
        """Whether it was asked for under this config."""
        return spec.id.startswith(f"{self._lineage}-")

    async def _cancel_open(self, is_unwanted: Callable[[RolloutSpec], bool]) -> None:
        """Of this run."""
        for rollout in await self._client.open_rollouts(self._run):
            if is_unwanted(rollout.spec):
                await self._client.cancel(rollout.spec.id)
