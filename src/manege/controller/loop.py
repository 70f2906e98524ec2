"""The controller: claims rollouts of a gateway and has them carried out, as many at once as the engine has room for.

Four tasks share the leases and the running attempts; all of them live in one event loop and change that state only
between awaits. `claim` waits at the gateway for work, `renew` prolongs leases and learns which are lost, `reconcile`
starts and kills what `plan` says, `adapt` looks at the engine and moves the number of slots within its bounds (a claim
that waits meanwhile still brings what it asked for). An attempt's lease is held until its end is posted. Cancelling
`run` kills all agents at once and gives the leases back; nothing is posted for them, so another controller makes new
attempts of them. Attempts of a lasting runner go on instead, and the next controller of that name takes up what is
leased to it before it claims more.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from manege.client import Claim, Client
from manege.config import ControllerConfig, RunConfig, SandboxConfig, parse_config
from manege.controller.concurrency import Concurrency
from manege.controller.folders import remove_left_over
from manege.controller.local import LocalRunner
from manege.controller.plan import Actions, Lease, plan, retry_after_s
from manege.controller.reach import RETRY_S, reach
from manege.controller.runner import LastingRunner, Runner
from manege.errors import (
    ConfigError,
    ConflictError,
    HarnessError,
    ManegeError,
    NotFoundError,
    SandboxError,
    StoreError,
    UnavailableError,
)
from manege.logs import get_logger, kv
from manege.sandbox.launcher import Launcher
from manege.sandbox.probe import probe, require
from manege.store.base import Ending
from manege.types import Outcome, RolloutId, RunId

__all__ = ["Controller"]

_CLAIM_WAIT_S = 20.0
"""One long poll; the gateway answers at once when there is work."""
_RENEW_EVERY_S = 2.0
"""At most: a cancelled rollout's agent is dead soon after."""

_log = get_logger("controller")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    claim: Claim
    lease: Lease


