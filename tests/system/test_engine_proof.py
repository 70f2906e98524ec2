"""Whether an engine tells the log-probabilities of the temperature that it is asked to sample with."""

from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import torch

from manege.config import EngineConfig
from manege.engine.base import Sampling, collect
from manege.engine.local import LocalEngine
from manege.engine.proof import REMEDY, ProvenEngine, tells_tempered_logprobs
from manege.engine.scripted import ScriptedEngine, hashed_reply
from manege.engine.server import engine_app
from manege.engine.wires import token_engine
from manege.errors import EngineError, UnprocessableError
from manege.gateway.pool import EnginePool, Registration
from manege.gateway.server import Server
from manege.model.folder import open_folder
from manege.model.load import load_model
from tests.conftest import TINY_MODEL
from tests.sglang_wire import SglangServer

pytestmark = pytest.mark.anyio

FOLDER = open_folder(str(TINY_MODEL))
COOL = Sampling(temperature=0.7, max_new_tokens=3)


class Untempered(LocalEngine):
    """Knows no other temperature than 1, whatever it is asked for."""

    num_asked = 0

    def generate(self, prompt_ids, sampling):
        self.num_asked += 1
        return super().generate(prompt_ids, replace(sampling, temperature=1.0))


@asynccontextmanager
async def engine_of(kind):
    torch.set_num_threads(1)
    engine = kind(load_model(FOLDER), FOLDER, config=EngineConfig(cache_tokens=8192, threads=1), seed=0)
    yield engine
    await engine.close()


def token_wire(engine):
    return engine_app(engine, encode=lambda text: FOLDER.tokenizer.encode(text).ids, decode=FOLDER.tokenizer.decode)


def sglang_wire(engine):
    return SglangServer(engine, decode=FOLDER.tokenizer.decode, context_limit=256, incremental=True).app


WIRES = {"vllm": token_wire, "sglang": sglang_wire}


@pytest.mark.parametrize(("kind", "expected"), [(LocalEngine, True), (Untempered, False)], ids=["tempered", "not"])
async def test_log_probabilities_tell_their_temperature(kind, expected):
    async with engine_of(kind) as engine:
        assert [await tells_tempered_logprobs(engine) for _ in range(3)] == [expected] * 3


async def test_an_engine_that_never_samples_two_tokens_at_a_place_proves_nothing():
    engine = ScriptedEngine(hashed_reply(num_tokens=60, first_id=97, last_id=122))
    assert await tells_tempered_logprobs(engine) is None
    assert len((await collect(ProvenEngine(engine, "URL").generate([5], COOL))).ids_R) == 3


@pytest.mark.parametrize("wire", WIRES)
async def test_an_engine_is_proven_once_and_only_where_the_temperature_matters(wire):
    async with engine_of(Untempered) as behind, Server(WIRES[wire](behind)) as server:
        engine = token_engine(server.url, wire)
        for temperature in (0.0, 1.0):
            assert len((await collect(engine.generate([5], replace(COOL, temperature=temperature)))).ids_R) == 3
        assert behind.num_asked == 2
        with pytest.raises(EngineError, match=rf"temperature 0\.7.*{REMEDY}"):
            await collect(engine.generate([5], COOL))
        num_asked = behind.num_asked
        with pytest.raises(EngineError, match=REMEDY):
            await collect(engine.generate([5], COOL))
        assert behind.num_asked == num_asked
        await engine.close()


@pytest.mark.parametrize("wire", WIRES)
async def test_an_engine_that_proves_it_is_used_at_any_temperature(wire):
    async with engine_of(LocalEngine) as behind, Server(WIRES[wire](behind)) as server:
        engine = token_engine(f"{server.url}/v1", wire)
        assert len((await collect(engine.generate([5], COOL))).ids_R) == 3
        await engine.close()


@pytest.mark.parametrize("wire", WIRES)
async def test_an_engine_of_another_temperature_is_not_registered(store, wire):
    pool = EnginePool({}, store)
    async with engine_of(Untempered) as raw, Server(WIRES[wire](raw)) as server:
        with pytest.raises(UnprocessableError, match=REMEDY):
            await pool.register([Registration(model="m", endpoint=server.url, mode="tokens", wire=wire)])
    assert pool.registrations == []
    async with engine_of(LocalEngine) as good, Server(WIRES[wire](good)) as server:
        await pool.register([Registration(model="m", endpoint=server.url, mode="tokens", wire=wire)])
        assert len((await collect(pool.generate([5], COOL))).ids_R) == 3
        await pool.close()


async def test_a_server_of_another_wire_is_not_registered(store):
    pool = EnginePool({}, store)
    async with engine_of(LocalEngine) as good, Server(token_wire(good)) as server:
        with pytest.raises(UnprocessableError, match=r"It must be SGLang, 0\.5\.6 or newer"):
            await pool.register([Registration(model="m", endpoint=server.url, mode="tokens", wire="sglang")])
    async with engine_of(LocalEngine) as good, Server(sglang_wire(good)) as server:
        with pytest.raises(UnprocessableError, match="with wire `sglang`"):
            await pool.register([Registration(model="m", endpoint=server.url, mode="tokens")])
