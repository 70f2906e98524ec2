"""What every Engine must do. A row of ENGINES is an async context manager that yields one.

`upstream` and `sglang` are clients of servers that speak vLLM's and SGLang's wire over an engine of ours; `vllm` is the
real server (`make engine-vllm`). SGLang itself has confirmed nothing yet.
"""

import asyncio
import json
import re
from contextlib import aclosing, asynccontextmanager

import httpx
import numpy as np
import pytest
import torch

from manege.config import EngineConfig
from manege.engine.base import Constraint, Sampling, Weights, collect
from manege.engine.constraints import Grammars, json_constraint
from manege.engine.local import LocalEngine
from manege.engine.scripted import ScriptedEngine, hashed_reply
from manege.engine.server import engine_app
from manege.engine.sglang import SglangEngine
from manege.engine.upstream import UpstreamEngine
from manege.errors import ContextOverflowError, EngineError, ProtocolError
from manege.gateway.server import Server
from manege.model.attend import causal_attend
from manege.model.folder import open_folder
from manege.model.load import load_model
from manege.types import FinishReason, PolicyVersion
from tests.conftest import TINY_MODEL
from tests.sglang_wire import SglangServer

pytestmark = pytest.mark.anyio

FOLDER = open_folder(str(TINY_MODEL))
PROMPT = FOLDER.tokenizer.encode("abc").ids
UNLIMITED = Sampling(max_new_tokens=10_000)
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 5}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
JSON = json_constraint(SCHEMA)
ARGUMENTS = json.dumps({**SCHEMA, "x-guidance": {"whitespace_flexible": False}})
CALL = Constraint(grammar=f'start: "<call>get " /[a-z]{{1,6}}/ " " %json {ARGUMENTS} "</call>"')
WORDS = Constraint(grammar='start: "yes" | "no" ("," /[a-z]+/)?')


@asynccontextmanager
async def local():
    torch.set_num_threads(1)
    engine = LocalEngine(load_model(FOLDER), FOLDER, config=EngineConfig(cache_tokens=4096, threads=1), seed=0)
    yield engine
    await engine.close()


@asynccontextmanager
async def scripted():
    reply = hashed_reply(num_tokens=10_000, first_id=64, last_id=89)
    grammars = Grammars(FOLDER.tokenizer, vocab_size=FOLDER.tokenizer.get_vocab_size(), eos_ids=FOLDER.eos_ids)
    engine = ScriptedEngine(
        reply, decode=FOLDER.tokenizer.decode, grammars=grammars, context_limit=256, token_delay_s=0.001
    )
    yield engine
    await engine.close()


@asynccontextmanager
async def upstream():
    """The scripted engine behind the server and the client of the token wire."""
    async with over_http(scripted) as engine:
        yield engine


@asynccontextmanager
async def over_http(engine_behind):
    async with engine_behind() as behind:
        app = engine_app(behind, encode=lambda text: FOLDER.tokenizer.encode(text).ids, decode=FOLDER.tokenizer.decode)
        async with Server(app) as server:
            engine = UpstreamEngine(server.url)
            yield engine
            await engine.close()


@asynccontextmanager
async def sglang(engine_behind=scripted, **options):
    """The scripted engine behind SGLang's wire, as its source has it: no GPU has confirmed it."""
    async with engine_behind() as behind:
        limit = (await behind.info()).context_limit
        server = SglangServer(behind, decode=FOLDER.tokenizer.decode, context_limit=limit, **options)
        async with Server(server.app) as serving:
            engine = SglangEngine(serving.url)
            yield engine
            await engine.close()


@asynccontextmanager
async def sglang_incremental():
    async with sglang(incremental=True) as engine:
        yield engine


ENGINES = {
    "local": local,
    "scripted": scripted,
    "upstream": upstream,
    "sglang": sglang,
    "sglang-incremental": sglang_incremental,
}


@asynccontextmanager
async def vllm(url):
    """The tiny model in vLLM, whose weights count as version 0 again."""
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as http:
        # A test that failed may have left it paused.
        await http.post("/resume")
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(TINY_MODEL)}}
        await http.post("/collective_rpc", json=reload)
        await http.post("/reset_prefix_cache")
        (await http.post("/update_weight_version", json={"new_version": "0"})).raise_for_status()
    engine = UpstreamEngine(url)
    yield engine
    await engine.close()


REAL = pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.timeout(900)])


@pytest.fixture(params=[*ENGINES, REAL])
async def engine(request):
    name = request.param
    made = vllm(request.getfixturevalue("vllm_url")) if name == "vllm" else ENGINES[name]()
    async with made as opened:
        yield opened


async def many(engine):
    """Tokens that take longer than a pause does to be asked for."""
    return min((await engine.info()).context_limit - 56, 1000)


