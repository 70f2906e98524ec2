"""Groups of rollouts: ask for them, wait until all their members ended, fetch their calls.

The feed only talks to the gateway through the client. A group is given out when it is complete, in the order of
completion. Asking for a group again, by its id, finds its rollouts as they are: those that ended before are in the
gateway's answer, the others will be in the terminal feed. Concurrency: one task reads the feed; `start` and
`next_group` are called by the same task.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from manege.client import Client
from manege.types import TERMINAL, Call, CallId, GroupId, Rollout, RolloutId, RolloutSpec, RunId, Task

__all__ = ["Group", "GroupFeed", "new_nonce"]

_WAIT_S = 20.0
"""Long poll: below the idle time-outs of common proxies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """All rollouts of one task, ended, with the calls of their last attempts."""

    task: Task
    rollouts: Sequence[Rollout]
    calls: Sequence[Sequence[Call]]
    """Parallel to `rollouts`, as is ..."""
    call_rewards: Sequence[Mapping[CallId, float]] = ()
    """... what single calls earned; empty: nobody asked."""

    @property
    def id(self) -> GroupId:
        """Of its rollouts."""
        group = self.rollouts[0].spec.group
        assert group is not None
        return group


def new_nonce() -> str:
    """Eight letters that nobody else has."""
    return secrets.token_hex(4)


class GroupFeed:
    """Rollouts of one run, asked for and given back group by group."""

    def __init__(
        self,
        client: Client,
        run: RunId,
        *,
        cursor: int,
        reward_from: str,
        max_attempts: int,
        call_rewards: bool = False,
    ) -> None:
        """`cursor`: of the terminal feed, taken before anything is asked for. `call_rewards`: fetch what single calls
        earned, a request per rollout."""
        self._client, self._run, self._call_rewards = client, run, call_rewards
        self._cursor = cursor
        self._reward_from, self._max_attempts = reward_from, max_attempts
        self._open: dict[GroupId, tuple[Task, set[RolloutId], list[Rollout]]] = {}
        self._complete: list[GroupId] = []

    async def start(
        self, task: Task, *, group: GroupId | None = None, size: int, is_train: bool, temperature: float | None
    ) -> None:
        """Queue one group, or find it. None: nobody will ask for it again."""
        group = group or GroupId(new_nonce())
        specs = [
            RolloutSpec(
                id=RolloutId(f"{group}-{member}"),
                run=self._run,
                task=task,
                group=group,
                is_train=is_train,
                temperature=temperature,
                reward_from=self._reward_from,
                max_attempts=self._max_attempts,
            )
            for member in range(size)
        ]
        self._open[group] = (task, {spec.id for spec in specs}, [])
        for rollout in await self._client.create_rollouts(specs):
            if rollout.state in TERMINAL:
                self._take(rollout)

    async def next_group(self) -> Group:
        """The next complete group; waits for it."""
        while not self._complete:
            page = await self._client.terminal(run=self._run, after=self._cursor, wait_s=_WAIT_S)
            self._cursor = page.cursor
            for rollout in page.rollouts:
                self._take(rollout)
        task, _, rollouts = self._open.pop(self._complete.pop(0))
        rollouts = sorted(rollouts, key=lambda rollout: rollout.spec.id)
        calls = await self._client.calls([rollout.spec.id for rollout in rollouts])
        return Group(
            task=task,
            rollouts=rollouts,
            calls=[calls.get(rollout.spec.id, []) for rollout in rollouts],
            call_rewards=[await self._earned(rollout.spec.id) for rollout in rollouts if self._earns(rollout)],
        )

    def unfinished(self, group: GroupId) -> Sequence[RolloutId]:
        """Its members that have not ended, as far as is known here."""
        return sorted(self._open[group][1]) if group in self._open else []

    def _earns(self, rollout: Rollout) -> bool:
        return self._call_rewards and rollout.spec.is_train

    async def _earned(self, rollout_id: RolloutId) -> Mapping[CallId, float]:
        """The last word on each call counts."""
        events = await self._client.events(rollout_id, "call_reward")
        return {CallId(event.data["call"]): float(event.data["value"]) for event in events}

    def _take(self, rollout: Rollout) -> None:
        group = rollout.spec.group
        if group is None or group not in self._open:
            return  # taken already, or not ours
        _, waiting, ended = self._open[group]
        if rollout.spec.id in waiting:
            waiting.remove(rollout.spec.id)
            ended.append(rollout)
            if not waiting:
                self._complete.append(group)
