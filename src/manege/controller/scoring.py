"""Run the scorer on what an attempt left, and read its verdict.

A verdict is a finite JSON number, or null for "no verdict", or an object of both `reward` (such a verdict) and `calls`
(finite numbers by the ids of calls of the attempt: what each of them earned). Anything else is never turned into a
number: text, NaN, infinity, booleans and calls that nobody made are the scorer's mistake. A scorer that was killed,
hung or crashed may have been made to by the workspace; whoever calls decides that by scoring a pristine one.
"""

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from manege.controller.environment import system_environment
from manege.controller.folders import AttemptFolders
from manege.controller.record import AttemptRecord
from manege.sandbox.launcher import Launcher
from manege.sandbox.spec import Exit, Limits, ProcessSpec, Program
from manege.types import CallId, Task

__all__ = ["Verdict", "parse_verdict", "score"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What came of scoring."""

    reward: float | None
    """Finite; None: no verdict, or no valid one."""
    call_rewards: Mapping[CallId, float] = field(default_factory=dict)
    """What single calls earned; finite."""
    failure: str | None = None
    """Why the scorer did not come to an end; None: it did."""
    nonsense: str | None = None
    """What was wrong with its verdict; None: nothing."""


async def score(
    launcher: Launcher, program: Program, task: Task, record: AttemptRecord, folders: AttemptFolders, timeout_s: float
) -> Verdict:
    """Raises HarnessError if the scorer cannot be started at all."""
    output = folders.logs / "scorer.txt"
    is_function = isinstance(program, str)
    spec = ProcessSpec(
        program=program,
        role="scorer",
        env=system_environment(home=str(Path.home()), scratch=str(folders.root)),
        # Not the workspace: a Python started there would import what the agent left there.
        cwd=str(folders.root),
        stdout=str(output),
        stderr=str(folders.logs / "scorer_errors.txt"),
        limits=Limits(),
        policy=None,
        stdin=b"" if is_function else _as_json(task, record),
        args=(task, record) if is_function else (),
        replies=is_function,
    )
    ended = await launcher.run(spec, timeout_s)
    failure = _failure(ended, timeout_s, folders)
    if failure is not None:
        return Verdict(reward=None, failure=failure)
    text = ended.reply if is_function else _last_line(output)
    if text is None:
        return Verdict(reward=None, nonsense="the scorer ended without a verdict; return or print a number or null")
    try:
        return parse_verdict(text, {call.id for call in record.calls})
    except ValueError as error:
        return Verdict(reward=None, nonsense=str(error))


def parse_verdict(text: str, call_ids: Collection[CallId]) -> Verdict:
    """`0.5`, `null`, or `{"reward": 0.5, "calls": {"8f…": 1.0}}` with ids among `call_ids`. Raises ValueError for
    anything else."""
    try:
        value: Any = json.loads(text)
    except ValueError:
        value = text
    reward, earned = value, {}
    if isinstance(value, dict) and value.keys() == {"reward", "calls"} and isinstance(value["calls"], dict):
        reward, earned = value["reward"], value["calls"]
    if reward is not None and not _is_finite(reward):
        raise ValueError(
            f"the scorer's verdict is {reward!r}, want a finite number or null (no verdict), "
            "or an object of both `reward` and `calls`"
        )
    for call_id, each in earned.items():
        if not _is_finite(each):
            raise ValueError(f"the scorer's reward of call {call_id!r} is {each!r}, want a finite number")
        if call_id not in call_ids:
            raise ValueError(f"the scorer rewards call {call_id!r}, which this attempt did not make")
    call_rewards = {CallId(call_id): float(each) for call_id, each in earned.items()}
    return Verdict(reward=None if reward is None else float(reward), call_rewards=call_rewards)


def _is_finite(value: Any) -> bool:
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer beyond float64
        return False


def _failure(ended: Exit, timeout_s: float, folders: AttemptFolders) -> str | None:
    see = f"see {folders.logs / 'scorer_errors.txt'}"
    if ended.timed_out:
        return f"the scorer did not end within {timeout_s:g} s (agent.limits.score_s); {see}"
    return None if ended.code == 0 else f"the scorer failed with {ended.how}; {see}"


def _last_line(output: Path) -> str | None:
    lines = output.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), None)


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
