"""What the agents' routes take, as short JSON Schemas for the OpenAPI description.

Only what a protocol demands is said; everything else that its SDKs send is accepted, so every object is open. A model
name is accepted everywhere and needed nowhere: one model is served, whatever it is called.
"""

from collections.abc import Mapping

from manege.types import JsonObject

__all__ = ["AGENT_BODIES"]


def _list(item: JsonObject) -> JsonObject:
    return {"type": "array", "items": item, "minItems": 1}


def _object(required: JsonObject, optional: JsonObject | None = None) -> JsonObject:
    return {"type": "object", "required": list(required), "properties": {**required, **(optional or {})}}


_TEXT: JsonObject = {"type": "string"}
_COUNT: JsonObject = {"type": "integer", "minimum": 1}
_COMMON: JsonObject = {"model": _TEXT, "stream": {"type": "boolean"}, "temperature": {"type": "number", "minimum": 0}}
_CONTENT: JsonObject = {"anyOf": [_TEXT, _list(_object({"type": _TEXT}))]}
_MESSAGES = _list(_object({"role": {"enum": ["user", "assistant"]}, "content": _CONTENT}))
_TOOLS: JsonObject = {"tools": {"type": "array", "items": {"type": "object"}}}
_CONTENTS = _list(
    _object({"parts": _list({"type": "object", "properties": {"text": _TEXT}})}, {"role": {"enum": ["user", "model"]}})
)
_CHAT_ROLES = {"enum": ["system", "developer", "user", "assistant", "tool"]}

AGENT_BODIES: Mapping[str, tuple[str, JsonObject]] = {
    "/chat/completions": (
        "A chat completion of OpenAI's, recorded with its tokens; streamed if asked.",
        _object(
            {"messages": _list(_object({"role": _CHAT_ROLES}, {"content": {"anyOf": [_CONTENT, {"type": "null"}]}}))},
            _COMMON | _TOOLS | {"max_completion_tokens": _COUNT, "n": {**_COUNT, "maximum": 128}},
        ),
    ),
    "/completions": (
        "A completion of OpenAI's, from text or token ids, recorded with its tokens; streamed if asked.",
        _object(
            {"prompt": {"anyOf": [_TEXT, _list(_TEXT), _list({"type": "integer", "minimum": 0})]}},
            _COMMON | {"max_tokens": _COUNT, "n": {**_COUNT, "maximum": 128}},
        ),
    ),
    "/responses": (
        "A response of OpenAI's, recorded with its tokens; streamed if asked. Nothing of it is kept for later.",
        _object(
            {"input": {"anyOf": [_TEXT, _list({"type": "object"})]}},
            _COMMON | _TOOLS | {"instructions": _TEXT, "max_output_tokens": _COUNT},
        ),
    ),
    "/messages": (
        "A message of Anthropic's, recorded with its tokens; streamed if asked.",
        _object({"messages": _MESSAGES}, _COMMON | _TOOLS | {"max_tokens": _COUNT, "system": _CONTENT}),
    ),
    "/messages/count_tokens": (
        "How many tokens such a message would be; nothing is sampled or recorded.",
        _object({"messages": _MESSAGES}, _TOOLS | {"model": _TEXT, "system": _CONTENT}),
    ),
    "/models/{action}": (
        "Gemini's `<model>:generateContent`, `:streamGenerateContent` (`?alt=sse` for events) and `:countTokens`.",
        _object({"contents": _CONTENTS}, _TOOLS | {"generationConfig": {"type": "object"}}),
    ),
}
"""By path after its version, which Google's clients write as v1 or v1beta: what it does, and its body."""
