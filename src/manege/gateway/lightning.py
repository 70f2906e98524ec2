"""Rollouts, events and calls in Agent Lightning's shapes; pure.

Its rollouts get the run `default` and post their own reward; what it sends and we have no word for (runner config, its
metadata) is kept in `spec.metadata[KEPT]` and given back. `cancelled` reads as `failed` there. Calls and
verdicts are not events of ours: they are shown as `model_request` and `reward` events, as its trainer reads them.
"""

import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from manege.store.base import TerminalPage
from manege.types import (
    Call,
    Event,
    FinishReason,
    JsonObject,
    Rollout,
    RolloutId,
    RolloutSpec,
    RolloutState,
    RunId,
    Task,
)

__all__ = [
    "Create",
    "Patch",
    "StatusPatch",
    "events_view",
    "rollout_view",
    "terminal_view",
    "to_spec",
    "triplets",
]

KEPT = "agent_lightning"
"""Only written here, so that it can be read without checks."""
ROLLOUT_ID_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,199}$"
"""Ids stand in paths, keys and file names."""


class Create(BaseModel):
    """A rollout to be queued."""

    input: Any
    is_train: bool = True
    config: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    rollout_id: str | None = Field(default=None, pattern=ROLLOUT_ID_PATTERN)


class StatusPatch(BaseModel):
    """What a controller reports."""

    model_config = ConfigDict(extra="forbid")

    state: Literal["queuing", "running", "succeeded", "failed"] | None = None
    k8s_job_name: str | None = None
    last_attempt_id: str | None = None
    error_message: str | None = None


class Patch(BaseModel):
    """The only part of a rollout that may be patched."""

    status: StatusPatch | None = None


def to_spec(create: Create) -> RolloutSpec:
    """A rollout of run `default` whose agent posts its reward."""
    rollout_id = RolloutId(create.rollout_id or uuid.uuid4().hex)
    is_object = isinstance(create.input, dict)
    kept = {"config": create.config or {}, "metadata": create.metadata or {}, "is_object": is_object}
    return RolloutSpec(
        id=rollout_id,
        run=RunId("default"),
        task=Task(
            id=_data_id(create.input) or rollout_id, input=create.input if is_object else {"input": create.input}
        ),
        is_train=create.is_train,
        reward_from="agent",
        metadata={KEPT: kept},
    )


def rollout_view(rollout: Rollout) -> dict[str, Any]:
    """A rollout with its nested status object."""
    spec = rollout.spec
    kept = spec.metadata.get(KEPT, {"config": {}, "metadata": dict(spec.metadata), "is_object": True})
    started = rollout.started_s is not None
    return {
        "rollout_id": spec.id,
        "input": spec.task.input if kept["is_object"] else spec.task.input["input"],
        "is_train": spec.is_train,
        "config": {"timeout_seconds": 3600, "local": None, "k8s": None} | kept["config"],
        "metadata": {"batch_idx": None, "sample_idx_in_batch": None} | kept["metadata"],
        "status": {
            "state": state_view(rollout.state),
            "k8s_job_name": rollout.evidence.get("k8s_job_name"),
            "last_attempt_id": str(rollout.attempt) if started else None,
            "error_message": rollout.message,
            "version": 1 + started + (rollout.ended_s is not None),
            "created_at": rollout.created_s,
            "updated_at": rollout.ended_s or rollout.started_s or rollout.created_s,
        },
    }


def terminal_view(page: TerminalPage) -> dict[str, Any]:
    """A page of the terminal feed."""
    items = [
        {
            "rollout_id": rollout.spec.id,
            "state": state_view(rollout.state),
            "data_id": _data_id(rollout.spec.task.input),
            "is_train": rollout.spec.is_train,
        }
        for rollout in page.rollouts
    ]
    return {"items": items, "next_after": page.cursor, "total_terminal": page.num_ended}


def state_view(state: RolloutState) -> str:
    """Agent Lightning knows no `cancelled`."""
    return RolloutState.FAILED if state is RolloutState.CANCELLED else state


