"""Random canonical answers, and the deltas that a parser may have given out for them (hypothesis strategies)."""

import json
from collections.abc import Sequence

from hypothesis import strategies as st

from manege.protocols.base import Choice, ModelReply, ReplyDelta, ReplyHead
from manege.types import FinishReason

__all__ = ["any_json", "cuts", "json_objects", "meaning", "messages", "reply_of"]

_scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
any_json = st.recursive(
    _scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
)
"""Also what a JSON parser would not give: huge integers, infinities."""

_written = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
)  # fmt: skip
json_objects = st.dictionaries(st.text(max_size=6), _written, max_size=3)

_DEEP = '{"a":' * 300 + "1" + "}" * 300
_arguments = st.one_of(
    json_objects.map(json.dumps),
    json_objects.map(lambda value: json.dumps(value, ensure_ascii=False, separators=(",", ":"))),
    _written.map(json.dumps),
    st.text(max_size=12),
    st.sampled_from(['{"a": 1}', '{"_raw": "x"}', '{"a": ', "", '{"a": NaN}', _DEEP]),
)
"""What a model writes: mostly JSON objects."""


@st.composite
def messages(draw):
    """A canonical assistant message."""
    message = {"role": "assistant", "content": draw(st.text(max_size=12))}
    if reasoning := draw(st.text(max_size=12)):
        message["reasoning_content"] = reasoning
    names = draw(st.lists(st.sampled_from(["bash", "edit", "größe"]), max_size=3))
    if names:
        message["tool_calls"] = [
            {"id": f"call_{index:024x}", "type": "function", "function": {"name": name, "arguments": draw(_arguments)}}
            for index, name in enumerate(names)
        ]
    return message


@st.composite
def cuts(draw, message) -> Sequence[ReplyDelta]:
    """The message in deltas: reasoning first, then content, with the calls anywhere between its pieces."""
    atoms = [("reasoning", char) for char in message.get("reasoning_content", "")]
    rest = [("content", char) for char in message["content"]]
    place = 0
    for call in message.get("tool_calls", ()):
        place = draw(st.integers(place, len(rest)))
        rest.insert(place, ("tool_calls", call))
        place += 1
    deltas, current = [], {"reasoning": "", "content": "", "tool_calls": ()}
    order = list(current)
    last = 0
    for kind, atom in atoms + rest:
        if order.index(kind) < last or draw(st.booleans()):
            deltas.append(ReplyDelta(**current))
            current = {"reasoning": "", "content": "", "tool_calls": ()}
        last = order.index(kind)
        current[kind] += (atom,) if kind == "tool_calls" else atom
    return [*deltas, ReplyDelta(**current)]


def meaning(message):
    """The message with its arguments as values: clients write them anew."""
    calls = [call | {"function": _meant(call["function"])} for call in message.get("tool_calls", ())]
    return {**message, "tool_calls": calls}


def _meant(function):
    try:
        return {"name": function["name"], "value": json.loads(function["arguments"])}
    except ValueError:
        return function


def reply_of(*found, finish_reason=FinishReason.STOP, stop_sequence=None, logprobs=()) -> ModelReply:
    """An answer with one choice per message."""
    choices = [
        Choice(
            message=message,
            finish_reason=finish_reason,
            stop_sequence=stop_sequence,
            num_sampled=7,
            logprobs=logprobs,
        )
        for message in found
    ]
    head = ReplyHead(id="ab12", created_s=1.0, model="m", num_prompt=100)
    return ModelReply(head=head, num_cached=60, choices=choices)
