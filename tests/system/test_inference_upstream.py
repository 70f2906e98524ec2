"""The client and the server of the token wire, over a real socket."""

import asyncio
import json
from contextlib import aclosing, asynccontextmanager

import anyio
import httpx
import pytest

from manege.engine.base import Sampling, Weights, collect
from manege.engine.scripted import ScriptedEngine, hashed_reply
from manege.engine.server import engine_app
from manege.engine.upstream import UpstreamEngine
from manege.errors import ContextOverflowError, EngineError
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


@pytest.fixture
async def direct():
    made = ScriptedEngine(hashed_reply(num_tokens=40, first_id=10, last_id=99), context_limit=64, token_delay_s=0.002)
    yield made
    await made.close()


@pytest.fixture
def app(direct):
    return engine_app(direct, encode=lambda text: [ord(letter) for letter in text], decode=lambda ids: str(list(ids)))


def without(app, path):
    app.router.routes[:] = [route for route in app.router.routes if route.path != path]
    return app


async def until(condition):
    with anyio.fail_after(5):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("has_token_wire", [True, False], ids=["token wire", "text completions"])
async def test_upstream_gives_what_the_engine_behind_it_sampled(app, direct, has_token_wire):
    sampling = Sampling(max_new_tokens=30, stop_ids=frozenset({3}))
    expected = await collect(direct.generate(PROMPT, sampling))
    async with upstream_of(app if has_token_wire else without(app, "/inference/v1/generate")) as engine:
        found = await collect(engine.generate(PROMPT, sampling))
    assert found.ids_R.tolist() == expected.ids_R.tolist()
    assert found.logprobs_R.tolist() == expected.logprobs_R.tolist()
    assert (found.spans, found.finish_reason) == (expected.spans, FinishReason.LENGTH)


@pytest.mark.parametrize("is_paused", [False, True], ids=["while sampling", "while paused"])
async def test_closing_the_iterator_stops_the_engine_behind_it(app, direct, is_paused):
    async with upstream_of(app) as engine:
        async with aclosing(engine.generate(PROMPT, Sampling(max_new_tokens=50))) as chunks:
            await anext(chunks)
            assert direct.num_running == 1
            if is_paused:
                await direct.pause()
        with anyio.fail_after(1):
            await until(lambda: direct.num_running == 0)


async def test_cancelling_a_reader_that_has_no_token_yet_stops_the_engine_behind_it(app, direct):
    await direct.pause()
    async with upstream_of(app) as engine:
        reading = asyncio.create_task(collect(engine.generate(PROMPT, Sampling(max_new_tokens=50))))
        await until(lambda: direct.num_running == 1)
        reading.cancel()
        with anyio.fail_after(1):
            await until(lambda: direct.num_running == 0)


async def test_weights_change_in_the_middle_of_an_answer(app, direct):
    async with upstream_of(app) as engine:
        chunks = engine.generate(PROMPT, Sampling(max_new_tokens=50))
        first = await anext(chunks)
        await engine.pause(keep=True)
        assert (await engine.info()).paused
        await engine.load(Weights(kind="folder", folder="/weights"), PolicyVersion(7))
        assert direct.num_running == 1
        await engine.resume()
        rest = await collect(chunks)
        assert [first.version, *(span.version for span in rest.spans)] in ([0, 7], [0, 0, 7])
        assert (await engine.info()).version == 7


async def test_weights_in_memory_cannot_be_sent(app):
    async with upstream_of(app) as engine:
        with pytest.raises(EngineError, match="publish a folder"):
            await engine.load(Weights(kind="shared"), PolicyVersion(1))


async def test_version_is_read_from_an_engine_that_is_older_than_its_client(app, direct):
    await direct.load(Weights(kind="folder", folder="/weights"), PolicyVersion(3))
    async with upstream_of(app) as engine:
        info = await engine.info()
    assert (info.model, info.context_limit, info.version) == ("scripted", 64, 3)


async def test_prompt_beyond_the_context(app):
    async with upstream_of(app) as engine:
        with pytest.raises(ContextOverflowError):
            await collect(engine.generate([5] * 64, Sampling(max_new_tokens=1)))


