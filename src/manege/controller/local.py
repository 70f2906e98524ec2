"""Carry out one attempt on this machine: setup, run, score, cleanup, each with its own budget.

In: a claim and its run's config. Out: an Ending; what programs, disks or the gateway do wrong is an outcome, never an
exception. The scorer starts when every process of the agent is dead. Cancelling `run` kills what runs and cleans up.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from manege.client import Claim, Client
from manege.config import AgentConfig, RunConfig
from manege.controller.agent_process import agent_process
from manege.controller.environment import system_environment
from manege.controller.folders import AttemptFolders, make_folders, whole_task
from manege.controller.judging import Finished, Judgement, judge
from manege.controller.launch import find_program
from manege.controller.outcome import judge_agent
from manege.controller.record import AttemptRecord
from manege.controller.scoring import Scorer
from manege.errors import EngineError, HarnessError, ManegeError, UnavailableError
from manege.logs import get_logger, kv
from manege.sandbox.launcher import Launcher
from manege.sandbox.layers import Layers
from manege.sandbox.spec import Exit, Limits, ProcessSpec
from manege.store.base import Ending
from manege.types import Delivered, Outcome, Rollout

__all__ = ["LocalRunner"]

_PRELOAD = ("manege.controller.record",)
"""What the arguments of setup and scorer functions are made of."""
_TAIL_CHARS = 2000
"""Of stdout and stderr each, kept in the rollout's evidence."""

