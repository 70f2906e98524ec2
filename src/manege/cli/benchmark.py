"""`manege eval --benchmark`: one rollout per row, what the agent changed as a prediction, and the official evaluation.

The patch of a rollout is what its agent left of the workspace, against what that began with; or, where the workspace
is in a pod or already gone, the last event `model_patch` (`{"patch": "..."}`) that the agent posted. predictions.jsonl
has a line per row as soon as its rollout has ended, so what is there is not done again after a crash. A rollout lost to
the infrastructure has none, and is tried again the next time.
"""

import argparse
import asyncio
import hashlib
import json
import shlex
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from manege.cli import swebench
from manege.cli.arguments import connect, read_run
from manege.cli.evaluating import feeding
from manege.cli.parts import FolderLock, check_agents
from manege.client import Client
from manege.config import RunConfig
from manege.controller.folders import log_folder, remove_folder
from manege.controller.workspaces.patch import patch_of
from manege.errors import ConfigError
from manege.sandbox.launcher import Launcher
from manege.trainer.collect import GroupFeed, new_nonce
from manege.trainer.durable import sync, write_text
from manege.trainer.evaluate import wilson
from manege.trainer.repeated import repeated
from manege.types import Outcome, Rollout, RunId, Task

__all__ = ["execute_benchmark"]

_EVENT = "model_patch"


async def execute_benchmark(arguments: argparse.Namespace, console: Console) -> None:
    """Predict all rows, then have them judged or say how. Raises ConfigError."""
    benchmark, rows = arguments.benchmark, swebench.load_rows(arguments.benchmark, arguments.rows)
    if arguments.samples != 1:
        raise ConfigError(f"--samples {arguments.samples}: a benchmark takes one prediction per row")
    elsewhere = connect(arguments) if arguments.gateway else None
    config = _config(read_run(arguments), benchmark, elsewhere is not None)
    tasks = [swebench.task_of(row) for row in rows]
    if elsewhere is None:
        check_agents(config, tasks, console)
    lost = 0
    with FolderLock(config.run_folder):
        predictions = _Predictions(config, benchmark)
        async with AsyncExitStack() as stack:
            launcher = Launcher()
            stack.push_async_callback(launcher.close)
            client, run, feed = await stack.enter_async_context(feeding(config, elsewhere))
            agents = _Agents(
                client=client, run=run, feed=feed, config=config, launcher=launcher, is_here=elsewhere is None
            )
            waiting = [task for task in tasks if task.id not in predictions.patches]
            async for rollout, patch in agents.predict(waiting, predictions.name):
                if patch is None:
                    lost += 1
                    console.print(f"{rollout.spec.task.id}: lost, {rollout.message}", highlight=False, soft_wrap=True)
                else:
                    predictions.add(rollout.spec.task.id, patch)
        found = _found(predictions, benchmark, len(rows), lost)
        console.print(_said(found), highlight=False, soft_wrap=True)
        found |= await _judge(arguments, predictions, len(rows), console)
    if arguments.json:
        print(json.dumps(found))


def _found(predictions: "_Predictions", benchmark: str, num_rows: int, num_lost: int) -> dict[str, Any]:
    patches = predictions.patches.values()
    return {
        "benchmark": benchmark,
        "num_rows": num_rows,
        "num_predictions": len(patches),
        "num_empty": sum(not patch for patch in patches),
        "num_lost": num_lost,
        "predictions": str(predictions.path),
    }


def _said(found: Mapping[str, Any]) -> str:
    lost = f"; {found['num_lost']} were lost to the infrastructure: run again for them" if found["num_lost"] else ""
    return (
        f"{found['predictions']}: {found['num_predictions']} of {found['num_rows']} rows, "
        f"{found['num_empty']} of them with no change{lost}"
    )


def _config(config: RunConfig, benchmark: str, elsewhere: bool) -> RunConfig:
    """Nothing is scored here, and workspaces are kept until their patch is taken."""
    if config.agent.setup is not None and not elsewhere:
        raise ConfigError(
            "agent.setup would be part of every patch: prepare workspaces with agent.workspace.setup for a benchmark"
        )
    if config.agent.workspace is None and not elsewhere:
        raise ConfigError(
            "agent.workspace is not set: a benchmark's agents work on the row's repository, for example "
            'agent.workspace = { source = "https://github.com/{repo}", commit = "{base_commit}" }'
        )
    folder = config.folder or Path("runs", f"{config.name}-{benchmark}").absolute()
    return config.model_copy(
        update={
            "folder": folder,
            "scorer": config.scorer.model_copy(update={"reward_from": "agent"}),
            "controller": config.controller.model_copy(update={"keep_workspaces": True}),
        }
    )


