"""Calls as bytes and back, whatever they share, and bodies that are not whole."""

import re
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manege.errors import ProtocolError
from manege.store.wire import decode_calls, encode_calls
from manege.types import RolloutId
from tests.stored_calls import FORESTS, arrays, linear

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "calls-format.md"


@given(st.lists(FORESTS, max_size=3))
def test_calls_come_back_as_they_were(forests):
    rollouts = {RolloutId(f"r{number}"): forest for number, forest in enumerate(forests)}
    found = decode_calls(encode_calls({key: stored for key, (stored, _) in rollouts.items()}))
    assert list(found) == list(rollouts)
    for key, (_, whole) in rollouts.items():
        assert [arrays(call) for call in found[key]] == [arrays(call) for call in whole]
        assert [everything_else(call) for call in found[key]] == [everything_else(call) for call in whole]


def everything_else(call):
    names = [name for name in call.__slots__ if not name.endswith(("_P", "_R"))]
    return {name: getattr(call, name) for name in names}


def test_conversations_are_views_of_the_body():
    names = ["first", "second"]
    body = encode_calls({name: linear(([1, 2], [3]), ([4], [5, 6]), ([7], [8]), name=name) for name in names})
    memory = np.frombuffer(body, np.uint8)
    found = decode_calls(body)
    for calls in found.values():
        assert calls[2].prompt_ids_P.tolist() == [1, 2, 3, 4, 5, 6, 7]
        for array in [each for call in calls for each in (call.prompt_ids_P, call.response_ids_R, call.logprobs_R)]:
            assert np.shares_memory(array, memory)
            assert not array.flags.writeable


def test_calls_of_two_conversations_that_were_answered_in_turns_are_views_too():
    one, other = linear(([1], [2]), ([3], [4])), linear(([5], [6]), ([7], [8]))
    mixed = [one[0], other[0], replace(one[1], base=0), replace(other[1], base=1)]
    body = encode_calls({"r": mixed})
    calls = decode_calls(body)["r"]
    assert [call.prompt_ids_P.tolist() for call in calls] == [[1], [5], [1, 2, 3], [5, 6, 7]]
    assert all(np.shares_memory(call.prompt_ids_P, np.frombuffer(body, np.uint8)) for call in calls)


def test_a_conversation_costs_its_tokens_once():
    turns = [(list(range(1000)), [1] * 50)] + [(list(range(100)), [1] * 50)] * 29
    num_tokens = sum(len(new) + len(response) for new, response in turns)
    body = encode_calls({"r": linear(*turns)})
    header = struct.unpack("<8sQQ", body[:24])[2]
    assert header % 8 == 0
    assert len(body) == 24 + header + 4 * num_tokens + 4 * 30 * 50


@given(FORESTS, st.data())
def test_a_body_that_was_cut_or_goes_on_is_refused(forest, data):
    body = encode_calls({"r": forest[0]})
    cut = data.draw(st.integers(0, len(body) - 1))
    for wrong in (body[:cut], body + b"\0", body + body):
        with pytest.raises(ProtocolError, match=r"ask again|begins with"):
            decode_calls(wrong)


def test_another_version_names_both_and_what_to_do():
    body = bytearray(encode_calls({}))
    body[8] = 2
    with pytest.raises(ProtocolError, match=r"version 2 .* reads version 1; run the gateway and its clients with one"):
        decode_calls(bytes(body))


@pytest.mark.parametrize("answer", [b"", b"MNG", b'{"calls": {"r": []}}', b"<html>no such page</html>"])
def test_an_answer_of_something_else_is_told_so(answer):
    with pytest.raises(ProtocolError, match=r"begins with .* is this the address of a manege gateway"):
        decode_calls(answer)


def changed(**fields):
    def change(rows):
        rows[1] |= fields

    return change


EMPTY = dict.fromkeys(["num_new", "num_sampled", "num_logprobs"], 0)
WRONG = {
    "no base": changed(base=None),
    "later base": changed(base=1),
    "negative base": changed(base=-1),
    "shared beyond the base": changed(num_shared=4),
    "negative shared": changed(num_shared=-1),
    "tokens moved": changed(num_new=-1, num_sampled=3),
    "log-probabilities moved": lambda rows: [row.update(num_logprobs=n) for row, n in zip(rows, (3, -1), strict=True)],
    "tokens as text": changed(num_new="x"),
    "answered twice": changed(answered=0),
    "answered never": changed(answered=2),
    "unknown reason": lambda rows: rows[1]["record"].update(finish_reason="tired"),
    "unknown field": lambda rows: rows[1]["record"].update(colour="red"),
    "missing field": lambda rows: rows[1]["record"].pop("mode"),
    "missing row field": lambda rows: rows[1].pop("base"),
    "chain torn apart": lambda rows: rows.insert(1, {**rows[0], **EMPTY, "answered": 2}),
}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG)
def test_a_header_that_cannot_be_is_refused(change):
    body = with_header(encode_calls({"r": linear(([1, 2], [3]), ([4], [5]))}), change)
    with pytest.raises(ProtocolError, match="header of the calls is not as version 1"):
        decode_calls(body)


def with_header(body, change):
    length = struct.unpack("<8sQQ", body[:24])[2]
    header = orjson.loads(body[24 : 24 + length])
    change(header["r"])
    text = orjson.dumps(header)
    return struct.pack("<8sQQ", b"MNGCALLS", 1, len(text)) + text + body[24 + length :]


@given(FORESTS)
def test_the_reader_of_the_reference_page_reads_it(forest):
    """Written by hand for other languages, it knows nothing of ours."""
    stored, whole = forest
    code = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[1]
    names = {}
    exec(code, names)
    found = names["read_calls"](encode_calls({"r": stored}))["r"]
    for read, call in zip(found, whole, strict=True):
        assert read["record"]["id"] == call.id
        for name, array in zip(("prompt", "response", "logprobs"), arrays(call), strict=True):
            assert (read[name].tobytes(), read[name].dtype) == array
