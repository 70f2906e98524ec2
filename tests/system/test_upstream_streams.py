"""Streams of engines that are not ours, over a real socket: every cut of vLLM's events, and answers that are none."""

import asyncio
import json
import re
from contextlib import asynccontextmanager

import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from manege.engine.base import Constraint, Sampling, Weights, collect
from manege.engine.constraints import json_constraint
from manege.engine.upstream import UpstreamEngine
from manege.errors import EngineError
from manege.gateway.server import Server
from manege.types import FinishReason, PolicyVersion

pytestmark = pytest.mark.anyio

PROMPT = [5, 6, 7]


@asynccontextmanager
async def upstream_of(app):
    async with Server(app) as server:
        engine = UpstreamEngine(server.url)
        try:
            yield engine
        finally:
            await engine.close()


def tokens(*ids, wire="tokens", **fields):
    """An event as vLLM streams it; the log-probability of a token is -id / 8."""
    logprobs = [-id / 8 for id in ids]
    if wire == "tokens":
        shape = {"content": [{"token_id": id, "logprob": -id / 8, "rank": 1, "top_logprobs": []} for id in ids]}
    else:
        shape = {"tokens": [str(id) for id in ids], "token_logprobs": logprobs, "top_logprobs": [], "text_offset": []}
        fields = {"text": "x" * len(ids), **fields}
    choice = {"index": 0, "token_ids": list(ids), "logprobs": shape, "finish_reason": None, **fields}
    return {"object": "text_completion", "choices": [choice]}


def usage(num_sampled, num_cached=0):
    details = {"prompt_tokens_details": {"cached_tokens": num_cached}}
    return {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": num_sampled, **details}}


def stream_of(*events):
    data = [event if isinstance(event, str) else json.dumps(event) for event in events]
    return "".join(f"data: {text}\n\n" for text in data)


def engine_that_answers(make_answer, *, path="/inference/v1/generate", version="default"):
    """An engine of vLLM's routes; `make_answer(request)` gives the response."""

    async def models(request):
        return JSONResponse({"data": [{"id": "m", "max_model_len": 64}]})

    async def weight_info(request):
        return JSONResponse({"weight_version": version})

    async def answer(request):
        return await make_answer(request)

    async def accept(request):
        return JSONResponse({})

    posts = [path, "/collective_rpc", "/reset_prefix_cache", "/update_weight_version"]
    routes = [Route("/v1/models", models), Route("/weight_info", weight_info)]
    routes += [Route(post, answer if post == path else accept, methods=["POST"]) for post in posts]
    return Starlette(routes=routes)


def streaming(body, media_type="text/event-stream", **options):
    async def make_answer(request):
        return Response(body, media_type=media_type)

    return engine_that_answers(make_answer, **options)


DONE = "[DONE]"
CUTS = {"one by one": [1] * 6, "1, 3, 2": [1, 3, 2], "all at once": [6], "an empty one between": [2, 0, 4]}


@pytest.mark.parametrize("wire", ["tokens", "text"])
@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS.keys())
async def test_every_cut_of_a_stream_gives_the_same_arrays(wire, cuts):
    ids = [11, 12, 13, 14, 15, 16]
    parts, start = [], 0
    for size in cuts:
        parts.append(tokens(*ids[start : start + size], wire=wire))
        start += size
    parts[-1]["choices"][0]["finish_reason"] = "stop"
    parts[0]["choices"][0]["prompt_token_ids"] = list(range(100_000))  # longer than any buffer of a line
    body = stream_of({"choices": []}, *parts, usage(6, num_cached=2), DONE)
    path = "/inference/v1/generate" if wire == "tokens" else "/v1/completions"
    async with upstream_of(streaming(body, path=path, version="4")) as engine:
        found = await collect(engine.generate(PROMPT, Sampling(max_new_tokens=9)))
    assert found.ids_R.tolist() == ids
    assert found.logprobs_R.tolist() == [-id / 8 for id in ids]
    assert (found.finish_reason, found.num_cached) == (FinishReason.STOP, 2)
    assert [(span.first_token, span.version) for span in found.spans] == [(0, 4)]


NO_LOGPROBS = {"logprobs": None}
BROKEN = {
    "no ids": (stream_of({"choices": [{"text": "Hi", "finish_reason": "stop"}]}), "answered no token ids"),
    "ids without log-probabilities": (stream_of(tokens(1, 2, **NO_LOGPROBS)), "2 token ids and 0 log-probabilities"),
    "too few log-probabilities": (stream_of(tokens(1, token_ids=[1, 2])), "2 token ids and 1 log-probabilities"),
    "a log-probability that is not known": (stream_of(tokens(8 * 9999)), "does not know the log-probability"),
    "an error in the stream": (
        stream_of(tokens(1), {"error": {"message": "no memory left", "code": 500}}, DONE),
        "failed during an answer.*no memory left",
    ),
    "nothing": ("", "after 0 tokens without a finish reason"),
    "a stream that is cut": (stream_of(tokens(1), tokens(2))[:-40], "after 1 tokens without a finish reason"),
    "a list": (stream_of([1, 2]), "not vLLM's.*AttributeError.*1, 2"),
    "no JSON": (stream_of("<html>"), "no JSON: <html>"),
    "choices that are none": (stream_of({"choices": "abc"}), "not vLLM's"),
    "a finish reason of its own": (stream_of(tokens(1, finish_reason="bored")), "not vLLM's.*bored"),
    "fewer tokens than it counts": (
        stream_of(tokens(1, finish_reason="stop"), usage(2), DONE),
        "counts 2 sampled tokens but streamed 1",
    ),
}


