"""Finds the call that a prompt continues, by its token ids alone: for engines that take messages.

Per attempt, each call is known by a hash of its prompt + response. A prompt is hashed once, from left to right, with a
stop at the length of every known call: the longest one whose hash is met is the parent. Ids are compared as the text in
which engines send them, "1,2,3", so that a prompt need not be parsed before its parent is known, and then only what
follows the parent is new.

    call 1: prompt 1,2,3 response 4              known: hash("1,2,3,4")
    call 2: prompt 1,2,3,4,5,6                   parent: call 1; new: 5,6

Concurrency: one event loop; no await stands between a look-up and its use.
"""

import hashlib
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass

import orjson

from manege.types import Call, CallId, IntArray, JsonObject

__all__ = ["Known", "PrefixIndex", "ids_text"]

_COMMA = ord(",")


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """An answered call."""

    call_id: CallId
    num_tokens: int
    """Of prompt + response."""
    num_messages: int
    """Of the request and its answer."""

    def is_continued_by(self, messages: Sequence[JsonObject]) -> bool:
        """Whether its answer stands among the messages where it should, so that only those after it are new."""
        return len(messages) >= self.num_messages and messages[self.num_messages - 1]["role"] == "assistant"


class Match:
    """A prompt, read against an index."""

    def __init__(self, ids: bytes) -> None:
        self.ids = ids
        self.known: Known | None = None
        """The longest call that is a proper prefix."""
        self.begin = 0
        """Where in the text the ids begin that are new."""
        self._hasher = hashlib.blake2b(digest_size=16)
        self._position = 0

    def hash_up_to(self, length: int) -> bytes:
        """Of the text up to there; lengths must grow."""
        self._hasher.update(memoryview(self.ids)[self._position : length])
        self._position = length
        return self._hasher.digest()

    def key_with(self, response: bytes) -> tuple[bytes, int]:
        """Hash and length of the text when it is followed by a response. Nothing is hashed twice; once only."""
        added = b"," + response if response else b""
        self.hash_up_to(len(self.ids))
        self._hasher.update(added)
        return self._hasher.digest(), len(self.ids) + len(added)


class PrefixIndex:
    """The calls of one attempt."""

    def __init__(self) -> None:
        self._known: dict[bytes, Known] = {}
        self._lengths: list[int] = []

    def parent(self, prompt_ids: IntArray, messages: Sequence[JsonObject]) -> Known | None:
        """The call that a prompt continues, if its messages say so too."""
        known = self.match(ids_text(prompt_ids)).known
        return known if known is not None and known.is_continued_by(messages) else None

    def match(self, ids: bytes) -> Match:
        """Find the call that these ids continue."""
        match = Match(ids)
        for length in self._lengths:
            if length >= len(ids):
                break
            # A number may go on where a known text ends.
            if ids[length] == _COMMA and (known := self._known.get(match.hash_up_to(length))):
                match.known, match.begin = known, length + 1
        return match

    def add(self, call: Call, parent: Known | None) -> Known:
        """Remember a call."""
        num_messages = len(call.request["messages"]) + 1 + (parent.num_messages if parent else 0)
        num_tokens = len(call.prompt_ids_P) + len(call.response_ids_R)
        known = Known(call_id=call.id, num_tokens=num_tokens, num_messages=num_messages)
        self.put(*Match(ids_text(call.prompt_ids_P)).key_with(ids_text(call.response_ids_R)), known)
        return known

    def put(self, key: bytes, length: int, known: Known) -> None:
        """Remember a call by the hash and length of its prompt + response (`Match.key_with`)."""
        if key not in self._known:
            insort(self._lengths, length)
        self._known[key] = known

    def restore(self, calls: Sequence[Call]) -> None:
        """Remember stored calls, in their order; those that are known already stay as they are."""
        known: dict[CallId, Known] = {}
        for call in calls:
            if len(call.prompt_ids_P):
                known[call.id] = self.add(call, known.get(call.parent) if call.parent else None)

    def forget(self, call: Call) -> None:
        """Take back an answer that the agent did not get: nothing continues it."""
        self._known = {key: known for key, known in self._known.items() if known.call_id != call.id}


def ids_text(ids_T: IntArray) -> bytes:
    """Ids as engines write them."""
    return orjson.dumps(ids_T.tolist())[1:-1]
