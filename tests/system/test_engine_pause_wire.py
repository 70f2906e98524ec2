"""vLLM's pause on the wire, from both sides: what our server does for each mode, and what our client makes of a server
that answers as vLLM does."""

import asyncio
import json
from contextlib import asynccontextmanager

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from manege.engine.base import Sampling, Weights, collect
from manege.engine.constraints import json_constraint
from manege.engine.scripted import ScriptedEngine, hashed_reply
from manege.engine.server import engine_app
from manege.engine.upstream import UpstreamEngine
from manege.errors import EngineError
from manege.gateway.server import Server
from manege.types import FinishReason, PolicyVersion
from tests.system.test_upstream_streams import DONE, stream_of, tokens, usage

pytestmark = pytest.mark.anyio

PROMPT = [5, 6, 7]
SHORT = Sampling(max_new_tokens=4, seed=9)
NEW = Weights(kind="folder", folder="/weights")
OBJECT = json_constraint({"type": "object"})


# ---- Our server.


@asynccontextmanager
async def served(num_tokens=100):
    engine = ScriptedEngine(hashed_reply(num_tokens=num_tokens, first_id=97, last_id=122), token_delay_s=0.002)
    app = engine_app(engine, encode=list, decode=str)
    async with Server(app) as server, httpx.AsyncClient(base_url=server.url, trust_env=False, timeout=20) as http:
        yield http, engine


def ask(http, **fields):
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 1000}, **fields}
    return asyncio.create_task(http.post("/inference/v1/generate", json=body))


async def until(condition):
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.002)


def choices_of(response):
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    return [choice for event in events for choice in event["choices"]]


@pytest.mark.parametrize("query", ["", "?mode=abort"], ids=["vLLM's default", "asked for"])
async def test_abort_ends_running_answers_with_what_they_have_and_holds_new_ones(query):
    async with served() as (http, engine):
        whole, streamed = ask(http), ask(http, stream=True)
        await until(lambda: engine.num_running == 2)
        await asyncio.sleep(0.02)
        assert (await http.post(f"/pause{query}")).json() == {"status": "paused"}
        choice = (await whole).json()["choices"][0]
        assert choice["finish_reason"] == "abort"
        assert 0 < len(choice["token_ids"]) < 100
        *parts, last = choices_of(await streamed)
        assert 0 < sum(len(part["token_ids"]) for part in parts) < 100
        assert (last["finish_reason"], last["token_ids"]) == ("abort", [])
        late = ask(http)
        await asyncio.sleep(0.05)
        assert not late.done()
        await http.post("/resume")
        assert (await late).json()["choices"][0]["finish_reason"] == "stop"


async def test_wait_lets_running_answers_end_and_holds_new_ones():
    async with served() as (http, engine):
        running = ask(http)
        await until(lambda: engine.num_running == 1)
        pausing = asyncio.create_task(http.post("/pause?mode=wait"))
        await asyncio.sleep(0.02)
        late = ask(http)
        assert (await http.get("/is_paused")).json() == {"is_paused": True}
        await pausing
        assert running.done() or (await asyncio.wait_for(running, 1))
        assert running.result().json()["choices"][0]["finish_reason"] == "stop"
        await asyncio.sleep(0.05)
        assert not late.done()
        await http.post("/resume")
        assert len((await late).json()["choices"][0]["token_ids"]) == 100


async def test_a_resume_before_the_last_answer_has_ended_takes_a_wait_back():
    async with served() as (http, engine):
        running = ask(http)
        await until(lambda: engine.num_running == 1)
        pausing = asyncio.create_task(http.post("/pause?mode=wait"))
        await asyncio.sleep(0.02)
        await http.post("/resume")
        await asyncio.gather(running, pausing)
        assert (await http.get("/is_paused")).json() == {"is_paused": False}


@pytest.mark.parametrize(("query", "is_old"), [("", False), ("&clear_cache=true", False), ("&clear_cache=false", True)])
async def test_keep_leaves_answers_connected_and_clears_their_cache_unless_told_otherwise(query, is_old):
    async with served() as (http, engine):
        streamed = ask(http, stream=True)
        await until(lambda: engine.num_running == 1)
        await asyncio.sleep(0.02)
        await http.post(f"/pause?mode=keep{query}")
        await engine.load(NEW, PolicyVersion(3))
        await http.post("/resume")
        choices = choices_of(await streamed)
    assert sum(len(choice["token_ids"]) for choice in choices) == 100
    assert [choice.get("old_cache", False) for choice in choices] == [
        is_old and choice["weight_version"] == "3" for choice in choices
    ]
    assert choices[-1]["weight_version"] == "3"


