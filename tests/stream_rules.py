"""What a stream of OpenAI's chat completions and Responses must look like, event by event.

A stream is a list of (event name or None, JSON data or "[DONE]"), as `read_events` finds it in the bytes. A broken rule
is an AssertionError; each event is also validated by the official SDK's own types.
"""

import json
from typing import Any, get_args

from openai.types.chat import ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent

__all__ = ["check_chat_stream", "check_responses_stream", "read_events"]

_EVENT_TYPES = {
    kind: model
    for model in get_args(get_args(ResponseStreamEvent)[0])
    for kind in get_args(model.model_fields["type"].annotation)
}
_TERMINAL = ("response.completed", "response.incomplete", "response.failed")


def read_events(data: bytes) -> list[tuple[str | None, Any]]:
    """Comments are skipped; each event is one `data` line, with at most one `event` line before it."""
    assert data == b"" or data.endswith(b"\n\n")
    events = []
    for block in data.decode().split("\n\n"):
        lines = [line for line in block.split("\n") if line and not line.startswith(":")]
        if not lines:
            continue
        *names, content = lines
        assert len(names) <= 1
        assert all(name.startswith("event: ") for name in names)
        assert content.startswith("data: ")
        content = content.removeprefix("data: ")
        data_found = content if content == "[DONE]" else json.loads(content)
        events.append((names[0].removeprefix("event: ") if names else None, data_found))
    return events


def check_chat_stream(
    events: list[tuple[str | None, Any]], *, num_choices: int = 1, wants_usage: bool = False
) -> list[dict[str, Any]]:
    """The message, finish reason, token ids and log-probabilities of each choice, put together from the chunks."""
    assert all(name is None for name, _ in events)
    assert events[-1][1] == "[DONE]"
    chunks = [chunk for _, chunk in events[:-1]]
    assert "[DONE]" not in chunks
    assert all("error" not in chunk for chunk in chunks)
    if wants_usage:
        *chunks, last = chunks
        assert last["choices"] == []
        assert last["usage"]["total_tokens"] == last["usage"]["prompt_tokens"] + last["usage"]["completion_tokens"]
        ChatCompletionChunk.model_validate(last)
    choices = [_ChatChoice() for _ in range(num_choices)]
    for chunk in chunks:
        assert all(chunk[key] == chunks[0][key] for key in ("id", "object", "created", "model"))
        assert chunk.get("usage") is None
        assert len(chunk["choices"]) == 1
        part = chunk["choices"][0]
        choices[part["index"]].read(part)
        if not any(call.get("custom") for call in part["delta"].get("tool_calls", ())):
            # The SDK has no type for free-text calls in a stream.
            ChatCompletionChunk.model_validate(chunk)
    return [choice.result() for choice in choices]


class _ChatChoice:
    """One choice: its role first, then text and calls, then its finish reason, then nothing."""

    def __init__(self) -> None:
        self._message: dict[str, Any] = {}
        self._calls: list[dict[str, Any]] = []
        self._finish: str | None = None
        self._token_ids: list[int] = []
        self._logprobs: list[dict[str, Any]] = []

    def read(self, part: dict[str, Any]) -> None:
        assert self._finish is None, "a chunk after the finish reason"
        delta = part["delta"]
        assert ("role" in delta) == (not self._message), "the role stands in the first chunk only"
        assert delta.keys() <= {"role", "content", "reasoning_content", "tool_calls"}
        if not self._message:
            self._message = {"role": delta["role"], "content": ""}
        self._message["content"] += delta.get("content", "")
        if "reasoning_content" in delta:
            self._message["reasoning_content"] = self._message.get("reasoning_content", "") + delta["reasoning_content"]
        for call in delta.get("tool_calls", ()):
            self._read_call(call)
        self._token_ids += part.get("token_ids", ())
        self._logprobs += (part["logprobs"] or {}).get("content", ())
        self._finish = part["finish_reason"]

    def _read_call(self, call: dict[str, Any]) -> None:
        kind, field = ("custom", "input") if "custom" in call else ("function", "arguments")
        if call["index"] == len(self._calls):
            assert call["id"]
            assert call["type"] == kind
            assert call[kind]["name"]
            self._calls.append({key: value for key, value in call.items() if key != "index"})
        else:
            assert call["index"] == len(self._calls) - 1, "more of a call after the next was opened"
            assert call.keys() == {"index", kind}
            assert call[kind].keys() == {field}
            self._calls[-1][kind][field] += call[kind][field]

    def result(self) -> dict[str, Any]:
        assert self._finish is not None, "no finish reason"
        assert (self._finish == "tool_calls") <= bool(self._calls)
        if self._calls:
            assert len({call["id"] for call in self._calls}) == len(self._calls)
            self._message["tool_calls"] = self._calls
        return {
            "message": self._message,
            "finish_reason": self._finish,
            "token_ids": self._token_ids,
            "logprobs": self._logprobs,
        }