_log = get_logger("controller")


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRunner:
    """Runs attempts as processes of this machine, any number at once."""

    launcher: Launcher
    client: Client
    folder: Path
    """The run folder."""
    layers: Layers
    """What to enforce on agents."""
    readable: Sequence[str]
    """What agents may read beside system, interpreter and their own code."""
    keep_workspaces: bool

    async def prepare(self, config: RunConfig) -> None:
        """Start the warm parents of a run's programs. Raises HarnessError for one that cannot be started."""
        await self.launcher.check(find_program(config.agent), role="agent")
        if config.agent.setup is not None:
            await self.launcher.check(config.agent.setup, role="setup", preload=_PRELOAD)
        if config.scorer.reward_from == "scorer":
            await self.launcher.check(config.scorer.run, role="scorer", preload=_PRELOAD)

    async def run(self, claim: Claim, config: RunConfig) -> Ending:
        """The whole attempt."""
        seconds: dict[str, float] = {}
        evidence = {"sandbox": self.layers.names(), "not_isolated": self.layers.missing(), "seconds": seconds}
        try:
            async with self._folders(claim.rollout, config.agent) as folders:
                with _timed(seconds, "setup"):
                    await self._set_up(claim.rollout, config.agent, folders)
                with _timed(seconds, "run"):
                    ended = await self._run_agent(claim, config, folders)
                record = await self._record(claim.rollout, ended, folders)
                evidence |= _evidence(ended, record)
                await self._check_engine(claim.rollout, ended, record)
                budget_s = config.agent.limits.run_s
                outcome, message = judge_agent(ended, record, run_s=budget_s)
                if claim.rollout.spec.reward_from != "scorer":
                    return Ending(outcome=outcome, message=message, evidence=evidence)
                finished = Finished(
                    record=record, folders=folders, layers=[folders.workspace], outcome=outcome, message=message
                )
                evidence |= {"agent_outcome": outcome, "agent_message": message}
                with _timed(seconds, "score"):
                    judgement = await self.score(claim.rollout, config, finished)
                return judgement.ending(evidence)
        except (ManegeError, OSError) as error:
            return Ending(outcome=Outcome.INFRA_ERROR, message=str(error), evidence=evidence)

    @asynccontextmanager
    async def _folders(
        self, rollout: Rollout, agent: AgentConfig, *, suffix: str = ""
    ) -> AsyncIterator[AttemptFolders]:
        folders = make_folders(self.folder, rollout, suffix=suffix)
        try:
            yield folders
        finally:
            if self.keep_workspaces:
                folders.keep()
            else:
                await _remove(folders, agent.limits.cleanup_s)

    async def _set_up(self, rollout: Rollout, agent: AgentConfig, folders: AttemptFolders) -> None:
        """Raises HarnessError if the setup program fails: that is not the agent's fault."""
        if agent.setup is None:
            return
        task, log = rollout.spec.task, folders.logs / "setup.txt"
        folders.hidden_task_file.write_text(whole_task(task), encoding="utf-8")
        spec = ProcessSpec(
            program=agent.setup,
            role="setup",
            env={
                **system_environment(home=str(Path.home()), scratch=str(folders.scratch)),
                "MANEGE_ROLLOUT_ID": rollout.spec.id,
                "MANEGE_TASK_FILE": str(folders.hidden_task_file),
            },
            cwd=str(folders.workspace),
            stdout=str(log),
            stderr=str(log),
            limits=Limits(),
            policy=None,
            args=(task, folders.workspace),
        )
        ended = await self.launcher.run(spec, agent.limits.setup_s)
        folders.hidden_task_file.unlink(missing_ok=True)
        if ended.timed_out:
            raise HarnessError(f"the setup did not end within {agent.limits.setup_s:g} s (agent.limits.setup_s)")
        if ended.code != 0:
            raise HarnessError(f"the setup failed with {ended.how}: {_tail(log).strip() or 'it printed nothing'}")

    async def _run_agent(self, claim: Claim, config: RunConfig, folders: AttemptFolders) -> Exit:
        spec = await agent_process(
            claim,
            config,
            folders,
            client=self.client,
            layers=self.layers,
            readable=self.readable,
            private=[self.folder],
        )
        return await self.launcher.run(spec, config.agent.limits.run_s)

    async def _record(self, rollout: Rollout, ended: Exit, folders: AttemptFolders) -> AttemptRecord:
        calls = await self.client.calls([rollout.spec.id])
        return AttemptRecord(
            workspace=folders.workspace,
            stdout=_text(folders.logs / "stdout.txt"),
            stderr=_text(folders.logs / "stderr.txt"),
            exit_code=ended.code,
            timed_out=ended.timed_out,
            calls=calls.get(rollout.spec.id, []),
        )

    async def _check_engine(self, rollout: Rollout, ended: Exit, record: AttemptRecord) -> None:
        """Raises EngineError or UnavailableError when engine, gateway or store failed the last call of an agent that
        came to a bad end or to nothing: such an attempt says nothing about the agent."""
        answered = [call for call in record.calls if call.delivered is not Delivered.NO]
        if ended.limit is not None or (ended.code == 0 and answered):
            return
        failures = await self.client.events(rollout.spec.id, "call.error")
        answered_s = max((call.ended_s for call in answered), default=rollout.started_s or 0.0)
        if failures and failures[-1].timestamp_s > answered_s:
            raise EngineError(f"the engine failed the agent's last model call: {failures[-1].data.get('message')}")
        if (await self.client.state())["recorded_since_s"] > answered_s:
            raise UnavailableError(
                "the gateway or its store was away after the agent's last answered call; its log has the reason"
            )

    async def score(self, rollout: Rollout, config: RunConfig, finished: Finished) -> Judgement:
        """What an attempt that has ended is worth; also long after, on what was kept of it."""
        scorer = Scorer(launcher=self.launcher, layers=self.layers, private=[self.folder])
        return await judge(scorer, rollout, config, finished, lambda: self._pristine(rollout, config))

    @asynccontextmanager
    async def _pristine(
        self, rollout: Rollout, config: RunConfig
    ) -> AsyncIterator[tuple[AttemptFolders, Sequence[Path]]]:
        """A workspace that no agent has touched, as layers."""
        async with self._folders(rollout, config.agent, suffix=".control") as folders:
            await self._set_up(rollout, config.agent, folders)
            yield folders, [folders.workspace]


@contextmanager
def _timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    began_s = time.monotonic()
    try:
        yield
    finally:
        seconds[stage] = round(time.monotonic() - began_s, 3)


async def _remove(folders: AttemptFolders, timeout_s: float) -> None:
    try:
        await asyncio.wait_for(asyncio.to_thread(folders.remove), timeout_s)
    except TimeoutError:
        _log.warning(kv("workspace still being removed", folder=folders.root, after_s=timeout_s))


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


def _tail(path: Path) -> str:
    return _text(path)[-_TAIL_CHARS:]
