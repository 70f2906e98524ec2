"""What a scorer says. Pure.

A verdict is a finite JSON number, or null for "no verdict", or an object of `reward` (such a verdict) and, if it likes,
`calls` (finite numbers by the ids of calls of the attempt: what each of them earned), `message` (a line for people) and
`hacks` (lines: how the agent's work tried to deceive the scorer; they flag the rollout). Anything else is never turned
into a number: text, NaN, infinity, booleans and calls that nobody made are a failure.
"""

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from manege.types import CallId

__all__ = ["Verdict", "parse_verdict"]

_KEYS = frozenset({"reward", "calls", "message", "hacks"})
_MESSAGE_CHARS = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What came of scoring."""

    reward: float | None
    """Finite; None: no verdict, or no valid one."""
    call_rewards: Mapping[CallId, float] = field(default_factory=dict)
    """What single calls earned; finite."""
    message: str | None = None
    """The scorer's own words."""
    hacks: Sequence[str] = ()
    """How the agent's work tried to deceive the scorer, in its words."""
    failure: str | None = None
    """Why the scorer did not come to an end, or what is wrong with what it said; None: nothing."""


def parse_verdict(text: str, call_ids: Collection[CallId]) -> Verdict:
    """`0.5`, `null`, or `{"reward": 0.5, "calls": {"8f…": 1.0}, "message": "2 of 4"}` with ids among `call_ids`. Raises
    ValueError for anything else."""
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError):
        value = text[:_MESSAGE_CHARS]
    reward, earned, message, hacks = value, {}, None, []
    if isinstance(value, dict) and "reward" in value and value.keys() <= _KEYS:
        reward, earned, message = value["reward"], value.get("calls", {}), value.get("message")
        hacks = value.get("hacks", [])
    if reward is not None and not _is_finite(reward):
        raise ValueError(
            f"the scorer's verdict is {reward!r}, want a finite number or null (no verdict), "
            "or an object of `reward` and, if it likes, `calls`, `message` and `hacks`"
        )
    if not isinstance(earned, dict):
        raise ValueError(f"the scorer's `calls` are {earned!r}, want an object of numbers by the ids of calls")
    if not isinstance(message, str | None):
        raise ValueError(f"the scorer's `message` is {message!r}, want a line of text")
    if not isinstance(hacks, list) or not all(isinstance(line, str) for line in hacks):
        raise ValueError(f"the scorer's `hacks` are {hacks!r}, want a list of lines of text")
    for call_id, each in earned.items():
        if not _is_finite(each):
            raise ValueError(f"the scorer's reward of call {call_id!r} is {each!r}, want a finite number")
        if call_id not in call_ids:
            raise ValueError(f"the scorer rewards call {call_id!r}, which this attempt did not make")
    return Verdict(
        reward=None if reward is None else float(reward),
        call_rewards={CallId(call_id): float(each) for call_id, each in earned.items()},
        message=None if message is None else message[:_MESSAGE_CHARS],
        hacks=tuple(line[:_MESSAGE_CHARS] for line in hacks),
    )


def _is_finite(value: Any) -> bool:
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer beyond float64
        return False
