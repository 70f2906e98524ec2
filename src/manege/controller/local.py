"""Carry out one attempt on this machine: setup, run, score, cleanup, each with its own budget.

In: a claim and its run's config. Out: an Ending; what programs, disks or the gateway do wrong is an outcome, never an
exception. The scorer starts when every process of the agent is dead. Cancelling `run` kills what runs and cleans up.
"""

import math
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path

from manege.client import Claim, Client
from manege.config import RunConfig
from manege.controller.agent_process import agent_process
from manege.controller.engine_failure import check_engine
from manege.controller.folders import AttemptFolders
from manege.controller.hacks import hack_events, report_hacks
from manege.controller.judging import Finished, Judgement, judge
from manege.controller.launch import find_program
from manege.controller.outcome import judge_agent
from manege.controller.record import AttemptRecord
from manege.controller.scoring import Scorer
from manege.controller.shell import in_terminal
from manege.controller.site import Site, Sites
from manege.controller.sockets import answering
from manege.controller.workspaces.cache import Workspaces
from manege.errors import ManegeError
from manege.sandbox.launcher import Launcher
from manege.sandbox.layers import Layers
from manege.sandbox.probe import require
from manege.sandbox.spec import Exit
from manege.store.base import Ending
from manege.types import REFUSED_REWARD, JsonObject, Outcome, Rollout

__all__ = ["LocalRunner"]

_PRELOAD = ("manege.controller.record",)
"""What the arguments of setup and scorer functions are made of."""
_TAIL_CHARS = 2000
"""Of stdout and stderr each, kept in the rollout's evidence."""


class LocalRunner:
    """Runs attempts as processes of this machine, any number at once."""

    def __init__(
        self,
        *,
        launcher: Launcher,
        client: Client,
        folder: Path,
        layers: Layers,
        keep_workspaces: bool,
        terminal: str | None = None,
    ) -> None:
        """`folder`: of the run. `layers`: what to enforce on agents. `terminal`: path of a pseudo-terminal where
        somebody sits, for a shell that takes the agent's place."""
        self.folder, self._terminal = folder, terminal
        self._launcher, self._client, self._layers = launcher, client, layers
        workspaces = Workspaces(folder / "prepared", launcher)
        self._sites = Sites(
            launcher=launcher, folder=folder, layers=layers, workspaces=workspaces, keep=keep_workspaces
        )

    async def prepare(self, config: RunConfig) -> None:
        """Start the warm parents of a run's programs. Raises HarnessError for one that cannot be started, SandboxError
        for a run that wants more isolation than there is here."""
        if config.sandbox.mode == "strict":
            require(config.sandbox, self._layers)
        await self._launcher.check(find_program(config.agent), role="agent")
        if config.agent.setup is not None:
            await self._launcher.check(config.agent.setup, role="setup", preload=_PRELOAD)
        if config.scorer.reward_from == "scorer":
            await self._launcher.check(config.scorer.run, role="scorer", preload=_PRELOAD)

    async def run(self, claim: Claim, config: RunConfig) -> Ending:
        """The whole attempt."""
        seconds: dict[str, float] = {}
        layers = self._layers
        evidence = {"sandbox": layers.names(), "not_isolated": layers.missing(), "seconds": seconds}
        try:
            async with AsyncExitStack() as stack:
                with _timed(seconds, "setup"):
                    site = await stack.enter_async_context(self._sites.make(claim.rollout, config))
                with _timed(seconds, "run"):
                    ended = await self._run_agent(claim, config, site)
                record = await self._record(claim.rollout, ended, site.folders)
                evidence |= _evidence(ended, record)
                if ended.limit is None:
                    await check_engine(self._client, claim.rollout, record.calls, has_failed=ended.code != 0)
                outcome, message = judge_agent(ended, record, run_s=config.agent.limits.run_s)
                if claim.rollout.spec.reward_from != "scorer":
                    evidence |= await self._report(claim.rollout, ended, None)
                    return Ending(outcome=outcome, message=message, evidence=evidence)
                finished = Finished(
                    record=record, folders=site.folders, layers=site.layers, outcome=outcome, message=message
                )
                evidence |= {"agent_outcome": outcome, "agent_message": message}
                with _timed(seconds, "score"):
                    judgement = await self.score(claim.rollout, config, finished)
                evidence |= await self._report(claim.rollout, ended, judgement)
                return judgement.ending(evidence)
        except (ManegeError, OSError) as error:
            return Ending(outcome=Outcome.INFRA_ERROR, message=str(error), evidence=evidence)

    async def _run_agent(self, claim: Claim, config: RunConfig, site: Site) -> Exit:
        spec = await agent_process(
            claim,
            config,
            site.folders,
            client=self._client,
            layers=self._layers,
            private=[self.folder],
            overlay=site.overlay,
        )
        await self._sites.give(site)
        async with answering(self._client, claim) as answer:
            if self._terminal is not None:
                return await self._launcher.run(in_terminal(spec, self._terminal), math.inf, on_listener=answer)
            return await self._launcher.run(spec, config.agent.limits.run_s, on_listener=answer)

    async def _record(self, rollout: Rollout, ended: Exit, folders: AttemptFolders) -> AttemptRecord:
        calls = await self._client.calls([rollout.spec.id])
        return AttemptRecord(
            workspace=folders.workspace,
            stdout=_text(folders.logs / "stdout.txt"),
            stderr=_text(folders.logs / "stderr.txt"),
            exit_code=ended.code,
            timed_out=ended.timed_out,
            calls=calls.get(rollout.spec.id, []),
        )

    async def score(self, rollout: Rollout, config: RunConfig, finished: Finished) -> Judgement:
        """What an attempt that has ended is worth; also long after, on what was kept of it."""
        scorer = Scorer(launcher=self._launcher, layers=self._layers, private=[self.folder])
        return await judge(scorer, rollout, config, finished, lambda: self._pristine(rollout, config))

    @asynccontextmanager
    async def _pristine(
        self, rollout: Rollout, config: RunConfig
    ) -> AsyncIterator[tuple[AttemptFolders, Sequence[Path]]]:
        """A workspace that no agent has touched, as layers."""
        async with self._sites.make(rollout, config, suffix=".control") as site:
            await self._sites.give(site)
            yield site.folders, site.layers

    async def _report(self, rollout: Rollout, ended: Exit, judgement: Judgement | None) -> JsonObject:
        """What agent and workspace tried in vain, as events; returns what belongs into the evidence."""
        if judgement is None:
            events = hack_events(agent=ended.seen, num_left=ended.num_left)
        else:
            posted = await self._client.events(rollout.spec.id, event_type=REFUSED_REWARD)
            events = hack_events(
                agent=ended.seen,
                changed=judgement.changed,
                scorer=judgement.seen,
                told=judgement.verdict.hacks,
                failure=None if judgement.is_final else judgement.verdict.failure,
                num_left=ended.num_left,
                num_posted=sum(event.attempt == rollout.attempt for event in posted),
            )
        return await report_hacks(self._client, rollout, events)


@contextmanager
def _timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    began_s = time.monotonic()
    try:
        yield
    finally:
        seconds[stage] = round(time.monotonic() - began_s, 3)


def _evidence(ended: Exit, record: AttemptRecord) -> dict[str, object]:
    return {
        "exit_code": ended.code,
        "signal": ended.signal,
        "cpu_s": round(ended.cpu_seconds, 3),
        "num_left": ended.num_left,
        "num_calls": len(record.calls),
        "stdout_tail": record.stdout[-_TAIL_CHARS:],
        "stderr_tail": record.stderr[-_TAIL_CHARS:],
    }


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")