async def until_idle(engine):
    while (await engine.info()).num_running:
        await asyncio.sleep(0.01)


async def test_an_answer_is_ids_with_logprobs_and_ends_with_one_finish_reason(engine):
    chunks = [chunk async for chunk in engine.generate(PROMPT, Sampling(max_new_tokens=9))]
    assert sum(len(chunk.ids) for chunk in chunks) == 9
    assert all(len(chunk.ids) == len(chunk.logprobs) for chunk in chunks)
    assert all(logprob <= 0 for chunk in chunks for logprob in chunk.logprobs)
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + [FinishReason.LENGTH]
    assert all(chunk.num_cached == 0 for chunk in chunks[1:])


async def test_a_stop_id_ends_the_answer_and_is_part_of_it(engine):
    sampling = Sampling(temperature=0, max_new_tokens=20)
    free = (await collect(engine.generate(PROMPT, sampling))).ids_R.tolist()
    stop = free[3]
    sampling = Sampling(temperature=0, max_new_tokens=20, stop_ids=frozenset({stop}))
    answer = await collect(engine.generate(PROMPT, sampling))
    assert answer.ids_R.tolist() == free[: free.index(stop) + 1]
    assert answer.finish_reason is FinishReason.STOP


async def test_a_stop_string_ends_the_answer_with_the_token_that_completes_it(engine):
    free = (await collect(engine.generate(PROMPT, Sampling(temperature=0, max_new_tokens=20)))).ids_R.tolist()
    stop = FOLDER.tokenizer.decode(free[2:4])
    sampling = Sampling(temperature=0, max_new_tokens=20, stop_strings=[stop])
    answer = await collect(engine.generate(PROMPT, sampling))
    assert answer.finish_reason is FinishReason.STOP
    assert answer.ids_R.tolist() == free[: len(answer.ids_R)]
    assert stop in FOLDER.tokenizer.decode(answer.ids_R.tolist())
    assert stop not in FOLDER.tokenizer.decode(answer.ids_R.tolist()[:-1])


async def test_a_prompt_that_fills_the_context_is_refused_with_the_numbers(engine):
    limit = (await engine.info()).context_limit
    with pytest.raises(ContextOverflowError, match=rf"{limit} tokens.*{limit}"):
        await collect(engine.generate([97] * limit, UNLIMITED))
    answer = await collect(engine.generate([97] * (limit - 1), UNLIMITED))
    assert (len(answer.ids_R), answer.finish_reason) == (1, FinishReason.LENGTH)


async def test_the_same_seed_gives_the_same_answer_beside_others(engine):
    sampling = Sampling(max_new_tokens=12, seed=7)
    alone = await collect(engine.generate(PROMPT, sampling))
    others = [engine.generate([97 + i, 98], Sampling(max_new_tokens=15)) for i in range(5)]
    answer, *_ = await asyncio.gather(*(collect(chunks) for chunks in [engine.generate(PROMPT, sampling), *others]))
    assert answer.ids_R.tolist() == alone.ids_R.tolist()


async def test_closing_the_iterator_ends_the_generation(engine):
    async with aclosing(engine.generate(PROMPT, UNLIMITED)) as chunks:
        await anext(chunks)
        assert (await engine.info()).num_running == 1
    await asyncio.wait_for(until_idle(engine), 2)
    sampled = (await engine.info()).stats
    await asyncio.sleep(0.1)
    assert (await engine.info()).stats == sampled


async def test_cancelling_the_reader_ends_the_generation(engine):
    reader = asyncio.create_task(collect(engine.generate(PROMPT, UNLIMITED)))
    await asyncio.sleep(0.05)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    await asyncio.wait_for(until_idle(engine), 2)


async def test_tokens_come_as_they_are_sampled(engine):
    num_tokens = await many(engine)
    async with aclosing(engine.generate(PROMPT, Sampling(max_new_tokens=num_tokens))) as chunks:
        first = await anext(chunks)
        await engine.pause()
        seen = len(first.ids)
        while True:
            try:
                seen += len((await asyncio.wait_for(asyncio.shield(waiting := next_of(chunks)), 0.1)).ids)
            except TimeoutError:
                break
        # The rest is not sampled yet.
        assert 0 < seen < num_tokens
        await engine.resume()
        seen += len((await waiting).ids)
        seen += sum([len(chunk.ids) async for chunk in chunks])
    assert seen == num_tokens


def next_of(chunks):
    return asyncio.ensure_future(anext(chunks))


