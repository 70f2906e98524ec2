"""The client against vLLM on both of its token wires, with a model small enough to be read along."""

import asyncio
from contextlib import aclosing

import numpy as np
import pytest

from manege.engine.base import Collector, Sampling, Weights, collect
from manege.engine.upstream import UpstreamEngine
from manege.errors import ContextOverflowError
from manege.model.folder import open_folder
from manege.model.load import load_model
from manege.types import FinishReason, PolicyVersion
from tests.conftest import TINY_MODEL
from tests.vllm.serving import ROOMY, changed, logprobs_of, served

pytestmark = [pytest.mark.vllm, pytest.mark.anyio, pytest.mark.timeout(600)]

FOLDER = open_folder(str(TINY_MODEL))
PROMPT = FOLDER.tokenizer.encode("<|user|>q a<|end|><|assistant|>").ids
LONG = Sampling(max_new_tokens=1000, seed=5)


@pytest.fixture(scope="module", params=["token wire", "text completions"])
def url(request, tmp_path_factory):
    if request.param == "token wire":
        yield request.getfixturevalue("vllm_url")
        return
    with served(TINY_MODEL, tmp_path_factory.mktemp("logs"), enable_scale_out=False, **ROOMY) as address:
        yield address


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """By folder: the one that vLLM starts with, and one of other weights."""
    other = tmp_path_factory.mktemp("other") / "model"
    return {str(TINY_MODEL): load_model(FOLDER), str(other): changed(FOLDER, other, scale=0.2)}


@pytest.fixture
async def engine(url):
    """With the weights that vLLM starts with, under the next version."""
    made = UpstreamEngine(url)
    await publish(made, str(TINY_MODEL))
    yield made
    await made.close()


async def publish(engine, folder, *, keep=False, num_kept=0):
    version = PolicyVersion((await engine.info()).version + 1)
    await engine.pause(keep=keep)
    assert await num_running(engine) == num_kept
    await engine.load(Weights(kind="folder", folder=folder), version)
    await engine.resume()
    return version


def agrees(model, answer, temperature=1.0, *, since=0, until=None):
    ids = answer.ids_R.tolist()
    expected = logprobs_of(model, PROMPT, ids, temperature)
    np.testing.assert_allclose(answer.logprobs_R[since:until], expected[since:until], atol=1e-4, rtol=0)
    return expected


async def num_running(engine):
    status, text = await engine._http.request("GET", "/metrics")
    assert status == 200
    lines = [line for line in text.decode().splitlines() if line.startswith("vllm:num_requests_running")]
    return sum(float(line.split()[-1]) for line in lines)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7, 0.0])
async def test_logprobs_are_those_of_our_model_at_the_temperature(engine, models, temperature):
    sampling = Sampling(temperature=temperature, max_new_tokens=60, seed=3)
    answer = await collect(engine.generate(PROMPT, sampling))
    expected = agrees(models[str(TINY_MODEL)], answer, temperature or 1.0)
    assert (len(answer.ids_R), answer.finish_reason) == (60, FinishReason.LENGTH)
    assert expected.min() < -0.1


async def test_seeds_stops_and_the_end_of_the_context(engine, models):
    one, again, other = [
        (await collect(engine.generate(PROMPT, Sampling(temperature=2.0, max_new_tokens=30, seed=seed)))).ids_R.tolist()
        for seed in (7, 7, 8)
    ]
    assert one == again != other
    stop = one[4]
    sampling = Sampling(temperature=2.0, max_new_tokens=30, seed=7, stop_ids=frozenset({stop}))
    answer = await collect(engine.generate(PROMPT, sampling))
    assert answer.ids_R.tolist() == one[: one.index(stop) + 1]
    assert answer.finish_reason is FinishReason.STOP
    limit = (await engine.info()).context_limit
    with pytest.raises(ContextOverflowError, match=rf"{limit} tokens"):
        await collect(engine.generate([97] * limit, LONG))
    answer = await collect(engine.generate([97] * (limit - 3), LONG))
    assert (len(answer.ids_R), answer.finish_reason) == (3, FinishReason.LENGTH)


