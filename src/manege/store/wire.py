"""Calls of many rollouts as one body of bytes, of which the reader's arrays are views (docs/reference/calls-format.md).

    magic, version, length of the header | header: JSON, padded to 8 bytes | int32 token ids | float32 log-probabilities

The header has, per rollout, its calls in the order in which their tokens stand: chain after chain (`expand.py`), so
that the prompts of a conversation are the beginnings of one run of tokens. Little-endian. No database, no sockets.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain as flatten
from typing import Any

import numpy as np
import orjson
from pydantic import NonNegativeInt, TypeAdapter

from manege.errors import ProtocolError
from manege.store.base import StoredCall
from manege.store.codec import make_call
from manege.store.expand import Link, find_chains, link_of, place
from manege.types import Call, RolloutId

__all__ = ["MEDIA_TYPE", "VERSION", "decode_calls", "encode_calls"]

MEDIA_TYPE = "application/vnd.manege.calls"
VERSION = 1
"""Of the format, and of what a call's record holds; a reader takes no other one."""

_MAGIC = b"MNGCALLS"
_START = struct.Struct("<8sQQ")
_IDS, _FLOATS = np.dtype("<i4"), np.dtype("<f4")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """A call in the header."""

    answered: int
    """Its place in the order of answers, from 0."""
    base: int | None
    """Place, in the header's list, of the earlier row that `num_shared` tokens of the prompt are taken from."""
    num_shared: int
    num_new: NonNegativeInt
    """Tokens of the prompt that stand in the section, followed by the sampled ones."""
    num_sampled: NonNegativeInt
    num_logprobs: NonNegativeInt
    """Other than `num_sampled` only where a call cannot be trained."""
    record: Any
    """All of the call but its arrays: an object; JSON that is written as it is when it is encoded."""

    @property
    def link(self) -> Link:
        return Link(self.base, self.num_shared, self.num_new, self.num_sampled)


_HEADER = TypeAdapter(dict[RolloutId, list[_Row]])


def encode_calls(found: Mapping[RolloutId, Sequence[StoredCall]]) -> bytes:
    """The body that `decode_calls` reads."""
    ordered = {key: _in_chains(stored) for key, stored in found.items()}
    calls = [each for _, each in flatten.from_iterable(ordered.values())]
    header = orjson.dumps({key: _rows(stored) for key, stored in ordered.items()})
    header += b" " * (-len(header) % 8)
    ids = flatten.from_iterable((call.new_ids_N, call.response_ids_R) for call in calls)
    parts = [
        *(array.astype(_IDS, copy=False) for array in ids),
        *(call.logprobs_R.astype(_FLOATS, copy=False) for call in calls),
    ]
    return b"".join([_START.pack(_MAGIC, VERSION, len(header)), header, *parts])


def _in_chains(stored: Sequence[StoredCall]) -> list[tuple[int, StoredCall]]:
    """The calls as their tokens shall stand, each with its place in the order of answers."""
    chains = find_chains([link_of(each) for each in stored])
    return [(position, stored[position]) for position in flatten.from_iterable(chains)]


def _rows(ordered: Sequence[tuple[int, StoredCall]]) -> list[_Row]:
    places = {answered: place for place, (answered, _) in enumerate(ordered)}
    return [
        _Row(
            answered=answered,
            base=None if each.base is None else places[each.base],
            num_shared=each.num_shared,
            num_new=len(each.new_ids_N),
            num_sampled=len(each.response_ids_R),
            num_logprobs=len(each.logprobs_R),
            record=orjson.Fragment(each.record),
        )
        for answered, each in ordered
    ]


def decode_calls(body: bytes) -> dict[RolloutId, list[Call]]:
    """Calls in the order of their answers. Their arrays are read-only views of `body` and keep all of it in memory;
    only what a branch shares is copied, once per branch. Raises ProtocolError for a body that is not whole."""
    header, first = _header(body)
    rows = list(flatten.from_iterable(header.values()))
    num_ids = sum(row.num_new + row.num_sampled for row in rows)
    num_logprobs = sum(row.num_logprobs for row in rows)
    needed = first + _IDS.itemsize * num_ids + _FLOATS.itemsize * num_logprobs
    if len(body) != needed:
        raise _cut(body, needed)
    ids = _Section(np.frombuffer(body, _IDS, num_ids, first))
    logprobs = _Section(np.frombuffer(body, _FLOATS, num_logprobs, first + _IDS.itemsize * num_ids))
    try:
        return {rollout_id: _calls(rows, ids, logprobs) for rollout_id, rows in header.items()}
    except (KeyError, TypeError, ValueError) as error:
        raise _broken(error) from error


def _header(body: bytes) -> tuple[dict[RolloutId, list[_Row]], int]:
    """Also where the token ids begin."""
    if body[: len(_MAGIC)] != _MAGIC:
        raise ProtocolError(
            f"the answer begins with {body[:8]!r} instead of {_MAGIC!r}; is this the address of a manege gateway, "
            "and is it as new as its client?"
        )
    if len(body) < _START.size:
        raise _cut(body, _START.size)
    _, version, length = _START.unpack_from(body)
    if version != VERSION:
        raise ProtocolError(
            f"the calls are in version {version} of their format, this client reads version {VERSION}; "
            "run the gateway and its clients with one version of manege"
        )
    first = _START.size + length
    if len(body) < first:
        raise _cut(body, first)
    try:
        return _HEADER.validate_python(orjson.loads(body[_START.size : first])), first
    except ValueError as error:
        raise _broken(error) from error


class _Section:
    """An array that is given out from its beginning to its end."""

    def __init__(self, values: Any) -> None:
        self._values, self._used = values, 0

    def take(self, count: int) -> Any:
        self._used += count
        return self._values[self._used - count : self._used]


def _calls(rows: Sequence[_Row], ids: _Section, logprobs: _Section) -> list[Call]:
    """The next calls of both sections. Raises KeyError, TypeError or ValueError for rows that cannot be."""
    links = [row.link for row in rows]
    chains = find_chains(links)
    if list(flatten.from_iterable(chains)) != list(range(len(rows))):
        raise ValueError("the calls of a chain do not stand together")
    added = [[ids.take(sum(links[at].num_new + links[at].num_sampled for at in chain))] for chain in chains]
    calls = {
        row.answered: make_call(
            row.record, prompt_ids_P=prompt, response_ids_R=response, logprobs_R=logprobs.take(row.num_logprobs)
        )
        for row, (prompt, response) in zip(rows, place(links, chains, added), strict=True)
    }
    return [calls[answered] for answered in range(len(rows))]


def _cut(body: bytes, needed: int) -> ProtocolError:
    return ProtocolError(f"the calls have {len(body)} bytes and need {needed}: the answer is not whole; ask again")


def _broken(error: Exception) -> ProtocolError:
    return ProtocolError(
        f"the header of the calls is not as version {VERSION} of their format says ({type(error).__name__}: {error}); "
        "report it, with the versions of manege on both sides"
    )
