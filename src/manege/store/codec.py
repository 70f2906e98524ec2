"""Glossary types to JSON and back, for the disk and for our own HTTP API.

Token ids and log-probabilities travel as base64 of little-endian int32 and float32. Pure: no database, no sockets.
"""

import base64
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
from pydantic import TypeAdapter

from manege.errors import ProtocolError
from manege.store.base import Run, TerminalPage
from manege.types import (
    Call,
    CallId,
    Delivered,
    FinishReason,
    FloatArray,
    IntArray,
    JsonObject,
    Rollout,
    RolloutId,
    RolloutSpec,
    VersionSpan,
)

__all__ = [
    "ROLLOUT",
    "ROLLOUTS",
    "RUN",
    "SPEC",
    "SPECS",
    "TERMINAL_PAGE",
    "call_record",
    "decode_call",
    "dumps",
    "encode_call",
    "floats",
    "ids",
    "make_call",
]

ROLLOUT = TypeAdapter(Rollout)
ROLLOUTS = TypeAdapter(list[Rollout])
RUN = TypeAdapter(Run)
SPEC = TypeAdapter(RolloutSpec)
SPECS = TypeAdapter(list[RolloutSpec])
TERMINAL_PAGE = TypeAdapter(TerminalPage)

_IDS, _FLOATS = np.dtype("<i4"), np.dtype("<f4")


def dumps(value: Any) -> str:
    """JSON text. Raises ProtocolError for what JSON cannot say."""
    try:
        return orjson.dumps(value).decode()
    except orjson.JSONEncodeError as error:
        raise ProtocolError(f"not representable as JSON: {error}") from error


def ids(blob: bytes) -> IntArray:
    """Token ids of a blob."""
    return np.frombuffer(blob, _IDS)


def floats(blob: bytes) -> FloatArray:
    """Log-probabilities of a blob."""
    return np.frombuffer(blob, _FLOATS)


def call_record(call: Call) -> dict[str, Any]:
    """What a call holds beside its arrays, ids and delivery."""
    return {
        "protocol": call.protocol,
        "mode": call.mode,
        "spans": [[span.first_token, span.version] for span in call.spans],
        "temperature": call.temperature,
        "finish_reason": call.finish_reason,
        "request": call.request,
        "reply": call.reply,
        "overridden": call.overridden,
        "created_s": call.created_s,
        "ended_s": call.ended_s,
    }


def make_call(
    record: JsonObject,
    *,
    call_id: str,
    rollout_id: str,
    attempt: int,
    parent: str | None,
    delivered: str,
    prompt_ids_P: IntArray,
    response_ids_R: IntArray,
    logprobs_R: FloatArray,
) -> Call:
    """The reverse of `call_record`."""
    return Call(
        **{
            **record,
            "spans": [VersionSpan(first_token=first, version=version) for first, version in record["spans"]],
            "finish_reason": FinishReason(record["finish_reason"]),
        },
        id=CallId(call_id),
        rollout_id=RolloutId(rollout_id),
        attempt=attempt,
        parent=CallId(parent) if parent is not None else None,
        delivered=Delivered(delivered),
        prompt_ids_P=prompt_ids_P,
        response_ids_R=response_ids_R,
        logprobs_R=logprobs_R,
    )


def encode_call(call: Call) -> dict[str, Any]:
    """A call for the wire."""
    return {
        "id": call.id,
        "rollout_id": call.rollout_id,
        "attempt": call.attempt,
        "parent": call.parent,
        "delivered": call.delivered,
        "prompt_ids": _base64(call.prompt_ids_P, _IDS),
        "response_ids": _base64(call.response_ids_R, _IDS),
        "logprobs": _base64(call.logprobs_R, _FLOATS),
        "record": call_record(call),
    }


def decode_call(wire: JsonObject) -> Call:
    """The reverse of `encode_call`."""
    return make_call(
        wire["record"],
        call_id=wire["id"],
        rollout_id=wire["rollout_id"],
        attempt=wire["attempt"],
        parent=wire["parent"],
        delivered=wire["delivered"],
        prompt_ids_P=ids(base64.b64decode(wire["prompt_ids"])),
        response_ids_R=ids(base64.b64decode(wire["response_ids"])),
        logprobs_R=floats(base64.b64decode(wire["logprobs"])),
    )


def _base64(array: npt.NDArray[Any], dtype: np.dtype[Any]) -> str:
    return base64.b64encode(array.astype(dtype, copy=False).tobytes()).decode()