async def test_engine_that_is_not_there():
    engine = UpstreamEngine("http://127.0.0.1:9")
    try:
        with pytest.raises(EngineError, match="cannot be reached"):
            await engine.info()
    finally:
        await engine.close()


async def test_engine_that_fails_behind_its_server(app, direct):
    async with upstream_of(app) as engine:
        await engine.info()
        await direct.close()
        with pytest.raises(EngineError, match=r"answered 502: .*engine is closed"):
            await collect(engine.generate(PROMPT, Sampling(max_new_tokens=1)))


async def test_connections_are_used_again(app, direct):
    ports = set()

    async def noting(scope, receive, send):
        ports.add(scope["client"][1])
        await app(scope, receive, send)

    async with upstream_of(noting) as engine:
        for _ in range(5):
            await collect(engine.generate(PROMPT, Sampling(max_new_tokens=2)))
    assert len(ports) == 1


async def test_an_engine_that_fails_during_an_answer_says_so_through_the_stream(app, direct):
    async with upstream_of(app) as engine:
        chunks = engine.generate(PROMPT, Sampling(max_new_tokens=40))
        await anext(chunks)
        await direct.close()
        with pytest.raises(EngineError, match=r"failed during an answer.*closed during a generation"):
            await collect(chunks)


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/inference/v1/generate", "[]", "send an object"),
        ("/inference/v1/generate", "{", "not valid JSON"),
        ("/inference/v1/generate", "{}", "token_ids is None"),
        ("/inference/v1/generate", '{"token_ids": [1], "sampling_params": {"temperature": "hot"}}', "cannot be read"),
        ("/v1/completions", '{"prompt": [1], "structured_outputs": {"choice": ["a"]}}', "structured_outputs is"),
        ("/pause?mode=freeze", "{}", "want abort, wait or keep"),
        ("/collective_rpc", '{"method": "sleep"}', "only reload_weights"),
        ("/update_weight_version", '{"new_version": "1"}', "no weights to load"),
    ],
)
async def test_server_refuses_nonsense_clearly(app, path, body, message):
    async with Server(app) as server, httpx.AsyncClient(base_url=server.url, trust_env=False) as http:
        response = await http.post(path, content=body)
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]


async def test_text_prompt_is_served_too(app):
    async with Server(app) as server, httpx.AsyncClient(base_url=server.url, trust_env=False) as http:
        body = {"prompt": "Hi", "max_tokens": 2, "return_token_ids": True}
        response = await http.post("/v1/completions", json=body)
    choice = response.json()["choices"][0]
    assert choice["prompt_token_ids"] == [72, 105]
    assert choice["text"] == str(choice["token_ids"])


async def test_streamed_text_never_breaks_a_character():
    text = "naïve 日本語 🙂 ok"
    engine = ScriptedEngine(lambda prompt: list(text.encode()), chunk_size=2)
    app = engine_app(engine, encode=list, decode=lambda ids: bytes(ids).decode(errors="replace"))
    async with Server(app) as server, httpx.AsyncClient(base_url=server.url, trust_env=False) as http:
        body = {"prompt": [1], "max_tokens": 100, "stream": True}
        response = await http.post("/v1/completions", json=body)
    *events, done = response.text.strip().split("\n\n")
    parts = [json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events]
    assert ("".join(parts), done) == (text, "data: [DONE]")
    assert len(parts) > 10


async def test_an_engine_that_was_restarted_gets_its_last_weights_again_from_who_gave_them_and_no_older_ones(
    app, direct
):
    async with Server(app) as server:
        first, second = UpstreamEngine(server.url), UpstreamEngine(server.url)
        await first.load(Weights(kind="folder", folder="/one"), PolicyVersion(1))
        await direct.load(Weights(kind="folder", folder="/begin"), PolicyVersion(0))
        assert (await first.info()).version == (await direct.info()).version == 1
        await second.load(Weights(kind="folder", folder="/two"), PolicyVersion(2))
        assert (await first.info()).version == 2
        await direct.load(Weights(kind="folder", folder="/begin"), PolicyVersion(0))
        assert (await first.info()).version == (await direct.info()).version == 0
        assert (await second.info()).version == (await direct.info()).version == 2
        await first.close()
        await second.close()
