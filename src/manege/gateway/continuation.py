"""Recognises, at message level, a conversation that was served before, so that its sampled ids are continued verbatim.

Per attempt there is a tree of served calls. Each has a key: a hash chain over tools and canonical messages up to and
including its answer. A request is walked message by message; the deepest assistant message whose key is known is where
it continues. What harnesses change without changing the meaning is left out of the hash: ids, the spelling of JSON
arguments, reasoning that was not sent back. An answer that carries a tool-call id of ours is also recognised when the
harness left out its text. Anything else that was edited is another conversation, with no parent.

It keeps, per call, what the call added (ids as bytes); `memory.py` rebuilds it from the store where it is not known.

Concurrency: one event loop; no await stands between a look-up and its use.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from manege.protocols.base import ModelRequest
from manege.rendering.base import Renderer
from manege.types import Call, CallId, IntArray, JsonObject

__all__ = ["Conversation", "Prompt"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Served:
    """One served call."""

    call_id: CallId
    parent: "_Served | None"
    start: bytes
    """Key of what the answer follows."""
    key: bytes
    """Key of what follows the answer."""
    calls_hash: bytes
    """Of the answer's tool calls."""
    reasoning: str | None
    num_added: int
    ids: bytes
    """int32: the `num_added` prompt ids that the parent does not have, then the sampled ones."""
    twin: "_Served | None"
    """An earlier call with the same key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """The ids to sample from, and where they come from."""

    ids: IntArray
    parent: CallId | None
    new_messages: Sequence[JsonObject]
    """Messages that the parent's conversation does not have; all of them without a parent."""
    num_shared: int = 0
    """Leading ids that are the parent's prompt + response, where these are known here."""


class Conversation:
    """The served calls of one attempt."""

    def __init__(self) -> None:
        self._by_key: dict[bytes, _Served] = {}
        self._by_call: dict[CallId, _Served] = {}
        self._by_handle: dict[str, _Served] = {}

    def prompt(self, request: ModelRequest, renderer: Renderer) -> Prompt:
        """Continue the deepest served answer in the request, or render it all. Raises ProtocolError."""
        served, history, _ = self._walk(request.messages, request.tools)
        if served is not None:
            prompt_ids, response_ids = _ids(served)
            new_messages = request.messages[len(history) :]
            added = renderer.bridge(history, prompt_ids, response_ids, new_messages, request.tools)
            if added is not None:
                ids = np.concatenate([prompt_ids, response_ids, np.asarray(added, np.int32)])
                num_shared = len(prompt_ids) + len(response_ids)
                return Prompt(ids=ids, parent=served.call_id, new_messages=new_messages, num_shared=num_shared)
        ids = np.asarray(renderer.render(request.messages, request.tools), np.int32)
        return Prompt(ids=ids, parent=None, new_messages=request.messages)

    def add(self, call: Call) -> None:
        """Remember a chat call so that the next request can continue it."""
        parent = self._by_call.get(call.parent) if call.parent else None
        messages = call.request["messages"]
        if parent:
            start = parent.key
            for message in messages:
                start = _hash(start, _essence(message))
        else:
            # Its history may hold answers that were recognised and yet not continued.
            *_, start = self._walk(messages, call.request.get("tools", ()))
        key = _hash(start, _essence(call.reply))
        added = call.prompt_ids_P[_length(parent) :]
        served = _Served(
            call_id=call.id,
            parent=parent,
            start=start,
            key=key,
            calls_hash=_hash(b"", _essence(call.reply).get("tool_calls")),
            reasoning=call.reply.get("reasoning_content"),
            num_added=len(added),
            ids=added.tobytes() + call.response_ids_R.tobytes(),
            twin=self._by_key.get(key),
        )
        self._by_key[key] = self._by_call[call.id] = served
        for tool_call in call.reply.get("tool_calls") or ():
            self._by_handle[_handle(tool_call["id"])] = served

    def restore(self, calls: Sequence[Call]) -> None:
        """Remember stored calls, in their order; those that are known already stay as they are."""
        for call in calls:
            if call.id not in self._by_call:
                self.add(call)

    def forget(self, call: Call) -> None:
        """Take back an answer that the agent did not get: a twin that it got is what it will continue."""
        served = self._by_call.pop(call.id, None)
        if served is not None and self._by_key.get(served.key) is served:
            if served.twin:
                self._by_key[served.key] = served.twin
            else:
                del self._by_key[served.key]

    def _walk(
        self, messages: Sequence[JsonObject], tools: Sequence[JsonObject]
    ) -> tuple[_Served | None, Sequence[JsonObject], bytes]:
        """The deepest served answer, the messages up to it with the reasoning that was sampled, the key of them all."""
        key = _hash(b"", tools)
        deepest: _Served | None = None
        seen: list[JsonObject] = []
        num_history = 0
        for message in messages:
            essence = _essence(message)
            following = _hash(key, essence)
            served = None
            if message["role"] == "assistant":
                served = self._by_known_handle(message, essence, key) or self._by_key.get(following)
            if served is None:
                key = following
                seen.append(message)
            else:
                key, deepest, num_history = served.key, served, len(seen) + 1
                seen.append(_with_reasoning(message, served.reasoning))
        return deepest, seen[:num_history], key

    def _by_known_handle(self, message: JsonObject, essence: JsonObject, start: bytes) -> _Served | None:
        if not message.get("tool_calls"):
            return None
        served = self._by_handle.get(_handle(message["tool_calls"][0]["id"]))
        if served is None or served.start != start or served.call_id not in self._by_call:
            return None
        same_calls = _hash(b"", essence.get("tool_calls")) == served.calls_hash
        return served if same_calls and (not message["content"] or _hash(start, essence) == served.key) else None


def _hash(before: bytes, value: object) -> bytes:
    return hashlib.blake2b(before + orjson.dumps(value, option=orjson.OPT_SORT_KEYS), digest_size=16).digest()


def _handle(tool_call_id: str) -> str:
    """Some harnesses strip the underscore."""
    return "".join(filter(str.isalnum, tool_call_id))


def _essence(message: JsonObject) -> Mapping[str, Any]:
    """What a message says, without ids and spelling."""
    essence: dict[str, Any] = {"role": message["role"], "content": message["content"] or ""}
    if message.get("name"):
        essence["name"] = message["name"]
    if message.get("tool_calls"):
        essence["tool_calls"] = [
            [call["function"]["name"], _parsed(call["function"]["arguments"])] for call in message["tool_calls"]
        ]
    return essence


def _with_reasoning(message: JsonObject, reasoning: str | None) -> JsonObject:
    """The message with the reasoning that was sampled, or none: whatever the harness made of it does not count."""
    own = {key: value for key, value in message.items() if key != "reasoning_content"}
    return {**own, "reasoning_content": reasoning} if reasoning else own


def _parsed(arguments: str) -> Any:
    try:
        return orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return arguments


def _length(served: _Served | None) -> int:
    length = 0
    while served is not None:
        length += len(served.ids) // 4
        served = served.parent
    return length


def _ids(served: _Served) -> tuple[IntArray, IntArray]:
    """Prompt and response of a served call."""
    chain: list[bytes] = []
    ancestor = served.parent
    while ancestor is not None:
        chain.append(ancestor.ids)
        ancestor = ancestor.parent
    own = np.frombuffer(served.ids, np.int32)
    before = np.frombuffer(b"".join(reversed(chain)), np.int32)
    return np.concatenate([before, own[: served.num_added]]), own[served.num_added :]