async def test_metrics_have_vllms_names():
    async with served() as (http, engine):
        running = ask(http)
        await until(lambda: engine.num_running == 1)
        text = (await http.get("/metrics")).text
        running.cancel()
    assert "\nvllm:num_requests_running 1\n" in text
    assert "\nvllm:num_requests_waiting 0\n" in text
    assert "\nvllm:kv_cache_usage_perc 0.0\n" in text


# ---- A server like vLLM.


class Vllm:
    """Answers each request with the next of `answers`, bodies of events, and notes what it was asked."""

    def __init__(self, *answers, has_pause=True, metrics=None):
        self.answers, self.bodies, self.steered = list(answers), [], []
        self.has_pause, self.metrics = has_pause, metrics
        self.version = "1"

    async def generate(self, request):
        self.bodies.append(await request.json())
        answer = self.answers.pop(0)
        return Response(await answer() if callable(answer) else answer, media_type="text/event-stream")

    async def steer(self, request):
        self.steered.append(f"{request.url.path}?{request.url.query}")
        if request.url.path == "/update_weight_version":
            self.version = (await request.json())["new_version"]
        return JSONResponse({} if self.has_pause else {"detail": "Not Found"}, 200 if self.has_pause else 404)

    async def told(self, request):
        if request.url.path == "/metrics" and self.metrics is not None:
            return PlainTextResponse(self.metrics)
        known = {
            "/v1/models": {"data": [{"id": "m", "max_model_len": 64}]},
            "/weight_info": {"weight_version": self.version},
            **({"/is_paused": {"is_paused": False}} if self.has_pause else {}),
        }
        found = request.url.path in known
        return JSONResponse(known.get(request.url.path, {}), 200 if found else 404)

    @asynccontextmanager
    async def client(self, **options):
        posts = ["/pause", "/resume", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version"]
        posts += ["/sleep", "/wake_up"]
        gets = ["/v1/models", "/weight_info", "/is_paused", "/metrics"]
        routes = [Route(path, self.told) for path in gets]
        routes += [Route(path, self.steer, methods=["POST"]) for path in posts]
        routes.append(Route("/inference/v1/generate", self.generate, methods=["POST"]))
        async with Server(Starlette(routes=routes)) as server:
            engine = UpstreamEngine(server.url, **options)
            yield engine
            await engine.close()


def whole(*ids, finish="stop"):
    return stream_of(tokens(*ids, finish_reason=finish), usage(len(ids)), DONE)


def aborted(*ids):
    """As vLLM's token wire ends an aborted answer: without a word."""
    return stream_of(*(tokens(id) for id in ids), usage(len(ids)), DONE)


async def test_the_rest_of_a_cut_answer_is_asked_for_with_another_seed():
    vllm = Vllm(aborted(11, 12), whole(13, finish="abort"), whole(14, finish="length"))
    async with vllm.client() as engine:
        answer = await collect(engine.generate(PROMPT, SHORT))
    assert (answer.ids_R.tolist(), answer.finish_reason) == ([11, 12, 13, 14], FinishReason.LENGTH)
    assert [body["token_ids"] for body in vllm.bodies] == [PROMPT, [*PROMPT, 11, 12], [*PROMPT, 11, 12, 13]]
    assert [body["sampling_params"]["max_tokens"] for body in vllm.bodies] == [4, 2, 1]
    assert len({body["sampling_params"]["seed"] for body in vllm.bodies}) == 3


async def test_an_answer_that_was_aborted_when_it_was_full_is_whole():
    vllm = Vllm(aborted(11, 12, 13, 14))
    async with vllm.client() as engine:
        answer = await collect(engine.generate(PROMPT, SHORT))
    assert (answer.ids_R.tolist(), answer.finish_reason) == ([11, 12, 13, 14], FinishReason.LENGTH)


async def test_an_answer_that_is_aborted_without_a_token_is_asked_for_again_with_the_same_seed():
    vllm = Vllm(aborted(), whole(11))
    async with vllm.client() as engine:
        answer = await collect(engine.generate(PROMPT, SHORT))
    assert answer.ids_R.tolist() == [11]
    assert vllm.bodies[0] == vllm.bodies[1]


async def test_the_cached_tokens_of_a_cut_answer_are_those_of_its_first_request():
    first = stream_of(tokens(11), usage(1, num_cached=2), DONE)
    second = stream_of(tokens(12, finish_reason="stop"), usage(1, num_cached=4), DONE)
    async with Vllm(first, second).client() as engine:
        assert (await collect(engine.generate(PROMPT, SHORT))).num_cached == 2


async def test_a_constrained_answer_that_is_cut_begins_anew():
    vllm = Vllm(aborted(11, 12), whole(13, 14))
    async with vllm.client() as engine:
        answer = await collect(engine.generate(PROMPT, Sampling(max_new_tokens=4, constraint=OBJECT)))
    assert answer.ids_R.tolist() == [13, 14]
    assert vllm.bodies[0] == vllm.bodies[1]


@pytest.mark.parametrize("constraint", [None, OBJECT], ids=["free", "constrained"])
async def test_an_answer_that_is_aborted_again_and_again_is_an_error(constraint):
    again = aborted() if constraint is None else aborted(11)
    vllm = Vllm(*[again] * 10)
    async with vllm.client() as engine:
        with pytest.raises(EngineError, match="5 times in a row"):
            await collect(engine.generate(PROMPT, Sampling(max_new_tokens=4, constraint=constraint)))
    assert len(vllm.bodies) == 5


async def test_pauses_may_cut_an_answer_as_often_as_they_like():
    vllm = Vllm()
    async with vllm.client() as engine:

        async def cut_by_a_pause():
            await engine.pause()
            await engine.resume()
            return aborted()

        vllm.answers = [*[cut_by_a_pause] * 8, whole(11)]
        assert (await collect(engine.generate(PROMPT, SHORT))).ids_R.tolist() == [11]


async def test_nothing_is_asked_during_a_pause():
    vllm = Vllm(whole(11))
    async with vllm.client() as engine:
        await engine.pause()
        reading = asyncio.create_task(collect(engine.generate(PROMPT, SHORT)))
        await asyncio.sleep(0.05)
        assert not vllm.bodies
        await engine.resume()
        await reading


async def test_a_client_that_is_closed_in_a_pause_says_so_to_who_waits_for_its_end():
    async with Vllm().client() as engine:
        await engine.pause()
        reading = asyncio.create_task(collect(engine.generate(PROMPT, SHORT)))
        await asyncio.sleep(0.05)
        await engine.close()
        with pytest.raises(EngineError, match="closed"):
            await asyncio.wait_for(reading, 5)


@pytest.mark.parametrize(
    ("keep", "path"), [(False, "/pause?mode=abort&clear_cache=true"), (True, "/pause?mode=keep&clear_cache=false")]
)
async def test_a_pause_is_asked_for_in_vllms_words(keep, path):
    vllm = Vllm()
    async with vllm.client() as engine:
        await engine.pause(keep=keep)
    assert vllm.steered == [path]


async def test_a_server_that_cannot_pause_is_an_error_that_says_what_to_do_and_serves_on():
    vllm = Vllm(whole(11), has_pause=False)
    async with vllm.client() as engine:
        for keep in (False, True):
            with pytest.raises(EngineError, match="VLLM_SERVER_DEV_MODE=1"):
                await engine.pause(keep=keep)
        assert not (await engine.info()).paused
        assert (await collect(engine.generate(PROMPT, SHORT))).ids_R.tolist() == [11]


async def test_what_vllm_kept_over_new_weights_has_an_old_cache_and_prefixes_are_told_apart_by_version():
    vllm = Vllm()
    async with vllm.client() as engine:

        async def kept():
            await engine.pause(keep=True)
            await engine.load(NEW, PolicyVersion(2))
            await engine.resume()
            return whole(11, 12)

        vllm.answers = [kept, whole(13)]
        answer = await collect(engine.generate(PROMPT, SHORT))
        after = await collect(engine.generate(PROMPT, SHORT))
    assert [(span.version, span.old_cache) for span in answer.spans] == [(2, True)]
    assert [(span.version, span.old_cache) for span in after.spans] == [(2, False)]
    assert [body["cache_salt"] for body in vllm.bodies] == ["version 1", "version 2"]


METRICS = """# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting{engine="1",model_name="m"} 4.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 7.5e-01
"""


@pytest.mark.parametrize(("metrics", "expected"), [(METRICS, (7, 0.75)), (None, (0, 0.0)), ("", (0, 0.0))])
async def test_pressure_is_read_from_metrics_and_nothing_where_there_are_none(metrics, expected):
    async with Vllm(metrics=metrics).client() as engine:
        info = await engine.info()
    assert (info.num_waiting, info.cache_usage) == expected


async def test_a_server_that_shares_its_gpu_sleeps_in_a_pause_and_wakes_its_weights_first():
    vllm = Vllm()
    async with vllm.client(sleeps=True) as engine:
        await engine.pause()
        await engine.load(NEW, PolicyVersion(2))
        await engine.resume()
        await engine.pause()
        await engine.resume()
        await engine.resume()
        await engine.pause(keep=True)
        await engine.resume()
    paths = [path.rstrip("?") for path in vllm.steered]
    abort, sleep = "/pause?mode=abort&clear_cache=true", "/sleep?level=1&mode=abort"
    loading = ["/wake_up?tags=weights", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version"]
    assert paths == [
        *(abort, sleep, *loading, "/wake_up?tags=kv_cache", "/resume"),
        *(abort, sleep, "/wake_up?tags=weights&tags=kv_cache", "/resume", "/resume"),
        *("/pause?mode=keep&clear_cache=false", "/resume"),
    ]
