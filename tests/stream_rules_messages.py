"""Strict rules for streams of the Messages and the Gemini API, and what the streamed pieces add up to.

`check_messages_stream` and `check_gemini_stream` raise AssertionError at the first broken rule and return the message
that a client has at the end, in the shape of the API's plain answer.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

__all__ = ["check_gemini_stream", "check_messages_stream", "sse_events"]

_STOP_REASONS = ("end_turn", "max_tokens", "stop_sequence", "tool_use")
_DELTAS = {
    "thinking": {"thinking_delta": "thinking", "signature_delta": "signature"},
    "text": {"text_delta": "text"},
    "tool_use": {"input_json_delta": "partial_json"},
}


def sse_events(body: bytes) -> Iterator[tuple[str | None, Any]]:
    """Name and parsed data of each event; comments and empty lines are skipped."""
    for block in body.decode().split("\n\n"):
        fields = [line.partition(": ")[::2] for line in block.split("\n") if line and not line.startswith(":")]
        if fields:
            names = [value for key, value in fields if key == "event"]
            yield names[0] if names else None, json.loads("\n".join(value for key, value in fields if key == "data"))


def check_messages_stream(events: Sequence[tuple[str | None, Any]]) -> dict[str, Any]:
    """`events`: (name, parsed data) of a stream that ended well."""
    for name, data in events:
        assert name == data["type"], f"event {name} carries data of type {data['type']}"
    assert events[0][0] == "message_start", f"the first event is {events[0][0]}"
    types = [name for name, _ in events if name != "ping"]
    assert types.count("message_start") == types.count("message_delta") == types.count("message_stop") == 1, types
    assert types[-2:] == ["message_delta", "message_stop"], types
    message = dict(events[0][1]["message"])
    assert message["content"] == [], "message_start carries content"
    assert message["stop_reason"] is None
    assert message["stop_sequence"] is None
    assert message["type"] == "message"
    assert message["role"] == "assistant"
    assert message["id"].startswith("msg_")

    block: dict[str, Any] | None = None
    pieces: dict[str, list[str]] = {}
    content: list[dict[str, Any]] = []
    for name, data in events[1:]:
        if name == "content_block_start":
            assert block is None, f"block {data['index']} starts inside another"
            assert data["index"] == len(content), f"block {len(content)} has index {data['index']}"
            block, pieces = dict(data["content_block"]), {}
        elif name == "content_block_delta":
            assert block is not None, f"a delta outside a block: {data}"
            assert data["index"] == len(content), f"a delta of block {data['index']} in block {len(content)}"
            kind = data["delta"]["type"]
            assert kind in _DELTAS[block["type"]], f"{kind} in a block of type {block['type']}"
            assert "signature_delta" not in pieces, "a delta after the signature"
            piece = data["delta"][_DELTAS[block["type"]][kind]]
            assert piece, f"an empty {kind}"
            pieces.setdefault(kind, []).append(piece)
        elif name == "content_block_stop":
            assert block is not None, f"block {data['index']} is closed and not open"
            assert data["index"] == len(content), f"block {data['index']} is closed, {len(content)} is open"
            content.append(_closed(block, pieces))
            block = None
        elif name == "message_delta":
            assert block is None, "the message ends inside a block"
            message |= data["delta"]
            message["usage"] = message["usage"] | data["usage"]
        else:
            assert name in ("ping", "message_stop"), f"unknown event {name}"
    message["content"] = content
    _check_end(message)
    return message


def _closed(block: dict[str, Any], pieces: dict[str, list[str]]) -> dict[str, Any]:
    joined = {kind: "".join(found) for kind, found in pieces.items()}
    if block["type"] == "text":
        assert block["text"] == ""
        assert joined, "an empty text block"
        return block | {"text": joined["text_delta"]}
    if block["type"] == "thinking":
        assert (block["thinking"], block["signature"]) == ("", "")
        assert set(joined) == {"thinking_delta", "signature_delta"}, f"a thinking block of {set(joined)}"
        assert len(pieces["signature_delta"]) == 1
        return block | {"thinking": joined["thinking_delta"], "signature": joined["signature_delta"]}
    assert block["input"] == {}
    value = json.loads(joined["input_json_delta"])
    assert isinstance(value, dict), f"tool input {value!r}"
    return block | {"input": value}


def _check_end(message: dict[str, Any]) -> None:
    ids = [block["id"] for block in message["content"] if block["type"] == "tool_use"]
    assert len(ids) == len(set(ids)), f"a tool id twice: {ids}"
    assert all(ids), "a tool call without id"
    assert message["stop_reason"] in _STOP_REASONS, message["stop_reason"]
    assert (message["stop_sequence"] is not None) == (message["stop_reason"] == "stop_sequence")
    if message["stop_reason"] == "tool_use":
        assert ids, "stop_reason tool_use without a tool call"
    if message["stop_reason"] == "end_turn":
        assert not ids, "a tool call and stop_reason end_turn"
    for key in ("input_tokens", "output_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"):
        assert type(message["usage"][key]) is int, key
        assert message["usage"][key] >= 0, key


def check_gemini_stream(objects: Sequence[Any]) -> dict[str, Any]:
    """`objects`: those of a stream that ended well. Parts of one kind that follow each other are joined."""
    assert objects, "an empty stream"
    first, last = objects[0], objects[-1]
    parts: dict[int, list[dict[str, Any]]] = {}
    logprobs: dict[int, list[Any]] = {}
    for item in objects:
        assert "error" not in item, item
        assert (item["responseId"], item["modelVersion"]) == (first["responseId"], first["modelVersion"])
        assert ("usageMetadata" in item) == (item is last), "token counts stand in the last object only"
        for candidate in item["candidates"]:
            assert ("finishReason" in candidate) == (item is last), "the finish reason stands in the last object only"
            assert candidate["content"]["role"] == "model"
            assert candidate["content"]["parts"], "a candidate without parts"
            mine = parts.setdefault(candidate["index"], [])
            for part in candidate["content"]["parts"]:
                _add_part(mine, part)
            found = candidate.get("logprobsResult", {}).get("chosenCandidates", [])
            logprobs.setdefault(candidate["index"], []).extend(found)
    indexes = [candidate["index"] for candidate in last["candidates"]]
    assert indexes == list(range(len(parts))), f"the last object has the candidates {indexes}"
    usage = last["usageMetadata"]
    assert usage["totalTokenCount"] == usage["promptTokenCount"] + usage["candidatesTokenCount"]
    for candidate in last["candidates"]:
        assert candidate["finishReason"] in ("STOP", "MAX_TOKENS"), candidate["finishReason"]
    candidates = []
    for candidate in last["candidates"]:
        index = candidate["index"]
        content = {"role": "model", "parts": parts[index] or [{"text": ""}]}
        whole = {"index": index, "content": content, "finishReason": candidate["finishReason"]}
        if logprobs[index]:
            whole["logprobsResult"] = {"chosenCandidates": logprobs[index]}
        candidates.append(whole)
    return last | {"candidates": candidates}


def _add_part(parts: list[dict[str, Any]], part: dict[str, Any]) -> None:
    kind = set(part) - {"thought", "thoughtSignature"}
    assert len(kind) == 1, f"a part of {kind}"
    if kind != {"text"}:
        call = part["functionCall"]
        assert call["name"]
        assert call["id"]
        assert isinstance(call["args"], dict), call["args"]
        parts.append(part)
    elif parts and "text" in parts[-1] and parts[-1].get("thought") == part.get("thought"):
        parts[-1] = parts[-1] | {"text": parts[-1]["text"] + part["text"]}
    elif part["text"]:
        parts.append(part)
