"""SGLang's events: whatever way one answer is cut and told, the same chunks come of it; what is none is an error."""

import json

import pytest

from manege.engine.sglang_stream import SglangReader
from manege.errors import EngineError, ProtocolError
from manege.types import FinishReason, PolicyVersion

IDS = [11, 12, 13, 14, 15, 16]
STOP = {"type": "stop", "matched": 16}
ABORT = {"type": "abort", "message": "Aborted", "status_code": None}


def logprob(token):
    return -token / 8


def event(ids, num_all, *, of=None, finish=None, version="3", **meta):
    """`of`: the ids whose log-probabilities it carries; None: its own."""
    entries = [[logprob(token), token, None] for token in (ids if of is None else of)]
    told = {"finish_reason": finish, "completion_tokens": num_all, "weight_version": version, "cached_tokens": 2}
    return json.dumps({"output_ids": ids, "meta_info": {**told, "output_token_logprobs": entries, **meta}}).encode()


def read(*events, is_old_cache=lambda version: False, can_be_refused=False, known=0):
    reader = SglangReader("URL", is_old_cache=is_old_cache, can_be_refused=can_be_refused)
    chunks = [chunk for each in events if (chunk := reader.feed(each, PolicyVersion(known)))]
    return [*chunks, reader.finish()]


def cuts(sizes, *, incremental):
    events, end = [], 0
    for size in sizes:
        start, end = end, end + size
        finish = STOP if end == len(IDS) else None
        events.append(event(IDS[start:end] if incremental else IDS[:end], end, finish=finish))
    return events


@pytest.mark.parametrize("incremental", [True, False], ids=["what is new", "all so far"])
@pytest.mark.parametrize("sizes", [[6], [1, 3, 2], [3, 3], [2, 2, 2], [1] * 6, [5, 1], [0, 6]])
def test_an_answer_is_the_same_however_it_is_cut(sizes, incremental):
    chunks = read(*cuts(sizes, incremental=incremental))
    assert [token for chunk in chunks for token in chunk.ids] == IDS
    assert [value for chunk in chunks for value in chunk.logprobs] == [logprob(token) for token in IDS]
    assert [len(chunk.ids) for chunk in chunks] == [size for size in sizes if size] + [0]
    assert (chunks[-1].finish_reason, chunks[-1].num_cached) == (FinishReason.STOP, 2)


@pytest.mark.parametrize("ids", [IDS[2:3], IDS[:3]], ids=["the last id again", "all again"])
def test_the_end_of_an_aborted_answer_adds_nothing(ids):
    chunks = read(event(IDS[:1], 1), event(IDS[1:3], 3), event(ids, 3, of=IDS[:3], finish=ABORT))
    assert [token for chunk in chunks for token in chunk.ids] == IDS[:3]
    assert chunks[-1].finish_reason is FinishReason.ABORT


def test_an_event_that_ran_ahead_of_its_count_is_taken_once():
    chunks = read(event(IDS[:3], 2), event(IDS[:3], 3), event(IDS, 6, finish=STOP))
    assert [chunk.ids for chunk in chunks] == [IDS[:3], IDS[3:], ()]


def test_a_token_has_the_version_that_its_event_says_and_the_cache_that_it_stands_on():
    spans = [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 6}]
    parts = [event(IDS[:2], 2), event(IDS[2:], 6, version="4", finish=STOP, weight_versions=spans)]
    chunks = read(*parts, is_old_cache=lambda version: version > 3)
    assert [(chunk.version, chunk.old_cache) for chunk in chunks[:2]] == [(3, False), (4, True)]
    assert read(event(IDS, 6, version="default", finish=STOP), known=9)[0].version == 9


def test_versions_that_disagree_at_the_end_are_an_error():
    spans = [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 6}]
    with pytest.raises(EngineError, match="sampled token 1 with weights '4'"):
        read(event(IDS[:2], 2), event(IDS[2:], 6, version="4", finish=STOP, weight_versions=spans))


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        ([event(IDS, 6)], "after 6 tokens without a finish reason"),
        ([event(IDS[:2], 2), event(IDS[4:], 6, finish=STOP)], "some are missing"),
        ([event(IDS, 6, of=IDS[:5], finish=STOP)], "one for one"),
        ([event(IDS, 6, of=[*IDS[:5], 99], finish=STOP)], "one for one"),
        ([event(IDS, 5, finish=STOP)], "counts 5 sampled tokens but streamed 6"),
        ([event(IDS, 6, finish=STOP).replace(b"[-1.375", b"[null")], "does not know the log-probability"),
        ([b"{"], "no JSON"),
        ([b'{"choices": []}'], "not SGLang's"),
        ([b"[1]"], "not SGLang's"),
        ([b'{"error": {"message": "out of memory", "code": 500}}'], "out of memory"),
        ([event([], 0, finish={**ABORT, "status_code": 503, "message": "too slow"})], "503.*too slow"),
        ([event(IDS, 6, finish={"type": "boredom"})], "not SGLang's"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_answer_is_an_error_that_says_why(events, reason):
    with pytest.raises(EngineError, match=reason):
        read(*events)


@pytest.mark.parametrize("refusal", [
    b'{"error": {"message": "bad schema", "code": 400}}',
    event([], 0, finish={**ABORT, "status_code": 400, "message": "bad schema"}),
], ids=["before the answer", "in its last event"])  # fmt: skip
def test_a_refusal_is_the_callers_mistake_only_if_the_caller_asked_for_something(refusal):
    with pytest.raises(ProtocolError, match="bad schema"):
        read(refusal, can_be_refused=True)
    with pytest.raises(EngineError, match="bad schema"):
        read(refusal)
