"""The glossary as types: Run, Task, Group, Rollout, Attempt, Call, Sample, PolicyVersion.

Pure data, frozen. Nothing here does I/O or imports a framework, so that every other module may import it.
Times are seconds since the epoch (`_s`). Token ids and log-probabilities are numpy arrays (int32, float32).
Shape legend: T tokens of one sequence, P prompt tokens, R sampled (response) tokens, G rollouts of a group.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, NewType

import numpy as np
import numpy.typing as npt

__all__ = [
    "REFUSED_REWARD",
    "TERMINAL",
    "TRANSITIONS",
    "Call",
    "CallId",
    "Delivered",
    "EngineWire",
    "Event",
    "FinishReason",
    "FloatArray",
    "GroupId",
    "IntArray",
    "JsonObject",
    "Outcome",
    "PolicyVersion",
    "Rollout",
    "RolloutId",
    "RolloutSpec",
    "RolloutState",
    "RunId",
    "Task",
    "VersionSpan",
]

RunId = NewType("RunId", str)
GroupId = NewType("GroupId", str)
RolloutId = NewType("RolloutId", str)
CallId = NewType("CallId", str)
PolicyVersion = NewType("PolicyVersion", int)

JsonObject = Mapping[str, Any]
IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
EngineWire = Literal["vllm", "sglang"]
"""How an engine elsewhere takes token ids; `manege engine` speaks vLLM's wire."""

REFUSED_REWARD = "policy.reward"
"""Type of the event that an agent posted a reward, where nobody takes its word."""


class RolloutState(StrEnum):
    """Where a rollout is; the last three are terminal and reached only after scoring."""

    QUEUING = "queuing"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


TERMINAL = frozenset({RolloutState.SUCCEEDED, RolloutState.FAILED, RolloutState.CANCELLED})

TRANSITIONS: Mapping[RolloutState, frozenset[RolloutState]] = {
    RolloutState.QUEUING: frozenset({RolloutState.RUNNING, RolloutState.FAILED, RolloutState.CANCELLED}),
    # Back to queuing: the controller lost the attempt to an infrastructure failure and another one is allowed.
    RolloutState.RUNNING: frozenset(
        {RolloutState.QUEUING, RolloutState.SUCCEEDED, RolloutState.FAILED, RolloutState.CANCELLED}
    ),
    RolloutState.SUCCEEDED: frozenset(),
    RolloutState.FAILED: frozenset(),
    RolloutState.CANCELLED: frozenset(),
}


class Outcome(StrEnum):
    """Why a rollout ended. State, default reward, baseline and loss follow from it (docs/concepts/rollouts.md)."""

    OK = "ok"
    AGENT_ERROR = "agent_error"
    AGENT_TIMEOUT = "agent_timeout"
    INFRA_ERROR = "infra_error"
    CANCELLED = "cancelled"

    @property
    def state(self) -> RolloutState:
        """The terminal state of a rollout with this outcome."""
        if self is Outcome.OK:
            return RolloutState.SUCCEEDED
        return RolloutState.CANCELLED if self is Outcome.CANCELLED else RolloutState.FAILED

    @property
    def default_reward(self) -> float | None:
        """The reward when the scorer gave none; None means no verdict, which is not 0."""
        return 0.0 if self in (Outcome.AGENT_ERROR, Outcome.AGENT_TIMEOUT) else None

    @property
    def counts(self) -> bool:
        """Whether a rollout with this outcome and a reward is in the baseline and in the loss."""
        return self not in (Outcome.INFRA_ERROR, Outcome.CANCELLED)


class Delivered(StrEnum):
    """Whether the agent got the whole answer. Unknown: we died before we could tell."""

    YES = "yes"
    NO = "no"
    UNKNOWN = "unknown"