async def test_pause_holds_an_answer_in_its_place_and_load_marks_what_follows(engine):
    num_tokens = await many(engine)
    async with aclosing(engine.generate(PROMPT, Sampling(max_new_tokens=num_tokens))) as chunks:
        seen = [await anext(chunks)]
        await engine.pause()
        assert (await engine.info()).paused
        sampled = (await engine.info()).stats
        await asyncio.sleep(0.1)
        assert (await engine.info()).stats == sampled
        await engine.load(Weights(kind="folder", folder=str(TINY_MODEL)), PolicyVersion(5))
        await engine.resume()
        await engine.resume()
        seen += [chunk async for chunk in chunks]
    assert sum(len(chunk.ids) for chunk in seen) == num_tokens
    versions = [chunk.version for chunk in seen]
    assert versions == sorted(versions)
    assert {versions[0], versions[-1]} == {0, 5}
    assert (await engine.info()).version == 5


async def test_a_request_that_arrives_during_a_pause_waits(engine):
    await engine.pause()
    reader = asyncio.create_task(collect(engine.generate(PROMPT, Sampling(max_new_tokens=3))))
    await asyncio.sleep(0.1)
    assert not reader.done()
    await engine.resume()
    assert len((await reader).ids_R) == 3


async def test_a_closed_engine_says_so_to_those_who_wait_and_to_those_who_come(engine):
    reader = asyncio.create_task(collect(engine.generate(PROMPT, UNLIMITED)))
    await asyncio.sleep(0.02)
    await engine.pause()
    await engine.close()
    await engine.close()
    with pytest.raises(EngineError, match="closed"):
        await asyncio.wait_for(reader, 2)
    with pytest.raises(EngineError, match="closed"):
        await collect(engine.generate(PROMPT, UNLIMITED))


def text_of(answer):
    return FOLDER.tokenizer.decode(answer.ids_R.tolist())


async def test_answers_match_their_grammars_beside_others_that_have_none(engine):
    sampling = {"max_new_tokens": 120, "stop_ids": FOLDER.eos_ids}
    wanted = [JSON, CALL, None, WORDS, JSON, None, CALL, WORDS]
    answers = await asyncio.gather(
        *(
            collect(engine.generate([*PROMPT, i], Sampling(constraint=constraint, seed=i, **sampling)))
            for i, constraint in enumerate(wanted)
        )
    )
    for constraint, answer in zip(wanted, answers, strict=True):
        text = text_of(answer)
        if constraint is JSON:
            read = json.loads(text)
        elif constraint is CALL:
            read = json.loads(re.fullmatch(r"<call>get [a-z]{1,6} (.*)</call>", text)[1])
        else:
            assert constraint is None or re.fullmatch("yes|no(,[a-z]+)?", text)
            continue
        assert set(read) == {"city", "days"}
        assert len(read["city"]) <= 5
        assert read["days"] in (1, 2, 3)
        assert answer.finish_reason is FinishReason.STOP


async def test_greedy_and_truncated_sampling_stay_within_the_grammar(engine):
    for choice in ({"temperature": 0}, {"top_k": 1}, {"top_p": 0.1}):
        sampling = Sampling(constraint=WORDS, max_new_tokens=3, stop_ids=FOLDER.eos_ids, **choice)
        text = text_of(await collect(engine.generate(PROMPT, sampling)))
        assert text.startswith(("yes", "no"))


async def test_a_grammar_that_does_not_compile_is_the_callers_mistake(engine):
    for grammar in ("start: nothing", "", "start: %json {"):
        sampling = Sampling(constraint=Constraint(grammar=grammar), max_new_tokens=5)
        with pytest.raises(ProtocolError, match=r"(?i)grammar"):
            await collect(engine.generate(PROMPT, sampling))
    assert len((await collect(engine.generate(PROMPT, Sampling(max_new_tokens=3)))).ids_R) == 3


@pytest.mark.parametrize(
    "over",
    [local, lambda: over_http(local), lambda: sglang(local)],
    ids=["local", "upstream over local", "sglang over local"],
)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
async def test_logprobs_under_a_constraint_are_those_without_it(over, temperature):
    model = load_model(FOLDER)
    async with over() as engine:
        sampling = Sampling(constraint=CALL, temperature=temperature, max_new_tokens=120, stop_ids=FOLDER.eos_ids)
        answer = await collect(engine.generate(PROMPT, sampling))
    ids = torch.tensor([*PROMPT, *answer.ids_R.tolist()])
    with torch.no_grad():
        hidden = model.hidden(ids, torch.arange(len(ids)), causal_attend([len(ids)]))
        logits = model.logits(hidden[len(PROMPT) - 1 : -1]) / temperature
    expected = logits.log_softmax(-1).gather(1, ids[len(PROMPT) :, None])[:, 0].numpy()
    np.testing.assert_allclose(answer.logprobs_R, expected, atol=1e-4, rtol=0)
    assert expected.min() < -3  # the model would not have written this by itself
