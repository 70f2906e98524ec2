"""The text of an answer to content, reasoning and tool calls, in the Hermes / ChatML form.

`<think>...</think>` in front is reasoning; `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` is a call.
Whatever is cut or malformed stays content, so that nothing the model said is lost.
"""

import json
import re

from manege.rendering.base import ParsedReply, ToolCall

__all__ = ["MARKERS", "parse_text"]

MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""Kept in the decoded text even where they are special tokens."""

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


def parse_text(text: str, *, with_tools: bool) -> ParsedReply:
    """Never raises."""
    reasoning, content = _split_reasoning(text)
    calls: list[ToolCall] = []
    if with_tools:

        def take(match: re.Match[str]) -> str:
            call = _tool_call(match[1])
            if call is None:
                return match[0]
            calls.append(call)
            return ""

        content = _CALL.sub(take, content)
        if calls:
            content = content.strip()
    return ParsedReply(content=content, reasoning=reasoning, tool_calls=calls)


def _split_reasoning(text: str) -> tuple[str | None, str]:
    """A template may open the reasoning itself, so the opening mark may be missing."""
    before, closed, after = text.partition("</think>")
    if not closed:
        return None, text
    blank, opened, inside = before.partition("<think>")
    if opened and blank.strip():
        return None, text
    return (inside if opened else before).strip("\n"), after.lstrip("\n")


def _tool_call(body: str) -> ToolCall | None:
    try:
        call = json.loads(body)
    except ValueError:
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", {})
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return ToolCall(name=call["name"], arguments=arguments)