class FinishReason(StrEnum):
    """Why the engine stopped sampling."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One row of a dataset."""

    id: str
    """Unique within its dataset; the same id is the same task in every run."""
    input: JsonObject
    """What the agent may see: mapped to its environment and written to its task file."""
    hidden: JsonObject = field(default_factory=dict)
    """What only setup and scorer may see."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSpec:
    """What the trainer asks for."""

    id: RolloutId
    """Chosen by the caller, so that creation is idempotent."""
    run: RunId
    task: Task
    group: GroupId | None = None
    """Rollouts of one group are compared with each other; None: it stands alone (evaluation)."""
    is_train: bool = True
    temperature: float | None = None
    """The sampling temperature that the gateway fixes; None keeps what the agent asks for (validation only)."""
    reward_from: str = "scorer"
    """`scorer`: the controller posts the verdict; `agent`: the agent may post its own `reward` event."""
    max_attempts: int = 2
    """Attempts in all, the first one included. A new one follows only an infrastructure failure."""
    metadata: JsonObject = field(default_factory=dict)
    """Kept and given back, never read by us."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """A rollout as the store knows it."""

    spec: RolloutSpec
    state: RolloutState
    attempt: int
    """The current or last attempt, from 0."""
    outcome: Outcome | None = None
    """Set exactly when the state is terminal."""
    reward: float | None = None
    """A finite number, or None: no verdict."""
    message: str | None = None
    """One line for people: why it failed."""
    evidence: JsonObject = field(default_factory=dict)
    """What the controller saw: exit code, seconds per stage, sandbox layers, num_calls; plain JSON."""
    created_s: float
    started_s: float | None = None
    ended_s: float | None = None
    completion: int | None = None
    """Position in the order of completion; the cursor of the terminal feed. None until terminal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """From `first_token` of the response on, tokens were sampled under `version`, until the next span."""

    first_token: int
    version: PolicyVersion
    old_cache: bool = False
    """Over keys and values that older weights had computed (`train.inflight = "keep"`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One model request of an agent and its answer."""

    id: CallId
    rollout_id: RolloutId
    attempt: int
    parent: CallId | None
    """The call whose prompt + response this prompt starts with, when the gateway continued it; else None."""
    protocol: str
    """`chat`, `completions`, `responses`, `anthropic` or `gemini`."""
    mode: str
    """`train` or `val`."""
    prompt_ids_P: IntArray
    response_ids_R: IntArray
    logprobs_R: FloatArray
    """Of softmax(logits / temperature), of the sampled tokens."""
    spans: Sequence[VersionSpan]
    temperature: float
    finish_reason: FinishReason
    delivered: Delivered
    request: JsonObject
    """The caller's body, `messages` and `tools` canonical; a continued call keeps only what its parent lacks."""
    reply: JsonObject
    """The assistant message (chat) or `{"text": ...}` (completions) that was answered."""
    overridden: JsonObject = field(default_factory=dict)
    """Sampling settings of the caller that the gateway replaced, with the caller's values."""
    thread: str = "main"
    """`main`, `agent:<id>` (a sub-agent) or `side:<kind>` (a title, a summary ...: docs/concepts/gateway.md)."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Of the request, lower case, without keys and what every HTTP client sends."""
    edits: Sequence[str] = ()
    """What filters took out of the request, and what its protocol left out of it; one line each."""
    constrained: bool = False
    """Sampled under a grammar, so it is not what the policy would have said: never trained."""
    routed_experts: str | None = None
    """Of a mixture of experts, base64 of a .npy file, (N, layers, experts per token): of the last N of its tokens but
    the very last, all that its parent does not have. None: the engine did not tell."""
    flaw: str | None = None
    """Why the engine's token ids cannot be used; then the arrays are empty, and the call is never trained."""
    created_s: float
    ended_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A line of a rollout's log: reward, user-defined, or ours (`policy.violation`, `late.call`, ...)."""

    rollout_id: RolloutId
    attempt: int
    event_type: str
    data: JsonObject
    timestamp_s: float
