"""Glossary types to JSON and back, for the disk and for our own HTTP API.

Token ids and log-probabilities are kept as little-endian int32 and float32. Pure: no database, no sockets.
"""

from dataclasses import fields
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
from pydantic import TypeAdapter

from manege.errors import ProtocolError
from manege.store.base import RolloutPage, Run, TerminalPage
from manege.types import (
    Call,
    Delivered,
    FinishReason,
    FloatArray,
    IntArray,
    JsonObject,
    Rollout,
    RolloutSpec,
    VersionSpan,
)

__all__ = [
    "ROLLOUT",
    "ROLLOUTS",
    "ROLLOUT_PAGE",
    "RUN",
    "SPEC",
    "TERMINAL_PAGE",
    "call_record",
    "dump_bytes",
    "dumps",
    "floats",
    "id_bytes",
    "ids",
    "make_call",
]

ROLLOUT = TypeAdapter(Rollout)
ROLLOUTS = TypeAdapter(list[Rollout])
ROLLOUT_PAGE = TypeAdapter(RolloutPage)
RUN = TypeAdapter(Run)
SPEC = TypeAdapter(RolloutSpec)
TERMINAL_PAGE = TypeAdapter(TerminalPage)

_IDS, _FLOATS = np.dtype("<i4"), np.dtype("<f4")
_ARRAYS = ("prompt_ids_P", "response_ids_R", "logprobs_R")
_RECORD = [each.name for each in fields(Call) if each.name not in _ARRAYS]


def dumps(value: Any) -> str:
    """JSON text. Raises ProtocolError for what JSON cannot say."""
    try:
        return orjson.dumps(value).decode()
    except orjson.JSONEncodeError as error:
        raise ProtocolError(f"not representable as JSON: {error}") from error


def dump_bytes(value: Any) -> bytes:
    """JSON of what is known to be JSON."""
    return orjson.dumps(value)


def id_bytes(ids_T: IntArray) -> bytes:
    """Token ids as they are kept."""
    return ids_T.astype(_IDS, copy=False).tobytes()


def ids(blob: bytes) -> IntArray:
    """Token ids of a blob."""
    return np.frombuffer(blob, _IDS)


def floats(blob: bytes) -> FloatArray:
    """Log-probabilities of a blob."""
    return np.frombuffer(blob, _FLOATS)


def call_record(call: Call) -> dict[str, Any]:
    """What a call holds beside its arrays."""
    return {name: getattr(call, name) for name in _RECORD}


def make_call(record: JsonObject, **arrays: npt.NDArray[Any]) -> Call:
    """The reverse of `call_record`."""
    typed = {
        "spans": [VersionSpan(**span) for span in record["spans"]],
        "finish_reason": FinishReason(record["finish_reason"]),
        "delivered": Delivered(record["delivered"]),
    }
    return Call(**{**record, **typed, **arrays})
