"""A trainer in this process against a real gateway, as often as it is started anew, and agents that do not think.

The gateway's engine is scripted and answers the same prompt always alike; an agent's prompt names its task, its group
and its member, and its reward is made from the answers. So a training does not depend on what ends first.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx

from manege.client import Claim
from manege.config import parse_config
from manege.engine.scripted import hashed_reply
from manege.errors import ManegeError
from manege.model.folder import open_folder
from manege.model.load import load_model
from manege.store.base import Ending
from manege.trainer.engines.torch import TorchEngine
from manege.trainer.loop import Trainer
from manege.types import Outcome, RolloutSpec, Task

FOLDER = open_folder(str(Path(__file__).parent / "tiny" / "model"))
NUM_TASKS = 4
LETTERS = hashed_reply(num_tokens=4, first_id=64, last_id=89)
"""Answers in the tiny model's letters."""


def run_config(folder, *, credit=None, evaluation=None, **train):
    settings = {"steps": 10, "groups": 2, "group_size": 3, "learning_rate": 1e-3, "warmup_steps": 4}
    return parse_config(
        {
            "name": folder.name,
            "folder": str(folder),
            "tasks": {"train": "none"},
            "agent": {"run": ["none"]},
            "scorer": {"run": ["none"]},
            "credit": credit or {},
            "train": settings | {"checkpoint_every": 2} | train,
            "evaluation": {"every": 3, "num_interim": 2} | (evaluation or {}),
        }
    )


class Stopped(Exception):
    """As a process is, from one moment to the next."""


class Watcher:
    """An Observer that stops the trainer when it is (`where`, at a step); in a group: after so many rollouts."""

    def __init__(self, where=None, step=None, *, after=1):
        self.stop_at, self.after = (where, step), after
        self.num_steps, self.num_rollouts, self.phase, self.stopped = 0, 0, "", asyncio.Event()

    def on_phase(self, phase):
        self.phase, self.num_rollouts = phase.split()[0], 0
        self.stop_if(self.phase, self.num_steps + (self.phase != "evaluating"))

    def on_row(self, row):
        if row["kind"] == "step":
            self.num_steps += 1
            self.stop_if("checkpointing", self.num_steps)

    def on_rollout(self):
        self.num_rollouts += 1
        here = (self.phase, self.num_rollouts) == ("collecting", self.after)
        if here and self.stop_at == ("in a group", self.num_steps + 1):
            self.stopped.set()

    def stop_if(self, *at):
        if at == self.stop_at:
            raise Stopped


def new_trainer(client, config, watcher, *, resume=False, engine=None):
    return Trainer(
        config,
        client,
        engine or TorchEngine(load_model(FOLDER), FOLDER, config.train),
        watcher,
        train_tasks=[Task(id=f"t{index}", input={}) for index in range(NUM_TASKS)],
        heldout_tasks=[Task(id=f"h{index}", input={}) for index in range(3)],
        clock=lambda: 0.0,
        decode=FOLDER.decode,
        resume=resume,
    )


async def live(client, config, watcher, *, resume, engine=None):
    """One life of a trainer; returns its rows if it came to its end."""
    run = asyncio.create_task(new_trainer(client, config, watcher, resume=resume, engine=engine).run())
    stopped = asyncio.create_task(watcher.stopped.wait())
    await asyncio.wait([run, stopped], return_when=asyncio.FIRST_COMPLETED)
    for task in (run, stopped):
        task.cancel()
    with contextlib.suppress(Stopped, asyncio.CancelledError):
        return await run


def asked(rollout_id):
    """The part of an id that does not tell one run from another."""
    return rollout_id.partition("-")[2]


def by_words(_spec, words):
    """A reward that hangs on what was sampled."""
    return sum(word < "n" for word in words) / 2


def by_member(spec, _words):
    """A reward that differs within every group, so that every step has a gradient."""
    return float(spec.id.endswith("-0"))


async def carry_out(http, client, claim: Claim, between: Callable[[RolloutSpec], Awaitable[None]], reward):
    """One agent: a call, whatever is `between`, a call, and its reward."""
    spec, words = claim.rollout.spec, []
    for number in range(2):
        prompt = f"{spec.task.id} {asked(spec.id)} {number}"
        body = {"model": "tiny", "messages": [{"role": "user", "content": prompt}], "max_tokens": 4}
        key = {"authorization": f"Bearer {claim.agent_key}"}
        answer = await http.post("/v1/chat/completions", json=body, headers=key)
        if answer.status_code == 409:  # cancelled
            return
        words.append(answer.json()["choices"][0]["message"]["content"])
        if number == 0:
            await between(spec)
    with contextlib.suppress(ManegeError):  # cancelled meanwhile
        await client.finish(spec.id, claim.rollout.attempt, Ending(outcome=Outcome.OK, reward=reward(spec, words)))


async def at_once(_spec):
    """An agent that uses no tool."""


@contextlib.asynccontextmanager
async def agents(client, *watchers, between=at_once, reward=by_words, slots=1):
    """At work as long as the context lasts, `slots` at once; they do not care whether there is a trainer."""

    async def work(http, number):
        while True:
            for claim in await client.claim(controller=f"c{number}", limit=1, lease_s=60, wait_s=1):
                await carry_out(http, client, claim, between, reward)
                for watcher in watchers:
                    watcher.on_rollout()

    async with httpx.AsyncClient(base_url=client.url, timeout=60, limits=httpx.Limits(max_connections=None)) as http:
        tasks = [asyncio.create_task(work(http, number)) for number in range(slots)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)


async def lives(client, config, *stops):
    """Rows of a training that was stopped so often."""
    watchers = [Watcher(*stop) for stop in stops] + [Watcher()]
    async with agents(client, *watchers):
        for number, watcher in enumerate(watchers):
            rows = await live(client, config, watcher, resume=number > 0)
            assert (rows is None) == (number < len(stops)), f"not stopped: {watcher.stop_at}"
        return rows


def of_steps(rows):
    return [row for row in rows if row["kind"] == "step"]