def events_view(rollout: Rollout, events: Sequence[Event], calls: Sequence[Call], model: str) -> list[dict[str, Any]]:
    """The log of the last attempt in the order of time: events, calls, and the verdict that a scorer gave."""
    shown = [(event.event_type, event.timestamp_s, event.data) for event in events if event.attempt == rollout.attempt]
    shown += [("model_request", call.ended_s, _model_request(call, model)) for call in calls]
    if rollout.reward is not None and rollout.spec.reward_from == "scorer" and rollout.ended_s is not None:
        verdict = {"value": rollout.reward, "message": rollout.message, "source": "scorer"}
        shown.append(("reward", rollout.ended_s, verdict))
    views = [_view(rollout.spec.id, rollout.attempt, *values) for values in shown]
    return sorted(views, key=lambda view: view["timestamp"])


def event_view(event: Event) -> dict[str, Any]:
    """One event."""
    return _view(event.rollout_id, event.attempt, event.event_type, event.timestamp_s, event.data)


def triplets(views: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Events cut down to what training needs. Of requests with the same prompt only the last stays."""
    cut = [{**view, "data": _cut(view["event_type"], view["data"])} for view in views]
    last = {tuple(view["data"]["prompt_token_ids"]): view for view in cut if view["event_type"] == "model_request"}
    kept = {id(view) for view in last.values()}
    return [view for view in cut if view["event_type"] != "model_request" or id(view) in kept]


def _cut(event_type: str, data: JsonObject) -> JsonObject:
    if event_type == "reward":
        return {key: data.get(key) for key in ("value", "source", "reason") if key == "value" or key in data}
    if event_type != "model_request":
        return data
    choice = data["response"]["choices"][0]
    return {
        "prompt_token_ids": data["response"]["prompt_token_ids"],
        "response_token_ids": choice["token_ids"],
        "response_log_probs": _logprobs(choice["logprobs"]),
        "server": {"model": data["server"]["model"], "version": data["server"]["version"]},
        "http_status": data["http_status"],
        "status": data["status"],
    }


def _logprobs(shown: JsonObject) -> list[float]:
    return shown["token_logprobs"] if "token_logprobs" in shown else [item["logprob"] for item in shown["content"]]


def _view(rollout_id: str, attempt: int, event_type: str, timestamp_s: float, data: JsonObject) -> dict[str, Any]:
    return {
        "event_type": event_type,
        "rollout_id": rollout_id,
        "attempt_id": str(attempt),
        "timestamp": timestamp_s,
        "data": data,
    }


def _model_request(call: Call, model: str) -> dict[str, Any]:
    version = call.spans[-1].version if call.spans else None
    prompt_ids, response_ids, logprobs = (
        array.tolist() for array in (call.prompt_ids_P, call.response_ids_R, call.logprobs_R)
    )
    num_prompt, num_sampled = len(prompt_ids), len(response_ids)
    usage = {"prompt_tokens": num_prompt, "completion_tokens": num_sampled, "total_tokens": num_prompt + num_sampled}
    finish_reason = "length" if call.finish_reason is FinishReason.LENGTH else "stop"
    choice = {"index": 0, "finish_reason": finish_reason, "token_ids": response_ids}
    if call.protocol == "completions":
        kind = "text_completion"
        choice |= {**call.reply, "prompt_token_ids": prompt_ids, "logprobs": {"token_logprobs": logprobs}}
    else:
        kind = "chat.completion"
        pairs = zip(response_ids, logprobs, strict=True)
        content = [{"token": f"token_id:{token}", "logprob": logprob} for token, logprob in pairs]
        choice |= {"message": call.reply, "logprobs": {"content": content}}
    response = {"id": call.id, "object": kind, "created": int(call.created_s), "model": model, "choices": [choice]}
    return {
        "model": model,
        "model_version": version,
        "request": call.request,
        "response": response | {"prompt_token_ids": prompt_ids, "usage": usage},
        "server": {"model": model, "endpoint": "", "version": version},
        "latency_ms": (call.ended_s - call.created_s) * 1000,
        "http_status": 200,
        "status": "ok",
        "retry_count": 0,
        "usage": usage,
        "finish_reason": finish_reason,
    }


def _data_id(given: Any) -> str:
    return str(given.get("data_id") or given.get("instance_id") or "") if isinstance(given, Mapping) else ""
