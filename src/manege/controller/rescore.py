"""Score rollouts that have ended anew, with the scorer that their run has now, and keep the new verdicts.

In: rollouts, what their attempts left in the run folder (logs, and the workspace where it was kept), their calls from
the gateway. Out: for each, as it is now, or why it is as it was. Any number at once; the agent is never run again.
"""

import asyncio
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from manege.client import Client
from manege.config import RunConfig
from manege.controller.folders import log_folder, make_folders
from manege.controller.judging import Finished
from manege.controller.local import LocalRunner
from manege.controller.record import AttemptRecord
from manege.errors import ManegeError
from manege.types import TERMINAL, Outcome, Rollout

__all__ = ["Rescored", "rescore"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rescored:
    """One rollout."""

    before: Rollout
    after: Rollout
    """The same as before where it was not scored."""
    skipped: str | None = None
    """Why it was not; None: it was."""


async def rescore(
    runner: LocalRunner,
    client: Client,
    config: RunConfig,
    rollouts: Sequence[Rollout],
    *,
    answers: bool,
    num_at_once: int,
) -> Sequence[Rescored]:
    """In the order of `rollouts`. `answers`: the scorer reads only calls and output, so that rollouts whose
    workspace was not kept can be scored, on an empty one."""
    scorer = hashlib.sha256(json.dumps(config.scorer.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()
    slots = asyncio.Semaphore(num_at_once)

    async def one(rollout: Rollout) -> Rescored:
        async with slots:
            return await _one(runner, client, config, rollout, scorer=scorer[:16], answers=answers)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(each), name=f"rescore {each.spec.id}") for each in rollouts]
    return [task.result() for task in tasks]


async def _one(
    runner: LocalRunner, client: Client, config: RunConfig, rollout: Rollout, *, scorer: str, answers: bool
) -> Rescored:
    logs = log_folder(runner.folder, rollout)
    workspace, outcome = logs / "left" / "workspace", _agent_outcome(rollout)
    reason = _missing(rollout, outcome, logs, None if answers else workspace)
    if outcome is None or reason is not None:
        return Rescored(before=rollout, after=rollout, skipped=reason)
    folders = make_folders(runner.folder, rollout, suffix=".rescore")
    try:
        finished = Finished(
            record=await _record(client, rollout, logs, timed_out=outcome is Outcome.AGENT_TIMEOUT),
            folders=folders,
            layers=[workspace if workspace.is_dir() else folders.workspace],
            outcome=outcome,
            message=rollout.evidence.get("agent_message"),
        )
        judgement = await runner.score(rollout, config, finished)
        if judgement.outcome is Outcome.INFRA_ERROR:
            return Rescored(before=rollout, after=rollout, skipped=judgement.message)
        after = await client.rescore(rollout.spec.id, rollout.attempt, judgement.ending({}), scorer=scorer)
        return Rescored(before=rollout, after=after)
    except (ManegeError, OSError) as error:
        return Rescored(before=rollout, after=rollout, skipped=str(error))
    finally:
        await asyncio.shield(asyncio.to_thread(folders.remove))


def _agent_outcome(rollout: Rollout) -> Outcome | None:
    """Of the agent's run alone, before any scorer; None: there is none to be scored."""
    if rollout.state not in TERMINAL or rollout.outcome is Outcome.CANCELLED:
        return None
    noted = rollout.evidence.get("agent_outcome", rollout.outcome)
    return None if noted == Outcome.INFRA_ERROR else Outcome(noted)


def _missing(rollout: Rollout, outcome: Outcome | None, logs: Path, workspace: Path | None) -> str | None:
    """What the scorer would lack; None: nothing."""
    if outcome is None:
        return f"it is {rollout.state}, and no agent came to its end: {rollout.message or 'it has no message'}"
    if not (logs / "stdout.txt").is_file():
        return f"what its agent printed is not in {logs} (any more)"
    if workspace is not None and not workspace.is_dir():
        return (
            "its workspace was not kept (controller.keep_workspaces = true keeps those of later rollouts); "
            "if the scorer reads only calls and output, add --answers"
        )
    return None


async def _record(client: Client, rollout: Rollout, logs: Path, *, timed_out: bool) -> AttemptRecord:
    calls = await client.calls([rollout.spec.id])
    return AttemptRecord(
        workspace=logs,  # a scorer is told where it finds its own view
        stdout=(logs / "stdout.txt").read_text(encoding="utf-8", errors="replace"),
        stderr=(logs / "stderr.txt").read_text(encoding="utf-8", errors="replace"),
        exit_code=rollout.evidence.get("exit_code"),
        timed_out=timed_out,
        calls=calls.get(rollout.spec.id, []),
    )