async def test_the_models_own_end_is_none_unless_it_is_asked_for(engine):
    free = await collect(engine.generate(PROMPT, Sampling(temperature=0, max_new_tokens=40)))
    end = next(iter(FOLDER.eos_ids))
    assert end in free.ids_R[:-1]
    sampling = Sampling(temperature=0, max_new_tokens=40, stop_ids=FOLDER.eos_ids)
    answer = await collect(engine.generate(PROMPT, sampling))
    assert answer.ids_R.tolist() == free.ids_R.tolist()[: free.ids_R.tolist().index(end) + 1]


async def test_an_answer_that_is_left_is_aborted_in_the_server(engine):
    async with aclosing(engine.generate(PROMPT, LONG)) as chunks:
        await anext(chunks)
        assert await num_running(engine) == 1
    async with asyncio.timeout(5):
        while await num_running(engine):
            await asyncio.sleep(0.02)


async def test_new_weights_are_used_whole_and_nothing_of_the_old_cache(engine, models):
    first, second = models
    prompt = [*PROMPT, *range(97, 97 + 140)]
    sampling = Sampling(max_new_tokens=20, seed=1)
    cold, warm = [await collect(engine.generate(prompt, sampling)) for _ in range(2)]
    assert (cold.num_cached, warm.num_cached) == (0, 128)
    for folder in (second, first):
        version = await publish(engine, folder)
        answer = await collect(engine.generate(prompt, sampling))
        expected = logprobs_of(models[folder], prompt, answer.ids_R.tolist())
        np.testing.assert_allclose(answer.logprobs_R, expected, atol=1e-4, rtol=0)
        assert (answer.num_cached, [span.version for span in answer.spans]) == (0, [version])
    other = logprobs_of(models[second], prompt, answer.ids_R.tolist())
    assert np.abs(other - expected).max() > 0.1  # the weights are told apart


async def test_a_cut_answer_goes_on_under_new_weights_from_its_ids(engine, models):
    first, second = models
    collector = Collector()
    async with aclosing(engine.generate(PROMPT, LONG)) as chunks:
        for _ in range(5):
            collector.add(await anext(chunks))
        version = await publish(engine, second)
        async for chunk in chunks:
            collector.add(chunk)
    answer = collector.generation()
    old, new = answer.spans
    assert (old.version, new.version, new.old_cache) == (version - 1, version, False)
    assert (len(answer.ids_R), answer.finish_reason) == (1000, FinishReason.LENGTH)
    agrees(models[first], answer, until=new.first_token)
    agrees(models[second], answer, since=new.first_token)


async def test_a_kept_answer_stays_in_the_server_and_says_that_its_cache_is_old(engine, models):
    first, second = models
    collector = Collector()
    async with aclosing(engine.generate(PROMPT, LONG)) as chunks:
        for _ in range(5):
            collector.add(await anext(chunks))
        version = await publish(engine, second, keep=True, num_kept=1)
        async for chunk in chunks:
            collector.add(chunk)
    answer = collector.generation()
    old, new = answer.spans
    assert (old.version, new.version, new.old_cache) == (version - 1, version, True)
    assert len(answer.ids_R) == 1000
    agrees(models[first], answer, until=new.first_token)
    # What the old weights computed is of no use to a new call.
    after = await collect(engine.generate(PROMPT, Sampling(max_new_tokens=20)))
    agrees(models[second], after)


async def test_a_request_during_a_pause_waits(engine, models):
    await engine.pause()
    reader = asyncio.create_task(collect(engine.generate(PROMPT, Sampling(max_new_tokens=3))))
    await asyncio.sleep(0.3)
    assert not reader.done()
    assert (await engine.info()).paused
    await engine.resume()
    assert len((await reader).ids_R) == 3
