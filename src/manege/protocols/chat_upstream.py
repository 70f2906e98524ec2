"""Chat completions the other way round: a canonical request as a body for an engine that speaks nothing else, and its
answer, whole or in chunks, back to canonical.

What such engines get wrong is read in its favour: chunks without choices, both names of reasoning, arguments in the
chunk that opens a call, calls without index or id, several tokens at once. Nothing that was sampled is lost.
"""

from collections.abc import Mapping
from typing import Any

import orjson

from manege.errors import EngineError
from manege.protocols.base import ModelRequest, ReplyDelta, TokenLogprob
from manege.protocols.values import canonical_call
from manege.types import FinishReason, JsonObject

__all__ = ["UpstreamReply", "chat_body", "read_chat_message"]


def chat_body(request: ModelRequest, *, model: str) -> dict[str, Any]:
    """The body of a request for one answer; `stream`, `n`, logprobs and token ids are the caller's to add."""
    asked = request.sampling
    body: dict[str, Any] = {
        "model": model,
        "messages": [_upstream_message(message) for message in request.messages],
        "temperature": asked.temperature,
        "top_p": asked.top_p,
        "top_k": asked.top_k,
        "seed": asked.seed,
        "max_tokens": asked.max_new_tokens,
        "stop": list(asked.stop) or None,
        **asked.others,
    }
    if request.tools:
        named = {"type": "function", "function": {"name": request.forced_tool}}
        body["tools"] = list(request.tools)
        body["tool_choice"] = named if request.forced_tool else request.tool_choice
        body["parallel_tool_calls"] = False if request.max_tool_calls == 1 else None
    if request.json_schema is not None:
        schema = {"name": "answer", "schema": request.json_schema, "strict": True}
        is_any = not request.json_schema
        body["response_format"] = {"type": "json_object"} if is_any else {"type": "json_schema", "json_schema": schema}
    return {key: value for key, value in body.items() if value is not None}


def read_chat_message(message: Any, *, call_id: str) -> JsonObject:
    """The canonical form of an upstream's whole assistant message; see `UpstreamReply`."""
    reply = UpstreamReply(call_id=call_id)
    reply.read({"choices": [{"message": message}]})
    return reply.message


class UpstreamReply:
    """Puts one answer together from its chunks, or from a whole body, which is read as one chunk.

    `call_id` makes the ids of calls that come without one, or with that of an earlier call.
    """

    def __init__(self, *, call_id: str) -> None:
        self.reasoning = self.content = ""
        self.finish_reason: FinishReason | None = None
        """None: not ended yet."""
        self.stop_sequence: str | None = None
        """vLLM's `stop_reason`, where it is a string."""
        self.usage: JsonObject = {}
        """As the upstream counts; empty until it says so."""
        self.prompt_ids: list[int] | None = None
        """None: not told."""
        self._call_id = call_id
        self._calls: list[dict[str, str]] = []
        self._by_index: dict[int, dict[str, str]] = {}

    def read(self, chunk: Any) -> ReplyDelta:
        """What the chunk adds, tool calls excepted: see `finish`. Raises EngineError for an error sent as a chunk."""
        if not isinstance(chunk, Mapping) or chunk.get("error"):
            raise EngineError(f"the upstream sent {str(chunk)[:200]} instead of an answer; see its log")
        if isinstance(chunk.get("usage"), Mapping):
            self.usage = chunk["usage"]
        self._read_prompt_ids(chunk)
        choices = chunk.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices else None
        if not isinstance(choice, Mapping):
            return ReplyDelta()
        self._read_prompt_ids(choice)
        self._read_end(choice)
        part = choice.get("delta") or choice.get("message")
        part = part if isinstance(part, Mapping) else {}
        reasoning = _text(part.get("reasoning_content")) or _text(part.get("reasoning"))
        content = _text(part.get("content"))
        self.reasoning += reasoning
        self.content += content
        for call in _objects(part.get("tool_calls")):
            self._read_call(call)
        token_ids = choice.get("token_ids")
        return ReplyDelta(
            reasoning=reasoning,
            content=content,
            logprobs=_logprobs(choice),
            response_ids=token_ids if isinstance(token_ids, list) else (),
        )

    def finish(self) -> ReplyDelta:
        """The tool calls: only at the end is it sure that nothing more is added to one."""
        return ReplyDelta(tool_calls=self.message.get("tool_calls", ()))

    @property
    def message(self) -> JsonObject:
        """The canonical assistant message, as far as it was read."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self._calls:
            message["tool_calls"] = [
                canonical_call(call["id"], call["name"], call["arguments"]) for call in self._calls
            ]
        return message

    def _read_prompt_ids(self, holder: Mapping[str, Any]) -> None:
        if self.prompt_ids is None and isinstance(holder.get("prompt_token_ids"), list):
            self.prompt_ids = holder["prompt_token_ids"]

    def _read_end(self, choice: Mapping[str, Any]) -> None:
        reason = choice.get("finish_reason")
        if reason is not None:
            others = {"length": FinishReason.LENGTH, "abort": FinishReason.ABORT}
            self.finish_reason = others.get(str(reason), FinishReason.STOP)
        if isinstance(choice.get("stop_reason"), str):
            self.stop_sequence = choice["stop_reason"]

    def _read_call(self, part: Mapping[str, Any]) -> None:
        """A new call, or more of one: of the one with the same index, else of the last."""
        function = part.get("function")
        function = function if isinstance(function, Mapping) else {}
        index, id, name = part.get("index"), _text(part.get("id")), _text(function.get("name"))
        last = self._calls[-1] if self._calls else None
        call = self._by_index.get(index) if isinstance(index, int) else last
        # Some number every call 0, or none at all: then another id, or a second name without one, begins a new call.
        is_other = call is not None and name and (id != call["sent_id"] if id else not isinstance(index, int))
        if call is None or is_other:
            call = {"id": self._unique(id), "sent_id": id, "name": "", "arguments": ""}
            self._calls.append(call)
            if isinstance(index, int):
                self._by_index[index] = call
        call["name"] = call["name"] or name
        arguments = function.get("arguments")
        call["arguments"] += orjson.dumps(arguments).decode() if isinstance(arguments, dict) else _text(arguments)

    def _unique(self, id: str) -> str:
        if id and all(call["id"] != id for call in self._calls):
            return id
        return f"call_{self._call_id}{len(self._calls)}"


def _upstream_message(message: JsonObject) -> JsonObject:
    return {**message, "content": message["content"] or None} if message.get("tool_calls") else message


def _text(value: Any) -> str:
    """A string, or the text of a list of parts."""
    if isinstance(value, list):
        return "".join(_text(part.get("text")) for part in _objects(value))
    return value if isinstance(value, str) else ""


def _objects(value: Any) -> list[Mapping[str, Any]]:
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []


def _logprobs(choice: Mapping[str, Any]) -> list[TokenLogprob]:
    """Of the sampled tokens; fewer than tokens where the upstream left one out, which its reader must check."""
    logprobs = choice.get("logprobs")
    tokens = _objects(logprobs.get("content")) if isinstance(logprobs, Mapping) else []
    return [
        TokenLogprob(text=_text(token.get("token")), logprob=float(token["logprob"]))
        for token in tokens
        if isinstance(token.get("logprob"), int | float)
    ]
