"""The Anthropic Messages API, with `count_tokens` (https://docs.anthropic.com/en/api/messages).

Thinking budgets, cache control, metadata, context management and other settings of the provider stay in `raw`. Tools
that the provider defines or runs (web search, bash, memory ...) are left out with a note, since this model was not
trained to call them by name alone. Deferred tools are offered from the start.

A last assistant message asks for its continuation. Chat templates close every assistant turn and open a new one, so
the answer would not continue it: refused, except in a body without `max_tokens`, which only counts tokens.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from manege.errors import ManegeError
from manege.protocols.anthropic_messages import read_messages, read_system
from manege.protocols.anthropic_reply import MessagesStream, error_body, message_body
from manege.protocols.base import (
    AskedSampling,
    ModelReply,
    ModelRequest,
    ReplyHead,
    ServedModel,
    ToolChoice,
)
from manege.protocols.values import flag, integer, number, objects, shown, text, texts, wrong
from manege.types import JsonObject

__all__ = ["AnthropicMessages"]

_TOOL_CHOICES: dict[str, ToolChoice] = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}


class AnthropicMessages:
    """See `protocols.base.WireProtocol`."""

    name = "anthropic"

    def parse(self, raw: JsonObject) -> ModelRequest:
        notes: list[str] = []
        max_new_tokens = integer(raw.get("max_tokens"), "max_tokens", low=1)
        messages = read_system(raw.get("system")) + read_messages(raw.get("messages"), notes)
        if max_new_tokens is not None:
            messages = _without_prefill(messages)
        tools = _tools(raw.get("tools"), notes)
        if raw.get("mcp_servers"):
            notes.append("mcp_servers: tools of MCP servers are left out; the harness must connect to them itself")
        tool_choice, forced_tool, max_tool_calls = _tool_choice(raw.get("tool_choice"))
        return ModelRequest(
            messages=messages,
            tools=tools,
            tool_choice=tool_choice,
            forced_tool=forced_tool,
            max_tool_calls=max_tool_calls,
            json_schema=_json_schema(raw),
            sampling=AskedSampling(
                temperature=number(raw.get("temperature"), "temperature", low=0, high=2),
                top_p=number(raw.get("top_p"), "top_p", low=0, high=1),
                top_k=integer(raw.get("top_k"), "top_k", low=0),
                stop=texts(raw.get("stop_sequences"), "stop_sequences"),
                max_new_tokens=max_new_tokens,
            ),
            stream=flag(raw.get("stream"), "stream"),
            notes=notes,
            raw=raw,
        )

    def reply(self, request: ModelRequest, reply: ModelReply) -> JsonObject:
        return message_body(reply)

    def stream(self, request: ModelRequest, head: ReplyHead) -> MessagesStream:
        return MessagesStream(head)

    def error(self, error: ManegeError) -> JsonObject:
        return error_body(error)

    def token_count(self, num_prompt: int) -> JsonObject:
        return {"input_tokens": num_prompt}

    def models(self, models: Sequence[ServedModel]) -> JsonObject:
        data = [self.model(model) for model in models]
        first_id, last_id = (data[0]["id"], data[-1]["id"]) if data else (None, None)
        return {"data": data, "has_more": False, "first_id": first_id, "last_id": last_id}

    def model(self, model: ServedModel) -> JsonObject:
        return {
            "type": "model",
            "id": model.id,
            "display_name": model.id,
            "created_at": datetime.fromtimestamp(model.created_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "lifecycle": "active",
            "max_input_tokens": model.context_limit,
            "max_tokens": model.context_limit,
        }


def _without_prefill(messages: list[JsonObject]) -> list[JsonObject]:
    last = messages[-1]
    if last["role"] != "assistant":
        return messages
    if len(messages) > 1 and not (last["content"] or last.get("tool_calls") or last.get("reasoning_content")):
        return messages[:-1]
    raise wrong(
        "messages",
        "the last message is the assistant's; an answer cannot be started for this model. "
        "End with a user message, or ask for JSON with output_config.format",
    )


def _tools(value: Any, notes: list[str]) -> list[JsonObject]:
    tools: list[JsonObject] = []
    for index, tool in enumerate(objects(value, "tools")):
        where = f"tools[{index}]"
        if tool.get("type") not in (None, "custom"):
            notes.append(f"{where}: {shown(tool['type'])} is a tool of the provider; left out")
            continue
        function: dict[str, Any] = {"name": text(tool.get("name"), f"{where}.name")}
        if tool.get("description") is not None:
            function["description"] = text(tool["description"], f"{where}.description")
        if tool.get("input_schema") is not None:
            if not isinstance(tool["input_schema"], dict):
                raise wrong(f"{where}.input_schema", f"is {shown(tool['input_schema'])}; want a JSON schema")
            function["parameters"] = tool["input_schema"]
        if tool.get("strict") is not None:
            function["strict"] = flag(tool["strict"], f"{where}.strict")
        tools.append({"type": "function", "function": function})
    return tools


def _tool_choice(value: Any) -> tuple[ToolChoice, str | None, int | None]:
    """What to do, the one tool that must be called, and how many calls are allowed."""
    if value is None:
        return "auto", None, None
    kind = value.get("type") if isinstance(value, dict) else value
    if not isinstance(value, dict) or not isinstance(kind, str) or kind not in _TOOL_CHOICES:
        raise wrong("tool_choice", f"is {shown(kind)}; want an object with type {', '.join(_TOOL_CHOICES)}")
    name = text(value.get("name"), "tool_choice.name") if kind == "tool" else None
    is_single = flag(value.get("disable_parallel_tool_use"), "tool_choice.disable_parallel_tool_use")
    return _TOOL_CHOICES[kind], name, 1 if is_single else None


def _json_schema(raw: JsonObject) -> JsonObject | None:
    config = raw.get("output_config")
    where = "output_config.format" if isinstance(config, dict) and config.get("format") else "output_format"
    form = config["format"] if where == "output_config.format" and isinstance(config, dict) else raw.get(where)
    if form is None:
        return None
    if not isinstance(form, dict) or form.get("type") != "json_schema" or not isinstance(form.get("schema"), dict):
        raise wrong(where, "want type 'json_schema' and a schema that is an object")
    return form["schema"]
