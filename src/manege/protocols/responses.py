"""OpenAI's Responses: items in, items out. The gateway keeps no responses, so a request brings its whole history.

https://platform.openai.com/docs/api-reference/responses/create. Items are read in `responses_items`, written in
`responses_reply`, streamed in `responses_stream`.
"""

from collections.abc import Sequence
from typing import Any

from manege.protocols.base import InvalidRequest, ModelReply, ModelRequest, ReplyHead, ReplyStream
from manege.protocols.openai import OpenAI, read_max_tool_calls, read_object, read_sampling
from manege.protocols.responses_items import ItemReader
from manege.protocols.responses_reply import response_body, whole_output
from manege.protocols.responses_stream import ResponsesStream
from manege.protocols.responses_tools import DeclaredTools, declared_tools, responses_tool_choice
from manege.protocols.values import flag, integer, shown, texts
from manege.types import JsonObject

__all__ = ["Responses"]

_LOGPROBS = "message.output_text.logprobs"

# Each of these asks for something that was kept by an earlier request.
_KEPT = ("previous_response_id", "conversation", "prompt")


class Responses(OpenAI):
    """See `protocols.base.WireProtocol`."""

    name = "responses"

    def parse(self, raw: JsonObject) -> ModelRequest:
        _refuse_unsupported(raw)
        declared = declared_tools(raw)
        tool_choice, forced_tool, tools = responses_tool_choice(raw.get("tool_choice"), declared)
        messages, notes = _messages(raw, declared)
        return ModelRequest(
            messages=messages,
            tools=tools,
            tool_choice=tool_choice,
            forced_tool=forced_tool,
            max_tool_calls=read_max_tool_calls(raw),
            json_schema=_json_schema(raw.get("text")),
            sampling=read_sampling(
                raw, max_new_tokens=integer(raw.get("max_output_tokens"), "max_output_tokens", low=1)
            ),
            stream=flag(raw.get("stream"), "stream"),
            wants_logprobs=_LOGPROBS in texts(raw.get("include"), "include"),
            notes=[*declared.notes, *notes],
            raw=raw,
        )

    def reply(self, request: ModelRequest, reply: ModelReply) -> JsonObject:
        return response_body(request, reply.head, reply=reply, output=whole_output(request, reply))

    def stream(self, request: ModelRequest, head: ReplyHead) -> ReplyStream:
        return ResponsesStream(request, head)


def _refuse_unsupported(raw: JsonObject) -> None:
    for key in _KEPT:
        if raw.get(key) is not None:
            raise InvalidRequest(f"{key} = {shown(raw[key])}: nothing is kept here; send the whole input", param=key)
    if flag(raw.get("background"), "background"):
        raise InvalidRequest("background responses are not supported; stream the answer or wait", param="background")
    if integer(raw.get("top_logprobs"), "top_logprobs", low=0):
        raise InvalidRequest(
            f"only the sampled token's log-probability is known; ask for {_LOGPROBS} without top_logprobs",
            param="top_logprobs",
        )


def _messages(raw: JsonObject, declared: DeclaredTools) -> tuple[Sequence[JsonObject], Sequence[str]]:
    items = raw.get("input")
    if isinstance(items, str) and items:
        items = [{"role": "user", "content": items}]
    if not isinstance(items, list) or not items:
        raise InvalidRequest("input is missing or empty; send a text or a list of items", param="input")
    reader = ItemReader(declared)
    if (instructions := raw.get("instructions")) is not None:
        if not isinstance(instructions, str):
            raise InvalidRequest(f"instructions is {instructions!r}; want a string", param="instructions")
        if instructions:
            reader.messages.append({"role": "system", "content": instructions})
    for index, item in enumerate(items):
        reader.read(item, f"input[{index}]")
    if not reader.messages:
        raise InvalidRequest("input holds nothing that the model reads; send a message", param="input")
    return reader.messages, reader.notes


def _json_schema(value: Any) -> JsonObject | None:
    text_format = read_object(value, "text").get("format") if value is not None else None
    if text_format is None:
        return None
    kind = read_object(text_format, "text.format").get("type")
    if kind == "json_schema":
        return read_object(text_format.get("schema"), "text.format.schema")
    if kind not in ("text", "json_object"):
        raise InvalidRequest(
            f"text.format of type {kind!r} is not supported; want text, json_object or json_schema", param="text.format"
        )
    return {} if kind == "json_object" else None