def check_responses_stream(events: list[tuple[str | None, Any]]) -> dict[str, Any]:
    """The response of the last event."""
    rules = _ResponsesRules()
    for position, (name, event) in enumerate(events):
        assert name == event["type"]
        assert event["sequence_number"] == position
        _EVENT_TYPES[name].model_validate(event)
        rules.read(name, event)
    return rules.result()


class _ResponsesRules:
    """Created, in progress, then items one after the other, then one terminal event that repeats them."""

    def __init__(self) -> None:
        self._num_read = 0
        self._id: str | None = None
        self._done: list[dict[str, Any]] = []
        self._item: dict[str, Any] | None = None
        """As it was added."""
        self._expected: tuple[str, ...] = ()
        """Names of the events that may come next within the item."""
        self._text = ""
        self._final: dict[str, Any] | None = None

    def read(self, name: str, event: dict[str, Any]) -> None:
        assert self._final is None, "an event after the last"
        opening = ("response.created", "response.in_progress")
        if self._num_read < len(opening):
            assert name == opening[self._num_read]
        self._num_read += 1
        if "response" in event:
            self._read_response(name, event["response"])
        elif name == "response.output_item.added":
            self._added(event)
        else:
            self._in_item(name, event)

    def _read_response(self, name: str, response: dict[str, Any]) -> None:
        self._id = self._id or response["id"]
        assert response["id"] == self._id
        if name in _TERMINAL:
            assert response["status"] == name.removeprefix("response.")
            assert response["output"] == self._done
            assert (name == "response.failed") == (response["error"] is not None)
            if name != "response.failed":
                assert self._item is None, "an item is still open"
                Response.model_validate(response)
            self._final = response
        else:
            assert response["status"] == "in_progress"
            assert response["usage"] is None

    def _added(self, event: dict[str, Any]) -> None:
        assert self._item is None, "an item is still open"
        assert event["output_index"] == len(self._done)
        self._item, self._text = event["item"], ""
        assert self._item["status"] == "in_progress"
        assert not self._item.get("content")
        assert not self._item.get("summary")
        self._expected = _NEXT[self._item["type"]][0]

    def _in_item(self, name: str, event: dict[str, Any]) -> None:
        assert self._item is not None, f"{name} outside of an item"
        name = name.removeprefix("response.")
        assert name in self._expected, f"{name} where {self._expected} were expected"
        assert event["output_index"] == len(self._done)
        if name == "output_item.done":
            self._item_done(event["item"])
            return
        assert event["item_id"] == self._item["id"]
        if name.endswith(".delta"):
            assert event["delta"]
            self._text += event["delta"]
        elif name.endswith(".done"):
            whole = event.get("part", event)
            assert self._text == next(whole[key] for key in ("text", "arguments", "input") if key in whole)
        self._expected = _NEXT[self._item["type"]][1][name]

    def _item_done(self, item: dict[str, Any]) -> None:
        assert self._item is not None
        assert item["status"] in ("completed", "incomplete")
        assert all(item[key] == self._item[key] for key in ("id", "type"))
        parts = item.get("content") or item.get("summary")
        assert self._text == (parts[0]["text"] if parts else item.get("arguments", item.get("input")))
        self._done.append(item)
        self._item = None

    def result(self) -> dict[str, Any]:
        assert self._final is not None, "no terminal event"
        ids = [item["id"] for item in self._done]
        assert len(set(ids)) == len(ids)
        return self._final


def _texts(part: str, text: str) -> tuple[tuple[str, ...], dict[str, tuple[str, ...]]]:
    return (f"{part}.added",), {
        f"{part}.added": (f"{text}.delta", f"{text}.done"),
        f"{text}.delta": (f"{text}.delta", f"{text}.done"),
        f"{text}.done": (f"{part}.done",),
        f"{part}.done": ("output_item.done",),
    }


def _calls(text: str) -> tuple[tuple[str, ...], dict[str, tuple[str, ...]]]:
    return (f"{text}.delta", f"{text}.done"), {
        f"{text}.delta": (f"{text}.delta", f"{text}.done"),
        f"{text}.done": ("output_item.done",),
    }


_NEXT = {
    "message": _texts("content_part", "output_text"),
    "reasoning": _texts("reasoning_summary_part", "reasoning_summary_text"),
    "function_call": _calls("function_call_arguments"),
    "custom_tool_call": _calls("custom_tool_call_input"),
}
"""By type of item: what follows `added`, and what follows each event."""
