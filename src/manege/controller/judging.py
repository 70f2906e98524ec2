"""From what an attempt left to its outcome and reward.

A scorer that gives no verdict on this workspace is asked about one that no agent has touched. If it gives one there,
this workspace is to blame: the reward is 0, else a model would learn to hang its tests. If it does not, nothing is
known about the agent: the scoring alone is tried again, later, and the agent's work is not thrown away; when no try is
left the rollout ends without a verdict, and no other attempt is made of it, since the agent did nothing wrong.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from manege.config import RunConfig
from manege.controller.folders import AttemptFolders
from manege.controller.outcome import judge_score
from manege.controller.record import AttemptRecord
from manege.controller.scoring import Scored, Scorer
from manege.controller.verdict import Verdict
from manege.errors import HarnessError
from manege.logs import get_logger, kv
from manege.sandbox.spec import Seen
from manege.store.base import Ending
from manege.types import JsonObject, Outcome, Rollout

__all__ = ["Finished", "Judgement", "Pristine", "judge"]

_MAX_DELAY_S = 300.0

_log = get_logger("controller")

Pristine = Callable[[], AbstractAsyncContextManager[tuple[AttemptFolders, Sequence[Path]]]]
"""Makes a workspace that no agent has touched: its folders, and its layers, the topmost first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What a rollout is worth."""

    outcome: Outcome
    message: str | None
    verdict: Verdict
    is_final: bool
    """Whether the scorer was asked in vain, as often as is allowed."""
    changed: Sequence[str]
    """See `Scored`, as for `seen`."""
    seen: Sequence[Seen]

    def ending(self, evidence: JsonObject) -> Ending:
        """Of the attempt."""
        return Ending(
            outcome=self.outcome,
            reward=self.verdict.reward,
            message=self.message,
            evidence=evidence,
            call_rewards=self.verdict.call_rewards,
            is_final=self.is_final,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """What an attempt left."""

    record: AttemptRecord
    folders: AttemptFolders
    layers: Sequence[Path]
    """Its workspace, the topmost first."""
    outcome: Outcome
    """Of the agent's run alone."""
    message: str | None


async def judge(
    scorer: Scorer, rollout: Rollout, config: RunConfig, finished: Finished, make_pristine: Pristine
) -> Judgement:
    """Never raises for what is wrong with workspace, task or scorer."""
    async with AsyncExitStack() as stack:
        made: list[tuple[AttemptFolders, Sequence[Path]]] = []

        async def pristine() -> tuple[AttemptFolders, Sequence[Path]]:
            if not made:
                made.append(await stack.enter_async_context(make_pristine()))
            return made[0]

        tries = 0
        while True:
            scored, control = await _look(scorer, rollout, config, finished, pristine)
            outcome, message = judge_score(finished.outcome, finished.message, scored.verdict, control)
            tries += 1
            if outcome is not Outcome.INFRA_ERROR or tries >= rollout.spec.max_attempts:
                break
            delay_s = min(config.controller.retry_s * 2 ** (tries - 1), _MAX_DELAY_S)
            _log.warning(kv("scoring again", rollout_id=rollout.spec.id, after_s=delay_s, reason=message))
            await asyncio.sleep(delay_s)
        return Judgement(
            outcome=outcome,
            message=message,
            verdict=scored.verdict,
            is_final=outcome is Outcome.INFRA_ERROR,
            changed=scored.changed,
            seen=scored.seen,
        )


async def _look(
    scorer: Scorer,
    rollout: Rollout,
    config: RunConfig,
    finished: Finished,
    pristine: Callable[[], Awaitable[tuple[AttemptFolders, Sequence[Path]]]],
) -> tuple[Scored, Verdict | None]:
    """At the finished workspace and, if that brings no verdict, at the pristine one."""
    task = rollout.spec.task
    try:
        before = (await pristine())[1] if config.scorer.restore else ()
        scored = await scorer.score(config, task, finished.record, finished.folders, finished.layers, before)
        if scored.verdict.failure is None:
            return scored, None
        folders, layers = await pristine()
        untouched = replace(
            finished.record, workspace=folders.workspace, stdout="", stderr="", exit_code=0, timed_out=False, calls=()
        )
        return scored, (await scorer.score(config, task, untouched, folders, layers, layers)).verdict
    except (HarnessError, OSError) as error:  # a setup that fails, a scorer that cannot be started, a full disk
        return Scored(verdict=Verdict(reward=None, failure=str(error))), None
