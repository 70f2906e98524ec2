"""From what was seen of an agent to the outcome of its attempt (the table of docs/concepts/rollouts.md). Pure."""

from manege.controller.record import AttemptRecord
from manege.controller.verdict import Verdict
from manege.sandbox.spec import Exit
from manege.types import Outcome

__all__ = ["judge_agent", "judge_score"]


def judge_agent(ended: Exit, record: AttemptRecord, *, run_s: float) -> tuple[Outcome, str | None]:
    """An agent that ended by itself is ok, whatever its exit code, unless it never came to its first model call."""
    if ended.timed_out:
        return Outcome.AGENT_TIMEOUT, f"the agent did not end within {run_s:g} s (agent.limits.run_s)"
    if ended.limit is not None:
        return Outcome.AGENT_ERROR, f"the agent went over its limit of {ended.limit} (agent.limits)"
    if ended.code == 0:
        return Outcome.OK, None
    if not record.calls:
        last_words = record.stderr.strip().rpartition("\n")[2] or "nothing on stderr"
        return Outcome.AGENT_ERROR, f"the agent crashed before its first model call ({ended.how}): {last_words[:500]}"
    return Outcome.OK, f"the agent ended with {ended.how}"


def judge_score(
    outcome: Outcome, message: str | None, verdict: Verdict, control: Verdict | None
) -> tuple[Outcome, str | None]:
    """`control`: the verdict on a pristine workspace, asked for when there was none on this one. If there is one, this
    workspace is to blame; else the scorer is, and the rollout says nothing about the agent."""
    if verdict.failure is None:
        return outcome, "; ".join(filter(None, (message, verdict.message))) or None
    if control is None or control.failure is not None:
        return Outcome.INFRA_ERROR, f"{verdict.failure}; the same on a pristine workspace"
    worse = Outcome.AGENT_ERROR if outcome is Outcome.OK else outcome
    return worse, f"{verdict.failure}; not so on a pristine workspace"