class _Predictions:
    """predictions.jsonl: what the package `swebench` reads."""

    def __init__(self, config: RunConfig, benchmark: str) -> None:
        """Raises ConfigError where the folder has those of another model or agent."""
        self.path = config.run_folder / "predictions.jsonl"
        self.model = f"{config.name}-{Path(config.model.path).name}"
        self.patches: dict[str, str] = {}
        settings = config.model_dump(mode="json", include={"model", "sampling", "agent"})
        settings |= {"benchmark": benchmark, "temperature": config.evaluation.temperatures[0]}
        self.name = f"{benchmark}-{hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]}"
        known = config.run_folder / "benchmark.json"
        if known.exists() and json.loads(known.read_text(encoding="utf-8")) != settings:
            raise ConfigError(
                f"{config.run_folder} has predictions of another model, agent or benchmark ({known}); "
                "choose another folder with folder=..."
            )
        write_text(known, json.dumps(settings, indent=1))
        if self.path.exists():
            whole = [line for line in self.path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
            self.path.write_bytes(b"".join(whole))  # without what a crash left half
            self.patches = {row["instance_id"]: row["model_patch"] for row in map(json.loads, whole)}

    def add(self, instance_id: str, patch: str) -> None:
        """One line, on the disk."""
        self.patches[instance_id] = patch
        row = {"instance_id": instance_id, "model_name_or_path": self.model, "model_patch": patch}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        sync(self.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Agents:
    """Who makes predictions."""

    client: Client
    run: RunId
    feed: GroupFeed
    config: RunConfig
    launcher: Launcher
    is_here: bool
    """Whether workspaces are kept here."""

    async def predict(self, tasks: Sequence[Task], name: str) -> AsyncIterator[tuple[Rollout, str | None]]:
        """Rollouts as they end, with their patches; None: lost. What an earlier life had under way is given up."""
        for rollout in await self.client.open_rollouts(self.run):
            if (rollout.spec.group or "").startswith(f"{name}-"):
                await self.client.cancel(rollout.spec.id)
        groups = repeated(
            self.feed,
            tasks,
            name=f"{name}-{new_nonce()}",
            size=1,
            temperature=self.config.evaluation.temperatures[0],
            slots=self.config.controller.slots,
        )
        async for group in groups:
            rollout = group.rollouts[0]
            yield rollout, None if rollout.outcome is Outcome.INFRA_ERROR else await self._patch(rollout)

    async def _patch(self, rollout: Rollout) -> str:
        if events := await self.client.events(rollout.spec.id, _EVENT):
            return str(events[-1].data.get("patch") or "")
        if not self.is_here:
            return ""
        kept = log_folder(self.config.run_folder, rollout) / "left"
        assert self.config.agent.workspace is not None
        patch = await patch_of(
            self.launcher,
            self.config.run_folder / "prepared",
            self.config.agent.workspace,
            rollout.spec.task,
            kept / "workspace",
            timeout_s=self.config.agent.limits.setup_s,
        )
        await asyncio.to_thread(remove_folder, kept)
        return patch


async def _judge(
    arguments: argparse.Namespace, predictions: _Predictions, num_rows: int, console: Console
) -> Mapping[str, Any]:
    """Have the official evaluation run, or say what it lacks and how it is run."""
    folder, run_id = predictions.path.parent, predictions.name
    command = swebench.evaluation_command(arguments.benchmark, arguments.rows, predictions.path, run_id=run_id)
    if lack := await swebench.missing():
        console.print(f"{lack}; where it is, run:\n{shlex.join(command)}", highlight=False, soft_wrap=True)
        return {"command": command}
    await swebench.run_evaluation(command, folder)
    num_resolved = swebench.read_report(folder, model=predictions.model, run_id=run_id)["resolved_instances"]
    low, high = wilson(num_resolved, num_rows)
    console.print(f"resolved {num_resolved / num_rows:.1%} ({low:.0%} to {high:.0%}, n = {num_rows})", highlight=False)
    return {"num_resolved": num_resolved, "low": low, "high": high}