class Controller:
    """`await run()` until cancelled."""

    def __init__(
        self,
        client: Client,
        *,
        name: str,
        folder: Path,
        config: ControllerConfig,
        sandbox: SandboxConfig,
        runner: Runner | None = None,
        terminal: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`name`: unique among the controllers of a gateway. `folder`: for this one alone. `runner`: None for processes
        of this machine. `terminal`: see LocalRunner. Raises SandboxError if they cannot isolate agents here."""
        self._client = client
        self._name = name
        self._config = config
        self._clock = clock
        self._launcher = Launcher()
        self._runner = runner or LocalRunner(
            launcher=self._launcher,
            client=client,
            folder=folder.absolute(),
            layers=require(sandbox, probe()),
            keep_workspaces=config.keep_workspaces,
            terminal=terminal,
        )
        self._lasting = runner if isinstance(runner, LastingRunner) else None
        self._held: dict[RolloutId, _Held] = {}
        self._running: dict[RolloutId, tuple[int, asyncio.Task[None]]] = {}
        self._killed: set[asyncio.Task[None]] = set()
        self._runs: dict[RunId, RunConfig] = {}
        self._reading = asyncio.Lock()
        self._changed = asyncio.Event()
        self._concurrency = Concurrency(lower=config.min_slots, upper=config.slots)
        self._renew_every_s = min(_RENEW_EVERY_S, config.lease_s / 4)

    async def prepare(self, config: RunConfig) -> None:
        """Start the warm parents of a run before it begins. Raises HarnessError for a program that cannot start."""
        await self._runner.prepare(config)

    async def run(self) -> None:
        """Until cancelled. Raises ManegeError for what no repetition can mend, such as a wrong key."""
        try:
            await asyncio.to_thread(remove_left_over, self._runner.folder)
            await self._adopt()
            async with asyncio.TaskGroup() as group:
                group.create_task(self._claim_forever(), name="claim rollouts")
                group.create_task(self._renew_forever(), name="renew leases")
                group.create_task(self._reconcile_forever(group), name="reconcile attempts")
                group.create_task(self._adapt_forever(), name="adapt slots")
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from failures
        finally:
            await self._release()
            await self._launcher.close()
            if self._lasting is not None:
                await self._lasting.close()

    async def _adopt(self) -> None:
        """Go on with what this controller had when it was stopped."""
        if self._lasting is None:
            return
        claims = await reach(lambda: self._client.held(controller=self._name, lease_s=self._config.lease_s))
        self._hold(claims)
        await self._lasting.adopt(claims)

    def _hold(self, claims: Sequence[Claim]) -> None:
        ends_s = self._clock() + self._config.lease_s
        for claim in claims:
            lease = Lease(attempt=claim.rollout.attempt, ends_s=ends_s)
            self._held[claim.rollout.spec.id] = _Held(claim=claim, lease=lease)

    async def _claim_forever(self) -> None:
        while True:
            free = self._plan().num_claim
            if free == 0:
                await self._change()
                continue
            claims = await reach(
                lambda free=free: self._client.claim(
                    controller=self._name,
                    limit=free,
                    lease_s=self._config.lease_s,
                    wait_s=_CLAIM_WAIT_S,
                    holding=list(self._held),
                )
            )
            self._hold(claims)
            self._notify()

    async def _renew_forever(self) -> None:
        while True:
            await asyncio.sleep(self._renew_every_s)
            due = {key: self._held[key] for key in self._plan().renew}
            if not due:
                continue
            asked_s = self._clock()
            lost = await reach(
                lambda due=due: self._client.renew(
                    controller=self._name, rollout_ids=list(due), lease_s=self._config.lease_s
                )
            )
            for key, held in due.items():
                # Meanwhile it may have ended, or have been claimed anew: then this answer is not about what is held.
                if self._held.get(key) is not held:
                    continue
                if key in lost:
                    _log.info(kv("rollout lost", rollout_id=key, attempt=held.lease.attempt))
                    del self._held[key]
                else:
                    lease = replace(held.lease, ends_s=asked_s + self._config.lease_s)
                    self._held[key] = replace(held, lease=lease)
            self._notify()

    async def _reconcile_forever(self, group: asyncio.TaskGroup) -> None:
        while True:
            actions = self._plan()
            for key in actions.kill:
                task = self._running[key][1]
                if not task.cancelling():  # a second cancellation would cut its cleaning up short
                    self._killed.add(task)
                    task.cancel()
            for key in actions.start:
                claim = self._held[key].claim
                task = group.create_task(self._attempt(claim), name=f"attempt of {key}")
                self._running[key] = (claim.rollout.attempt, task)
            await self._change(timeout_s=self._renew_every_s)

    async def _adapt_forever(self) -> None:
        while True:
            await asyncio.sleep(self._renew_every_s)
            try:
                state = await self._client.state()
            except (UnavailableError, StoreError):  # said by those who cannot do without
                continue
            if "engine" not in state:  # a gateway that does not know
                continue
            self._adapt(state["engine"], paused=state["paused"])

    def _adapt(self, engine: Mapping[str, Any], *, paused: bool) -> None:
        before = self._concurrency.limit
        seen = {name: engine[name] for name in ("running", "waiting", "cache_usage")}
        self._concurrency.observe(**seen, num_attempts=len(self._held.keys() | self._running.keys()), paused=paused)
        if (now := self._concurrency.limit) == before:
            return
        if now < before or now == self._config.slots:
            _log.info(kv("attempts at once", limit=now, before=before, **seen))
        self._notify()

    async def _attempt(self, claim: Claim) -> None:
        key = claim.rollout.spec.id
        try:
            ending = await self._carry_out(claim)
            await self._post(claim, ending)
            if key in self._held and self._held[key].claim is claim:
                del self._held[key]
            await self._discard(claim)
        except asyncio.CancelledError:
            if asyncio.current_task() in self._killed:
                await self._discard(claim)
            raise
        finally:
            self._killed.discard(self._running.pop(key)[1])
            self._notify()

    async def _discard(self, claim: Claim) -> None:
        if self._lasting is not None:
            await self._lasting.discard(claim)

    async def _carry_out(self, claim: Claim) -> Ending:
        try:
            config = await self._run_config(claim.rollout.spec.run)
        except (ConfigError, HarnessError, NotFoundError, SandboxError, UnavailableError, StoreError) as error:
            return Ending(outcome=Outcome.INFRA_ERROR, message=str(error))
        return await self._runner.run(claim, config)

    async def _post(self, claim: Claim, ending: Ending) -> None:
        rollout = claim.rollout
        ending = replace(ending, retry_after_s=retry_after_s(rollout.attempt, self._config.retry_s))
        try:
            await reach(lambda: self._client.finish(rollout.spec.id, rollout.attempt, ending))
        except (ConflictError, NotFoundError) as error:  # cancelled, taken over or deleted meanwhile
            _log.info(kv("end not posted", rollout_id=rollout.spec.id, error=error))

    async def _run_config(self, run_id: RunId) -> RunConfig:
        """Read once per run, whose programs are then made ready."""
        async with self._reading:
            if run_id not in self._runs:
                run = await self._client.get_run(run_id)
                config = parse_config(dict(run.config), source=f"config of run {run_id!r}")
                await self._runner.prepare(config)
                self._runs[run_id] = config
            return self._runs[run_id]

    def _plan(self) -> Actions:
        return plan(
            {key: held.lease for key, held in self._held.items()},
            {key: attempt for key, (attempt, _) in self._running.items()},
            now_s=self._clock(),
            slots=self._concurrency.limit,
            renew_before_s=self._config.lease_s - self._renew_every_s / 2,
        )

    async def _change(self, timeout_s: float | None = None) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()

    def _notify(self) -> None:
        """Wake all that wait in `_change`."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _release(self) -> None:
        """Give the rollouts back, if the gateway is still there."""
        if not self._held or self._lasting is not None:
            return
        with contextlib.suppress(ManegeError, TimeoutError):
            async with asyncio.timeout(RETRY_S):
                await self._client.renew(controller=self._name, rollout_ids=list(self._held), lease_s=0)