@pytest.mark.parametrize(("body", "message"), BROKEN.values(), ids=BROKEN.keys())
async def test_a_stream_that_is_no_whole_answer_is_an_error_that_says_why(body, message):
    async with upstream_of(streaming(body)) as engine:
        with pytest.raises(EngineError, match=message):
            await collect(engine.generate(PROMPT, Sampling(max_new_tokens=9)))


@pytest.mark.parametrize(
    ("body", "media_type"),
    [
        ("<html>Bad gateway</html>", "text/html"),
        ("<html>\n</html>\n", "text/event-stream"),
        ("[1, 2]", "application/json"),
    ],
    ids=["HTML", "HTML that says it were events", "a list"],
)
async def test_an_answer_that_is_no_stream_is_an_error_that_shows_it(body, media_type):
    async with upstream_of(streaming(body, media_type)) as engine:
        with pytest.raises(EngineError, match=f"not a stream of events: {re.escape(body[:6])}"):
            await collect(engine.generate(PROMPT, Sampling(max_new_tokens=9)))


async def test_a_connection_that_breaks_in_the_middle_is_an_error():
    async def make_answer(request):
        async def parts():
            yield stream_of(tokens(1))
            await asyncio.sleep(0.05)
            raise ConnectionAbortedError

        return StreamingResponse(parts(), media_type="text/event-stream")

    async with upstream_of(engine_that_answers(make_answer)) as engine:
        chunks = engine.generate(PROMPT, Sampling(max_new_tokens=9))
        assert (await anext(chunks)).ids == [1]
        with pytest.raises(EngineError, match="closed the connection before its answer was complete"):
            await anext(chunks)


async def test_tokens_have_the_version_that_was_in_use_when_they_came():
    go_on = asyncio.Event()

    async def make_answer(request):
        async def parts():
            yield stream_of(tokens(1), tokens(2))
            await go_on.wait()
            spans = [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 4}]
            yield stream_of(tokens(3), tokens(4, finish_reason="stop", weight_versions=spans), usage(4), DONE)

        return StreamingResponse(parts(), media_type="text/event-stream")

    async with upstream_of(engine_that_answers(make_answer, version="3")) as engine:
        chunks = engine.generate(PROMPT, Sampling(max_new_tokens=9))
        seen = [await anext(chunks)]
        # The second token has come but is not taken yet.
        await engine.load(Weights(kind="folder", folder="/weights"), PolicyVersion(4))
        go_on.set()
        seen += [chunk async for chunk in chunks]
    assert [(chunk.ids, chunk.version) for chunk in seen if chunk.ids] == [([1], 3), ([2], 3), ([3], 4), ([4], 4)]


async def test_weights_that_changed_behind_the_clients_back_are_an_error_once():
    asked = []

    async def make_answer(request):
        asked.append(request)
        spans = [{"version": "9", "start": 0, "end": 1}]
        return Response(
            stream_of(tokens(1, finish_reason="stop", weight_versions=spans)), media_type="text/event-stream"
        )

    async def weight_info(request):
        return JSONResponse({"weight_version": "9" if asked else "8"})

    app = engine_that_answers(make_answer)
    app.router.routes.insert(0, Route("/weight_info", weight_info))
    async with upstream_of(app) as engine:
        with pytest.raises(EngineError, match="token 0 with weights '9', but its client knew of 8"):
            await collect(engine.generate(PROMPT, Sampling(max_new_tokens=9)))
        found = await collect(engine.generate(PROMPT, Sampling(max_new_tokens=9)))
    assert [span.version for span in found.spans] == [9]


async def test_what_is_asked_of_vllm():
    bodies = []

    async def make_answer(request):
        bodies.append(await request.json())
        return Response(stream_of(tokens(1, finish_reason="stop"), DONE), media_type="text/event-stream")

    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    async with upstream_of(engine_that_answers(make_answer)) as engine:
        for constraint in (None, json_constraint(schema), Constraint(grammar='start: "a"')):
            await collect(engine.generate(PROMPT, Sampling(max_new_tokens=100, seed=5, constraint=constraint)))
    free, as_json, as_grammar = (body["sampling_params"] for body in bodies)
    assert {"max_tokens": 61, "seed": 5, "logprobs": 0}.items() <= free.items()
    assert "structured_outputs" not in free
    assert as_json["structured_outputs"] == {"json": schema}
    assert as_grammar["structured_outputs"] == {"grammar": 'start: "a"'}
    assert all(body["stream"] and body["stream_options"] == {"include_usage": True} for body in bodies)
