"""A training on the virtual clock: the real schedule, driven as trainer/intake.py and trainer/loop.py drive it.

In: a config, what the hardware takes, a workload. Out: what a run's metrics would say. Simulated are engines, agents
and the time of an update; which groups are asked for, trained, waited for or cut off is decided by `Schedule` itself.
"""

import itertools
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field

from benchmarks.simulate_async.agents import Agents, Rollout
from benchmarks.simulate_async.clock import Clock, Process, Signal, Steps
from benchmarks.simulate_async.engine import Speed
from benchmarks.simulate_async.workload import Workload
from manege.train_config import TrainConfig
from manege.trainer.schedule import Drawn, Schedule

__all__ = ["Hardware", "Result", "StepRow", "simulate"]

_MIN_VERDICTS = 2
"""As in trainer/intake.py."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """What serves and what trains."""

    speed: Speed
    num_engines: int = 1
    slots: int = 32
    """Attempts at once."""
    update_s: Sequence[float] = (1.0,)
    """Of an update, step by step, over and over; 0: there was nothing to learn, and no new version."""
    update_token_s: float = 0.0
    """In addition, per sampled token of the step's rollouts."""
    publish_s: float = 0.0
    """New weights into service; nothing decodes meanwhile."""
    is_separate: bool = False
    """The trainer has hardware of its own: engines serve on during the step, and stand still to publish only."""
    shared_tokens: int = 0
    """That all prompts begin with."""
    num_interim: int = 0
    """Rollouts of an evaluation beside training ..."""
    evaluate_every: int | None = None
    """... so often, in steps. With `sync` training stands still for it, and it does not count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One step."""

    collect_s: float
    """The trainer waits."""
    update_s: float
    """Settling and publishing included."""
    groups: Sequence[int]
    staleness: Sequence[int]
    """Of each group."""
    num_tokens: int
    carried_over: int
    """Groups that were asked for before and that no step has trained yet."""


@dataclass(slots=True, kw_only=True)
class Result:
    """A training."""

    num_rollouts: int
    """Per step."""
    rows: list[StepRow] = field(default_factory=list)
    engine_idle_s: float = 0.0
    """Mean over the engines."""
    dropped_rollouts: int = 0
    dropped_groups: int = 0

    @property
    def seconds(self) -> float:
        """Of training."""
        return sum(row.collect_s + row.update_s for row in self.rows)

    @property
    def trainer_idle_s(self) -> float:
        """It waits for rollouts."""
        return sum(row.collect_s for row in self.rows)

    @property
    def num_tokens(self) -> int:
        """Sampled tokens of what was trained."""
        return sum(row.num_tokens for row in self.rows)

    @property
    def staleness(self) -> Sequence[int]:
        """Of every trained group."""
        return [age for row in self.rows for age in row.staleness]


@dataclass(slots=True, kw_only=True)
class _Group:
    index: int
    rollouts: list[Rollout]
    num_open: int
    is_cut: bool = False

    @property
    def oldest(self) -> int | None:
        return min((each.oldest for each in self.rollouts if each.oldest is not None), default=None)

    @property
    def num_tokens(self) -> int:
        return sum(turn.answer_tokens for each in self.rollouts if not each.is_cut for turn in each.plan.turns)


def simulate(config: TrainConfig, hardware: Hardware, workload: Workload, *, seed: int = 0) -> Result:
    """Train `config.steps` steps."""
    return _Training(config, hardware, workload, seed).run()


