"""The client of SGLang's wire against a server that speaks it: pauses, restarts, caches of old weights, grammars."""

import asyncio
from contextlib import aclosing, asynccontextmanager

import pytest

from manege.engine.base import Constraint, Sampling, Weights, collect
from manege.engine.constraints import Grammars, json_constraint
from manege.engine.http1 import AGAIN_S, CHECK_S, MAX_FAILED, QUIET_S
from manege.engine.scripted import ScriptedEngine, hashed_reply
from manege.engine.sglang import SglangEngine
from manege.errors import EngineAwayError, EngineError, ProtocolError
from manege.gateway.server import Server
from manege.model.folder import open_folder
from manege.types import FinishReason, PolicyVersion
from tests.conftest import TINY_MODEL
from tests.sglang_wire import SglangServer

pytestmark = pytest.mark.anyio

FOLDER = open_folder(str(TINY_MODEL))
PROMPT = [5, 6, 7]
LONG = Sampling(max_new_tokens=200)
NEW = Weights(kind="folder", folder="/weights")
LONGER_THAN_A_HANG_S = QUIET_S + MAX_FAILED * (CHECK_S + AGAIN_S) + 1
LARK = Constraint(grammar='start: "yes" | "no"')


@asynccontextmanager
async def serving(*, port=0, incremental=True, **options):
    """A server, and its address."""
    grammars = Grammars(FOLDER.tokenizer, vocab_size=FOLDER.tokenizer.get_vocab_size(), eos_ids=FOLDER.eos_ids)
    reply = hashed_reply(num_tokens=5_000, first_id=64, last_id=89)
    engine = ScriptedEngine(reply, decode=FOLDER.tokenizer.decode, grammars=grammars, token_delay_s=0.002)
    made = SglangServer(engine, decode=FOLDER.tokenizer.decode, context_limit=2048, incremental=incremental, **options)
    async with Server(made.app, port=port) as server:
        yield made, server.url
    await engine.close()


@pytest.fixture
async def server():
    async with serving() as (made, url):
        made.url, client = url, SglangEngine(url)
        yield made, client
        await client.close()


async def update(client, version, *, keep=False):
    await client.pause(keep=keep)
    await client.load(NEW, PolicyVersion(version))
    await client.resume()


async def answer_over(client, *changes):
    """One long answer, with each change made when some tokens of it have come."""
    async with aclosing(client.generate(PROMPT, LONG)) as chunks:
        seen = [await anext(chunks)]
        for change in changes:
            await change()
            for _ in range(5):
                seen.append(await anext(chunks))
        seen += [chunk async for chunk in chunks]
    assert sum(len(chunk.ids) for chunk in seen) == 200
    told = [(chunk.version, chunk.old_cache) for chunk in seen if chunk.ids]
    return sorted(set(told), key=told.index)


@pytest.mark.parametrize("incremental", [True, False])
async def test_an_answer_goes_on_after_an_update_with_nothing_of_the_old_cache(incremental):
    async with serving(incremental=incremental) as (made, url):
        client = SglangEngine(url)
        assert await answer_over(client, lambda: update(client, 4)) == [(0, False), (4, False)]
        assert [body["extra_key"] for body in made.bodies] == ["version 0", "version 4"]
        assert made.bodies[1]["input_ids"][:3] == PROMPT
        assert len(made.bodies[1]["input_ids"]) > 3
        await client.close()


async def test_a_kept_answer_says_that_its_cache_is_old_until_an_update_flushes_it(server):
    made, client = server
    changes = [lambda: update(client, 1, keep=True), lambda: update(client, 2), lambda: update(client, 3, keep=True)]
    assert await answer_over(client, *changes) == [(0, False), (1, True), (2, False), (3, True)]
    # Only the update that flushed the cache made a new request.
    assert len(made.bodies) == 2


@pytest.mark.full
async def test_a_server_that_is_paused_is_not_taken_for_one_that_hangs(server):
    _, client = server
    async with aclosing(client.generate(PROMPT, LONG)) as chunks:
        await anext(chunks)
        await client.pause(keep=True)
        waiting = asyncio.create_task(collect(chunks))
        await asyncio.sleep(LONGER_THAN_A_HANG_S)
        assert not waiting.done()
        await client.resume()
        await waiting


