"""Run a scorer on a workspace, in a sandbox of its own, and read its verdict.

In: a task, what is known of an attempt, a finished workspace and a pristine one. Out: a verdict. The scorer works on a
view (`view.py`) that goes afterwards, with a home of its own; home and scratch of the agent are not there. A function
answers by what it returns, over a descriptor that no program which it starts has. A command answers by the last line
that it prints; where one of its words is `{verdict}`, which becomes a number, it writes that line to the descriptor of
that number instead: programs that run the agent's code need not have it (Python starts none with it, in a shell
`3>&-` takes it away), so they cannot answer in its place.
"""

import asyncio
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from manege.config import RunConfig
from manege.controller.agent_process import limits_of
from manege.controller.environment import fill_from, system_environment
from manege.controller.folders import AttemptFolders
from manege.controller.record import AttemptRecord
from manege.controller.verdict import Verdict, parse_verdict
from manege.controller.view import View, make_view
from manege.sandbox import uids
from manege.sandbox.launcher import Launcher
from manege.sandbox.layers import Layers
from manege.sandbox.policy import Policy
from manege.sandbox.spec import REPLY, Exit, ProcessSpec, Seen
from manege.types import Task

__all__ = ["Scored", "Scorer"]

_VERDICT = "{verdict}"
_PYTHON = {"PYTHONNOUSERSITE": "1", "PYTHONDONTWRITEBYTECODE": "1", "PIP_CONFIG_FILE": os.devnull}
"""Nothing is read from, or left in, where the agent could have written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """One look of a scorer at one workspace."""

    verdict: Verdict
    changed: Sequence[str] = ()
    """What the agent had changed of what `scorer.restore` names."""
    seen: Sequence[Seen] = ()
    """What the scorer's process tree, in which the agent's code may run, tried in vain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scorer:
    """Scores on this machine."""

    launcher: Launcher
    layers: Layers
    private: Sequence[Path]
    """What stays unreadable: the run folder."""

    async def score(
        self,
        config: RunConfig,
        task: Task,
        record: AttemptRecord,
        folders: AttemptFolders,
        finished: Sequence[Path],
        pristine: Sequence[Path],
    ) -> Scored:
        """`finished`, `pristine`: workspaces as layers, the topmost first. What is wrong with them, or comes of them,
        is the verdict's failure. Raises HarnessError if the scorer cannot be started at all."""
        own = folders.root / "scorer"
        if own.exists():  # left by one that was killed
            await asyncio.to_thread(shutil.rmtree, own, ignore_errors=True)
        own.mkdir(mode=0o700)
        try:
            view = await asyncio.to_thread(self._view, config, task, own, folders, finished, pristine)
            ended, text = await self._run(config, task, record, view, own, folders)
        except (OSError, RecursionError) as error:
            return Scored(verdict=Verdict(reward=None, failure=f"the workspace cannot be scored: {error}"))
        finally:
            await asyncio.shield(asyncio.to_thread(shutil.rmtree, own, ignore_errors=True))
        verdict = _verdict(ended, text, config.agent.limits.score_s, folders.logs, record)
        return Scored(verdict=verdict, changed=view.changed, seen=ended.seen)

    def _view(
        self,
        config: RunConfig,
        task: Task,
        own: Path,
        folders: AttemptFolders,
        finished: Sequence[Path],
        pristine: Sequence[Path],
    ) -> View:
        fields = {**task.input, **task.hidden}
        files = {
            path: fill_from(text, fields, setting=f"scorer.files.{path}", source="the task")
            for path, text in config.scorer.files.items()
        }
        place = folders.workspace if self.layers.overlay else None
        return make_view(own, finished, pristine, place=place, restore=config.scorer.restore, files=files)

    async def _run(
        self, config: RunConfig, task: Task, record: AttemptRecord, view: View, own: Path, folders: AttemptFolders
    ) -> tuple[Exit, str | None]:
        """Its end, and what it said."""
        home, scratch, output = own / "home", own / "scratch", folders.logs / "scorer.txt"
        for path in (home, scratch):
            path.mkdir(mode=0o700)
        if folders.uid is not None:
            await asyncio.to_thread(uids.own, [str(own)], folders.uid)
        record = replace(record, workspace=view.place)
        program, tasks = config.scorer.run, config.tasks
        is_function = isinstance(program, str)
        answers_apart = is_function or any(_VERDICT in word for word in program)
        spec = ProcessSpec(
            program=program if is_function else [word.replace(_VERDICT, str(REPLY)) for word in program],
            role="scorer",
            env={
                **system_environment(home=str(home), scratch=str(scratch)),
                **_PYTHON,
                "MANEGE_WORKSPACE": str(view.place),
            },
            # Not the workspace: a Python started there would import what the agent left there.
            cwd=str(scratch),
            stdout=str(output),
            stderr=str(folders.logs / "scorer_errors.txt"),
            # It may start any program, and some reserve address space without end.
            limits=limits_of(config.agent.limits, javascript=True),
            policy=Policy(
                layers=self.layers,
                writable=[str(path) for path in (view.place, home, scratch)],
                readable=config.scorer.readable,
                private=[*map(str, self.private), *(path for path in (tasks.train, tasks.heldout) if path)],
                tcp_ports=[],
                protected_pids=[os.getpid()],
                host_network=config.scorer.network,
                uid=folders.uid,
            ),
            overlay=view.overlay,
            stdin=b"" if is_function else _as_json(task, record),
            args=(task, record) if is_function else (),
            replies=answers_apart,
        )
        ended = await self.launcher.run(spec, config.agent.limits.score_s)
        return ended, ended.reply if answers_apart else _last_line(output.read_text("utf-8", "replace"))


def _verdict(ended: Exit, text: str | None, timeout_s: float, logs: Path, record: AttemptRecord) -> Verdict:
    see = f"see {logs / 'scorer_errors.txt'}"
    if ended.timed_out:
        failure = f"the scorer did not end within {timeout_s:g} s (agent.limits.score_s); {see}"
    elif ended.limit is not None:
        failure = f"the scorer went over its limit of {ended.limit} (agent.limits); {see}"
    elif ended.code != 0:
        failure = f"the scorer failed with {ended.how}; {see}"
    elif text is None or (last := _last_line(text)) is None:
        failure = "the scorer ended without a verdict; return or print a number or null"
    else:
        try:
            return parse_verdict(last, {call.id for call in record.calls})
        except ValueError as error:
            failure = str(error)
    return Verdict(reward=None, failure=failure)


def _last_line(text: str) -> str | None:
    return next((line.strip() for line in reversed(text.split("\n")) if line.strip()), None)


def _as_json(task: Task, record: AttemptRecord) -> bytes:
    """For a command: what a function gets as arguments, less the token arrays."""
    calls = [{"id": call.id, "request": call.request, "reply": call.reply} for call in record.calls]
    attempt = {
        "workspace": str(record.workspace),
        "stdout": record.stdout,
        "stderr": record.stderr,
        "exit_code": record.exit_code,
        "timed_out": record.timed_out,
        "calls": calls,
    }
    return json.dumps({"task": asdict(task), "attempt": attempt}).encode()