class _Training:
    def __init__(self, config: TrainConfig, hardware: Hardware, workload: Workload, seed: int) -> None:
        self._config, self._hardware, self._workload = config, hardware, workload
        self._clock = Clock()
        self._schedule = Schedule(config)
        self._agents = Agents(
            self._clock,
            num_engines=hardware.num_engines,
            speed=hardware.speed,
            slots=hardware.slots,
            shared_tokens=hardware.shared_tokens,
            seed=seed,
            ended=self._rollout_ended,
        )
        self._version, self._num_taken = 0, 0
        self._asked: dict[int, _Group] = {}
        self._complete: list[int] = []
        self._num_ended = 0
        """Groups that a step may draw: with fewer than it has, there is no use in asking the schedule."""
        self._group_ended = Signal(self._clock)
        self._evaluated = itertools.count(1)
        self._result = Result(num_rollouts=config.groups * config.group_size)

    def run(self) -> Result:
        self._clock.run(Process(self._clock, self._train()))
        self._result.engine_idle_s = self._agents.idle_s()
        return self._result

    def _train(self) -> Steps:
        for step in range(self._config.steps):
            self._evaluate(step)
            num_left, started = (self._config.steps - step) * self._config.groups, self._clock.now
            drawn = yield from self._next_batch(num_left)
            groups = [self._pop(index) for index in drawn.groups]
            collected, version = self._clock.now, self._version
            carried_over = len(self._asked)
            if self._config.schedule == "async":
                self._ask_wanted(num_left - self._config.groups, trains=version + 1)
            num_tokens = sum(group.num_tokens for group in groups)
            yield from self._update(step, num_tokens)
            self._result.rows.append(
                StepRow(
                    collect_s=collected - started,
                    update_s=self._clock.now - collected,
                    groups=drawn.groups,
                    staleness=[version - group.oldest for group in groups if group.oldest is not None],
                    num_tokens=num_tokens,
                    carried_over=carried_over,
                )
            )

    def _next_batch(self, num_left: int) -> Generator[Signal, None, Drawn]:
        while True:
            if self._num_ended >= self._config.groups:
                if (drawn := self._schedule.draw(self._version)) is not None:
                    return drawn
                self._cut_late()
            self._ask_wanted(num_left, trains=self._version)
            while not self._complete:
                yield self._group_ended
            self._take(self._asked[self._complete.pop(0)])

    def _update(self, step: int, num_tokens: int) -> Steps:
        config, hardware = self._config, self._hardware
        step_s = hardware.update_s[step % len(hardware.update_s)] + hardware.update_token_s * num_tokens
        if not step_s:
            return
        if hardware.is_separate:
            yield step_s
        yield from self._agents.settle(config.drain_s if config.inflight == "drain" else 0.0)
        self._schedule.began(self._begun(), self._version)
        yield hardware.publish_s + (0.0 if hardware.is_separate else step_s)
        self._version += 1
        self._agents.resume(self._version, keep=config.inflight == "keep")
        # Held calls go on before the next update may hold them again.
        yield 0

    def _begun(self) -> Iterable[int]:
        return [
            group.index for group in self._asked.values() if any(each.process is not None for each in group.rollouts)
        ]

    def _ask_wanted(self, num_left: int, *, trains: int) -> None:
        for _ in range(self._schedule.wanted(num_left, begins=self._version, trains=trains)):
            index, size = self._num_taken, self._config.group_size
            self._num_taken += 1
            rollouts = [Rollout(group=index, plan=self._workload(index, member)) for member in range(size)]
            self._asked[index] = _Group(index=index, rollouts=rollouts, num_open=size)
            self._schedule.ask(index)
            for rollout in rollouts:
                self._agents.ask(rollout)

    def _rollout_ended(self, rollout: Rollout) -> None:
        if rollout.group is None:
            return
        group = self._asked[rollout.group]
        group.num_open -= 1
        if not group.num_open:
            self._complete.append(group.index)
            self._group_ended.give()

    def _take(self, group: _Group) -> None:
        self._num_ended += 1
        if group.is_cut and sum(not each.is_cut for each in group.rollouts) < _MIN_VERDICTS:
            self._schedule.drop(group.index)
            self._result.dropped_groups += 1
            self._pop(group.index)
        else:
            self._schedule.end(group.index, group.oldest)

    def _cut_late(self) -> None:
        index = self._schedule.late(self._version, lambda index: self._asked[index].num_open)
        if index is None:
            return
        group = self._asked[index]
        group.is_cut = True
        for rollout in group.rollouts:
            if not rollout.has_ended:
                self._result.dropped_rollouts += 1
                self._agents.cut(rollout)

    def _evaluate(self, step: int) -> None:
        """Beside training; with `sync` it is done before training goes on, at seconds that are not counted."""
        every = self._hardware.evaluate_every
        if every and step and step % every == 0 and self._config.schedule == "async":
            for _ in range(self._hardware.num_interim):
                self._agents.ask(Rollout(group=None, plan=self._workload(-next(self._evaluated), 0)))

    def _pop(self, index: int) -> _Group:
        self._num_ended -= 1
        return self._asked.pop(index)
