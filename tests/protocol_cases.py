"""What tests of several protocols share: canonical replies, ways of cutting them into deltas, bodies gone wrong."""

import copy
from typing import Any

import httpx
from hypothesis import strategies as st
from openai import OpenAI

from manege.protocols.base import Choice, ModelReply, ModelRequest, ReplyDelta, ReplyHead, TokenLogprob, WireProtocol
from manege.protocols.openai_tools import custom_arguments
from manege.types import FinishReason
from tests.stream_rules import read_events


def head(**changes: Any) -> ReplyHead:
    return ReplyHead(**{"id": "a1", "created_s": 5.5, "model": "m", "num_prompt": 7, **changes})


def reply(*messages: Any, prompt_ids: list[int] | None = None, **changes: Any) -> ModelReply:
    """One choice per message, all alike but for that."""
    fields = {"finish_reason": FinishReason.STOP, "num_sampled": 2, **changes}
    choices = [Choice(message=message, **fields) for message in messages]
    return ModelReply(head=head(prompt_ids=prompt_ids), num_cached=4, choices=choices)


def stream(protocol: WireProtocol, request: ModelRequest, parts: list[ReplyDelta], answer: ModelReply) -> Any:
    """The events of a streamed answer with one choice."""
    sent = protocol.stream(request, head())
    data = sent.start() + sent.heartbeat()
    data += b"".join(sent.delta(0, part) for part in parts)
    return read_events(data + sent.finish(answer))


def openai_client(sent: bytes) -> OpenAI:
    """The official SDK, whose every request is answered with this stream."""
    found = httpx.MockTransport(
        lambda _: httpx.Response(200, headers={"content-type": "text/event-stream"}, content=sent)
    )
    return OpenAI(base_url="http://test/v1", api_key="k", http_client=httpx.Client(transport=found))


texts = st.text(max_size=12)
tool_names = st.sampled_from(["shell", "spawn", "multi__shell", "patch"])


def tool_call(id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


@st.composite
def messages(draw: Any) -> dict[str, Any]:
    """Canonical assistant messages; `patch` is a free-text tool."""
    message: dict[str, Any] = {"role": "assistant", "content": draw(texts)}
    if reasoning := draw(texts):
        message["reasoning_content"] = reasoning
    calls = draw(st.lists(st.tuples(tool_names, st.one_of(st.just("{}"), texts)), max_size=3))
    if calls:
        message["tool_calls"] = [
            tool_call(f"call_{index}", name, custom_arguments(text) if name == "patch" else text)
            for index, (name, text) in enumerate(calls)
        ]
    return message


@st.composite
def cuts(draw: Any, text: str) -> list[str]:
    """A text in pieces, none empty."""
    places = sorted(draw(st.sets(st.integers(1, max(len(text) - 1, 1)), max_size=4)))
    pieces = [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]
    return [piece for piece in pieces if piece]


@st.composite
def deltas(draw: Any, message: dict[str, Any]) -> list[ReplyDelta]:
    """Ways in which a message may be streamed: some deltas add several things, some only tokens."""
    steps: list[dict[str, Any]] = [{"reasoning": piece} for piece in draw(cuts(message.get("reasoning_content", "")))]
    steps += [{"content": piece} for piece in draw(cuts(message["content"]))]
    steps += [{"tool_calls": [call]} for call in message.get("tool_calls", ())]
    found: list[ReplyDelta] = []
    while steps:
        step = steps.pop(0)
        while steps and not step.keys() & steps[0].keys() and draw(st.booleans()):
            step |= steps.pop(0)
        ids = draw(st.lists(st.integers(0, 99), max_size=2))
        found.append(ReplyDelta(**step, response_ids=ids, logprobs=[TokenLogprob(text="t", logprob=-1.0) for _ in ids]))
        if draw(st.booleans()):
            found.append(ReplyDelta(response_ids=[1], logprobs=[TokenLogprob(text="", logprob=-2.0)]))
    return found


# Integers as far as the JSON parser makes them; beyond that they are floats.
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def _places(value: Any) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, inner in items for place in ((key,), *((key, *rest) for rest in _places(inner)))]


@st.composite
def fuzz(draw: Any, body: dict[str, Any]) -> dict[str, Any]:
    """The body with one to three of its values, at any depth, replaced or left out."""
    body = copy.deepcopy(body)
    for _ in range(draw(st.integers(1, 3))):
        *way, key = draw(st.sampled_from(_places(body)))
        holder = body
        for step in way:
            holder = holder[step]
        if draw(st.booleans()):
            holder[key] = draw(json_values)
        else:
            del holder[key]
        if not body:
            break
    return body