async def test_a_restarted_server_gets_its_weights_again_before_it_answers():
    async with serving() as (_, url):
        port = int(url.rpartition(":")[2])
        client = SglangEngine(url)
        await update(client, 6)
        await collect(client.generate(PROMPT, Sampling(max_new_tokens=2)))
    with pytest.raises(EngineAwayError):
        await collect(client.generate(PROMPT, Sampling(max_new_tokens=2)))
    async with serving(port=port) as (made, _):
        answer = await collect(client.generate(PROMPT, Sampling(max_new_tokens=2)))
        assert [span.version for span in answer.spans] == [6]
        assert (made.weight_version, made.model_path) == ("6", "/weights")
        await client.close()


async def test_weights_that_others_gave_are_known_by_their_version(server):
    made, client = server
    assert (await client.info()).version == 0
    await made.engine.load(NEW, PolicyVersion(9))
    made.weight_version = "9"
    assert (await client.info()).version == 9


async def test_weights_whose_cache_cannot_be_flushed_are_an_error(server):
    made, client = server
    another = SglangEngine(made.url)
    async with aclosing(client.generate(PROMPT, LONG)) as chunks:
        await anext(chunks)
        await another.pause(keep=True)
        with pytest.raises(EngineError, match="the cache was not flushed"):
            await client.load(NEW, PolicyVersion(1))
        await another.resume()
    await another.close()


async def test_a_grammar_goes_only_to_a_backend_that_reads_it():
    async with serving(grammar_backend="xgrammar") as (_, url):
        client = SglangEngine(url)
        with pytest.raises(ProtocolError, match="--grammar-backend llguidance"):
            await collect(client.generate(PROMPT, Sampling(max_new_tokens=5, constraint=LARK)))
        schema = json_constraint({"type": "object", "properties": {}, "additionalProperties": False})
        sampling = Sampling(max_new_tokens=9, constraint=schema, stop_ids=FOLDER.eos_ids)
        text = FOLDER.tokenizer.decode((await collect(client.generate(PROMPT, sampling))).ids_R.tolist())
        assert text.split() == ["{}"]
        await client.close()


async def test_a_constrained_answer_that_is_cut_begins_anew(server):
    made, client = server
    constraint = Constraint(grammar='start: "yes " /[a-z]{80,90}/')
    reading = asyncio.create_task(
        collect(client.generate(PROMPT, Sampling(max_new_tokens=150, constraint=constraint, stop_ids=FOLDER.eos_ids)))
    )
    while not made.num_running:
        await asyncio.sleep(0.005)
    await asyncio.sleep(0.02)
    await update(client, 2)
    answer = await reading
    assert FOLDER.tokenizer.decode(answer.ids_R.tolist()).startswith("yes ")
    assert [span.version for span in answer.spans] == [2]
    assert [body["input_ids"] for body in made.bodies] == [PROMPT, PROMPT]


async def test_too_many_stop_strings_are_the_callers_mistake(server):
    _, client = server
    with pytest.raises(ProtocolError, match="at most 32 stop strings"):
        await collect(client.generate(PROMPT, Sampling(max_new_tokens=2, stop_strings=["x" * i for i in range(1, 40)])))


async def test_a_server_that_is_none_is_said_to_be_none():
    async with serving() as (made, url):
        made.app.router.routes[:] = [route for route in made.app.router.routes if route.path != "/model_info"]
        client = SglangEngine(url)
        with pytest.raises(EngineError, match=r"must be SGLang, 0\.5\.6 or newer"):
            await client.info()
        await client.close()


async def test_the_load_is_what_the_server_says(server):
    _, client = server
    info = await client.info()
    assert (info.num_waiting, info.cache_usage, info.context_limit) == (0, 0.25, 2042)


async def test_an_answer_that_is_left_is_not_sampled_to_its_end(server):
    made, client = server
    async with aclosing(client.generate(PROMPT, LONG)) as chunks:
        await anext(chunks)
        assert made.num_running == 1
    async with asyncio.timeout(5):
        while made.num_running:
            await asyncio.sleep(0.01)
    assert (await collect(client.generate(PROMPT, Sampling(max_new_tokens=3)))).finish_reason is FinishReason.LENGTH
