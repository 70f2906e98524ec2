"""Rollouts for verl's trainer: prompts in, rows in verl's queue out, through our gateway and controller.

A prompt of verl's becomes a group: its members are queued at the gateway, the controller runs them, and when the last
one has ended, its rows are put into the queue under `{uid}_{session}_{index}`, and the prompt is marked finished. A
group without a single reward is marked failed: verl's asynchronous trainers replace it, the synchronous one goes on
with fewer rollouts.

Concurrency: all of this runs in one event loop. `start` may be called while `collect` waits; both change the feed
between two awaits only. If `collect` ends, so does the training: what is open is marked failed, since verl's trainer
waits for nothing else, and the next `start` raises what happened.
"""
# pyright: reportMissingImports=false

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig

from manege.cli.parts import FolderLock, controlling, gateway_serving
from manege.cli.services import services_started
from manege.client import Client
from manege.config import RunConfig
from manege.engine.base import Sampling, collect
from manege.errors import TrainerError
from manege.logs import get_logger, kv
from manege.model.folder import open_folder
from manege.sandbox.probe import probe, require
from manege.trainer.collect import Group, GroupFeed, new_nonce
from manege.types import GroupId, RunId
from manege.verl.dataset import row_task
from manege.verl.engine import ClientEngine
from manege.verl.queue import Put
from manege.verl.rows import group_rows
from manege.verl.settings import is_ours

__all__ = ["Prompt", "Rollouts", "rollouts_for"]

_log = get_logger("verl")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A row of verl's dataset, drawn."""

    uid: str
    fields: Mapping[str, Any]
    """Of the dataset, and verl's."""
    is_train: bool
    step: int
    """verl's global step when it was drawn."""
    group_size: int
    temperature: float


class Rollouts:
    """Of one training; see the module."""

    def __init__(self, run: RunConfig, feed: GroupFeed, put: Put) -> None:
        self._run, self._feed, self._put = run, feed, put
        self._nonce = new_nonce()
        self._open: dict[GroupId, Prompt] = {}
        self._failure: BaseException | None = None

    async def start(self, prompts: Sequence[Prompt]) -> None:
        """Queue them. Raises what ended the collecting."""
        for prompt in prompts:
            if self._failure is not None:
                raise TrainerError(f"rollouts have ended: {self._failure}") from self._failure
            group = GroupId(f"{prompt.uid}-{self._nonce}")
            self._open[group] = prompt
            await self._put.mark(prompt, "running")
            await self._feed.start(
                row_task(prompt.fields),
                group=group,
                size=prompt.group_size,
                is_train=prompt.is_train,
                temperature=prompt.temperature,
            )

    async def collect(self) -> None:
        """Until cancelled."""
        try:
            while True:
                group = await self._feed.next_group()
                await self._end(self._open.pop(group.id), group)
        except BaseException as failure:
            self._failure = failure
            if not isinstance(failure, asyncio.CancelledError):
                _log.exception("no rollouts any more")
            for prompt in self._open.values():
                await self._put.mark(prompt, "failure")
            raise

    async def _end(self, prompt: Prompt, group: Group) -> None:
        rows = group_rows(
            group,
            self._run.credit,
            uid=prompt.uid,
            max_tokens=self._run.model.max_context,
            filler_id=self._put.filler_id,
        )
        if not rows:
            reasons = [rollout.message or rollout.outcome for rollout in group.rollouts]
            _log.warning(kv("a group without a reward", task=group.task.id, first_reason=reasons[0]))
            await self._put.mark(prompt, "failure")
            return
        await self._put.rows(prompt, rows)
        await self._put.mark(prompt, "finished")


@asynccontextmanager
async def rollouts_for(config: DictConfig, run: RunConfig, client: Any) -> AsyncIterator[Rollouts]:
    """Gateway and controller, as long as the context lasts. `client`: verl's, of its inference servers."""
    for line in require(run.sandbox, probe()).missing():
        _log.warning(kv("sandbox", missing=line))
    async with AsyncExitStack() as stack:
        stack.enter_context(FolderLock(run.run_folder))
        run = await stack.enter_async_context(services_started(run))
        folder = open_folder(run.model.path)
        limit = min(filter(None, [folder.context_limit, run.model.max_context]))
        engine = ClientEngine(client, model=folder.name, context_limit=limit)
        filler_id = min(folder.eos_ids, default=0)
        # The first answer of all waits for verl's balancer to start: no agent's time, and a broken server is seen here.
        await collect(engine.generate([filler_id], Sampling(max_new_tokens=1)))
        server = await stack.enter_async_context(
            gateway_serving(run.gateway, folder, {"verl": engine}, run.run_folder, max_context=run.model.max_context)
        )
        _log.info(kv("gateway", url=server.url, folder=run.run_folder))
        gateway = await stack.enter_async_context(Client(server.url, server.key))
        await gateway.resume()
        cursor = await _begin(gateway, run)
        await stack.enter_async_context(controlling(gateway, run))
        feed = GroupFeed(
            gateway,
            RunId(run.name),
            cursor=cursor,
            reward_from=run.scorer.reward_from,
            max_attempts=run.controller.max_attempts,
            call_rewards=run.credit.advantage == "returns",
        )
        put = Put(ours=is_ours(config), filler_id=filler_id)
        rollouts = Rollouts(run, feed, put)
        collecting = asyncio.create_task(rollouts.collect(), name="collect groups")
        try:
            yield rollouts
        finally:
            collecting.cancel()
            await asyncio.wait({collecting})


async def _begin(gateway: Client, run: RunConfig) -> int:
    """Nobody waits for what an earlier training left open. Returns where the feed of ended rollouts begins."""
    name = RunId(run.name)
    await gateway.put_run(name, run.to_json())
    for rollout in await gateway.open_rollouts(name):
        await gateway.cancel(rollout.spec.id)
    return (await gateway.terminal(run=name, after=0, limit=1)).num_ended
