"""From what a cluster showed of an attempt to its outcome, and from a scorer's last message to its verdict. Pure."""

import json
from collections.abc import Collection

from manege.config import LimitsConfig
from manege.controller.kubernetes.manifest import Manifest
from manege.controller.kubernetes.status import OUT_OF_MEMORY, ContainerEnd, Seen
from manege.controller.verdict import Verdict, parse_verdict
from manege.types import CallId, Outcome

__all__ = ["judge_agent", "read_verdict"]

_KILLED = 137
_NOT_FOUND = (126, 127)
"""How a shell says that a command cannot be started."""


def judge_agent(seen: Seen, manifest: Manifest, *, limits: LimitsConfig, num_calls: int) -> tuple[Outcome, str | None]:
    """As for local agents: one that ended by itself is ok, unless it never came to its first model call."""
    agent = seen.agent
    if seen.fault is not None:
        return Outcome.INFRA_ERROR, seen.fault
    if agent is None:
        return _without_end(seen, manifest, num_calls)
    if agent.reason == OUT_OF_MEMORY:
        if not manifest.has_memory_limit:
            return Outcome.INFRA_ERROR, "the agent's node ran out of memory"
        return Outcome.AGENT_ERROR, "the agent went over its limit of memory (agent.limits)"
    code = _exit_code(agent)
    # Times of Kubernetes are whole seconds.
    if manifest.is_timed and code == _KILLED and agent.seconds >= limits.run_s - 1:
        return Outcome.AGENT_TIMEOUT, f"the agent did not end within {limits.run_s:g} s (agent.limits.run_s)"
    if code == 0:
        return Outcome.OK, None
    if num_calls:
        return Outcome.OK, f"the agent ended with exit code {code}"
    if code in _NOT_FOUND:
        return Outcome.INFRA_ERROR, f"the image cannot run the agent's command (exit code {code})"
    return Outcome.AGENT_ERROR, f"the agent crashed before its first model call (exit code {code})"


def read_verdict(seen: Seen, call_ids: Collection[CallId], *, score_s: float) -> Verdict:
    """What the scorer said, or why it said nothing."""
    scorer = seen.scorer
    if scorer is None:
        return _failed(
            "the scorer did not end before its Job's deadline" if seen.out_of_time else "the scorer did not run"
        )
    if scorer.exit_code == _KILLED and scorer.seconds >= score_s - 1:
        return _failed(f"the scorer did not end within {score_s:g} s (agent.limits.score_s)")
    if scorer.exit_code != 0:
        return _failed(f"the scorer failed with exit code {scorer.exit_code} ({scorer.reason})")
    text = next((line.strip() for line in reversed(scorer.message.splitlines()) if line.strip()), None)
    if text is None:
        return _failed("the scorer ended without a verdict; print a number or null as its last line")
    try:
        return parse_verdict(text, call_ids)
    except ValueError as error:
        return _failed(str(error))


def _without_end(seen: Seen, manifest: Manifest, num_calls: int) -> tuple[Outcome, str | None]:
    """The pod does not say how the agent ended."""
    if seen.is_complete:
        return Outcome.OK, None
    # Where its script ends the agent in time, the time before it was too long; else the deadline is the agent's.
    if seen.out_of_time and not manifest.is_timed and (seen.has_begun or num_calls):
        return Outcome.AGENT_TIMEOUT, "the agent did not end before its Job's deadline (activeDeadlineSeconds)"
    why = "its Job came to its deadline before the agent was through" if seen.out_of_time else "the agent did not run"
    return Outcome.INFRA_ERROR, why


def _exit_code(agent: ContainerEnd) -> int:
    """As its script says it, else the container's."""
    try:
        code = json.loads(agent.message)["exit_code"]
    except (ValueError, TypeError, LookupError, RecursionError):
        return agent.exit_code
    return code if agent.exit_code == 0 and isinstance(code, int) else agent.exit_code


def _failed(why: str) -> Verdict:
    return Verdict(reward=None, failure=why)
