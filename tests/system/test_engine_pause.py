"""Answers of a real model whose engine is paused and gets new weights: in this process, and over HTTP.

Whatever was sampled has the log-probability that the weights of its version give it, computed here with a plain
forward pass; only what goes on over an old cache differs, and says so.
"""

import asyncio
import time
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from manege.config import EngineConfig
from manege.engine.base import Collector, Engine, Sampling, Weights, collect
from manege.engine.local import LocalEngine
from manege.engine.server import engine_app
from manege.engine.upstream import UpstreamEngine
from manege.errors import EngineError
from manege.gateway.server import Server
from manege.model.attend import causal_attend
from manege.model.folder import open_folder
from manege.model.llama import Llama
from manege.model.load import export_folder, load_model
from manege.types import FinishReason, PolicyVersion
from tests.conftest import TINY_MODEL

pytestmark = pytest.mark.anyio

FOLDER = open_folder(str(TINY_MODEL))
PROMPT = FOLDER.tokenizer.encode("find the key in the box").ids
LONG = Sampling(max_new_tokens=200, seed=3)


class Paced(Llama):
    """As slow as a model that has more than a quarter of a million parameters."""

    def hidden(self, ids_N, positions_N, attend):
        time.sleep(0.002)
        return super().hidden(ids_N, positions_N, attend)


@dataclass(kw_only=True)
class Site:
    engine: Engine
    """The one that is tested."""
    local: LocalEngine
    """The one that samples."""
    model: Llama


@asynccontextmanager
async def in_this_process(**settings):
    torch.set_num_threads(1)
    model = Paced(load_model(FOLDER).config)
    model.module.load_state_dict(load_model(FOLDER).module.state_dict())
    engine = LocalEngine(model, FOLDER, config=EngineConfig(**{"cache_tokens": 8192, "threads": 1, **settings}), seed=0)
    yield Site(engine=engine, local=engine, model=model)
    await engine.close()


@asynccontextmanager
async def over_http(**settings):
    async with in_this_process(**settings) as site:
        app = engine_app(site.local, encode=lambda text: FOLDER.tokenizer.encode(text).ids, decode=FOLDER.decode)
        async with Server(app) as server:
            engine = UpstreamEngine(server.url)
            yield Site(engine=engine, local=site.local, model=site.model)
            await engine.close()


PLACES = {"local": in_this_process, "http": over_http}
place = pytest.mark.parametrize("place", PLACES.values(), ids=PLACES.keys())
keep_or_not = pytest.mark.parametrize("keep", [False, True], ids=["cut", "kept"])


@pytest.fixture(scope="module")
def versions(tmp_path_factory):
    """The models of versions 0, 1 and 2."""
    models = []
    for version in range(3):
        model = load_model(FOLDER)
        with torch.no_grad():
            for parameter in model.module.parameters():
                parameter.mul_(1 + version / 10)
        export_folder(model, FOLDER, tmp_path_factory.getbasetemp() / f"version-{version}")
        models.append(model)
    return models


@pytest.fixture
def folder_of(versions, tmp_path_factory):
    return lambda version: Weights(kind="folder", folder=str(tmp_path_factory.getbasetemp() / f"version-{version % 3}"))


def plain_logprobs(model, prompt_ids, answer_ids):
    ids = torch.tensor([*prompt_ids, *answer_ids])
    with torch.no_grad():
        hidden = model.hidden(ids, torch.arange(len(ids)), causal_attend([len(ids)]))
        logits = model.logits(hidden[len(prompt_ids) - 1 : -1])
    return logits.log_softmax(-1).gather(1, ids[len(prompt_ids) :, None])[:, 0].numpy()


def parts(answer):
    """(version, old_cache, slice) of each span."""
    starts = [span.first_token for span in answer.spans]
    ends = [*starts[1:], len(answer.ids_R)]
    return [
        (span.version, span.old_cache, slice(start, end))
        for span, start, end in zip(answer.spans, starts, ends, strict=True)
    ]


def assert_agrees(models, prompt_ids, answer):
    """Every part of the answer is that of its weights, over a cache of the same weights."""
    for version, old_cache, part in parts(answer):
        expected = plain_logprobs(models[version], prompt_ids, answer.ids_R.tolist())
        np.testing.assert_allclose(answer.logprobs_R[part], expected[part], atol=1e-4, rtol=0)
        assert not old_cache


async def read(chunks, num_tokens, collector):
    while len(collector.ids) < num_tokens:
        collector.add(await anext(chunks))


async def answer_with_changes(engine, weights, *, keep=False, first=1, sampling=LONG):
    """An answer during which the weights of versions `first` and up are loaded, one after the other."""
    collector = Collector()
    async with aclosing(engine.generate(PROMPT, sampling)) as chunks:
        for index, each in enumerate(weights):
            await read(chunks, 20 * (index + 1), collector)
            await engine.pause(keep=keep)
            await engine.load(each, PolicyVersion(first + index))
            await engine.resume()
        async for chunk in chunks:
            collector.add(chunk)
    return collector.generation()


async def until(condition):
    async with asyncio.timeout(20):
        while not await condition():
            await asyncio.sleep(0.002)


@place
async def test_an_answer_that_is_cut_goes_on_under_the_new_weights_with_nothing_of_the_old_cache(
    place, versions, folder_of
):
    async with place() as site:
        answer = await answer_with_changes(site.engine, [folder_of(1)])
    assert (len(answer.ids_R), answer.finish_reason) == (200, FinishReason.LENGTH)
    assert [version for version, _, _ in parts(answer)] == [0, 1]
    assert_agrees(versions, PROMPT, answer)


@place
async def test_an_answer_that_is_cut_twice_has_three_parts(place, versions, folder_of):
    async with place() as site:
        answer = await answer_with_changes(site.engine, [folder_of(1), folder_of(2)])
    assert len(answer.ids_R) == 200
    assert [version for version, _, _ in parts(answer)] == [0, 1, 2]
    assert_agrees(versions, PROMPT, answer)


@place
async def test_an_answer_that_is_kept_goes_on_over_its_old_cache_and_says_so(place, versions, folder_of):
    async with place() as site:
        answer = await answer_with_changes(site.engine, [folder_of(1)], keep=True)
        ids = [*PROMPT, *answer.ids_R.tolist()][:-5]
        follower = await collect(site.engine.generate(ids, Sampling(max_new_tokens=5)))
    (old, is_flagged_before, before), (new, is_flagged_after, after) = parts(answer)
    assert (old, is_flagged_before, new, is_flagged_after) == (0, False, 1, True)
    expected_old, expected_new = (plain_logprobs(versions[v], PROMPT, answer.ids_R.tolist()) for v in (0, 1))
    np.testing.assert_allclose(answer.logprobs_R[before], expected_old[before], atol=1e-4, rtol=0)
    assert np.abs(answer.logprobs_R[after] - expected_new[after]).max() > 1e-3
    assert np.abs(answer.logprobs_R[after] - expected_old[after]).max() > 1e-3
    # What it has computed serves nobody else.
    assert follower.num_cached == 0
    assert_agrees(versions, ids, follower)


@pytest.mark.parametrize(
    ("place", "keep"),
    [(in_this_process, False), (in_this_process, True), (over_http, True)],
    ids=["local, cut", "local, kept", "http, kept"],
)
async def test_a_pause_without_new_weights_changes_nothing_that_can_be_seen(place, keep):
    async with place() as site:
        expected = await collect(site.engine.generate(PROMPT, LONG))
        collector = Collector()
        async with aclosing(site.engine.generate(PROMPT, LONG)) as chunks:
            for num_tokens in (1, 30, 90):
                await read(chunks, num_tokens, collector)
                await site.engine.pause(keep=keep)
                await site.engine.resume()
            async for chunk in chunks:
                collector.add(chunk)
    answer = collector.generation()
    assert answer.ids_R.tolist() == expected.ids_R.tolist()
    np.testing.assert_allclose(answer.logprobs_R, expected.logprobs_R, atol=1e-4, rtol=0)
    assert answer.spans == expected.spans


@place
@keep_or_not
async def test_a_prompt_that_is_being_read_is_read_anew_unless_it_is_kept(place, keep, versions, folder_of):
    prompt = PROMPT * 6
    async with place(prefill_chunk=2) as site:
        await collect(site.engine.generate(PROMPT, Sampling(max_new_tokens=1)))
        before = (await site.local.info()).stats
        reading = asyncio.create_task(collect(site.engine.generate(prompt, Sampling(max_new_tokens=30))))

        async def has_begun():
            return (await site.local.info()).stats["prefilled"] > before["prefilled"]

        await until(has_begun)
        await site.engine.pause(keep=keep)
        assert (await site.local.info()).stats["sampled"] == before["sampled"]
        await site.engine.load(folder_of(1), PolicyVersion(1))
        await site.engine.resume()
        answer = await reading
    assert [(version, old_cache) for version, old_cache, _ in parts(answer)] == [(1, keep)]
    assert (answer.num_cached > 0) == keep
    if not keep:
        assert_agrees(versions, prompt, answer)


@place
@keep_or_not
async def test_an_answer_that_waits_in_the_queue_is_that_of_the_new_weights(place, keep, versions, folder_of):
    async with place(max_batch=1) as site:
        async with aclosing(site.engine.generate(PROMPT, LONG)) as chunks:
            await anext(chunks)
            waiting = asyncio.create_task(collect(site.engine.generate(PROMPT[::-1], Sampling(max_new_tokens=20))))

            async def is_queued():
                return (await site.engine.info()).num_waiting == 1

            await until(is_queued)
            await site.engine.pause(keep=keep)
            await site.engine.load(folder_of(1), PolicyVersion(1))
            await site.engine.resume()
            assert sum([len(chunk.ids) async for chunk in chunks]) > 100
        answer = await waiting
    assert [version for version, _, _ in parts(answer)] == [1]
    assert_agrees(versions, PROMPT[::-1], answer)


async def test_what_was_cut_waits_before_what_waited_already():
    async with in_this_process(max_batch=2) as site:
        order = []

        async def read_all(index):
            chunks = site.engine.generate([*PROMPT, index], Sampling(max_new_tokens=30))
            async for chunk in chunks:
                if chunk.finish_reason:
                    order.append(index)

        async def is_full():
            return (await site.local.info()).stats["sampled"] > 4

        tasks = [asyncio.create_task(read_all(index)) for index in range(4)]
        await until(is_full)
        await site.engine.pause()
        info = await site.engine.info()
        assert (info.num_running, info.num_waiting, info.cache_usage) == (0, 4, 0.0)
        await site.engine.resume()
        await asyncio.gather(*tasks)
    assert sorted(order[:2]) == [0, 1]


async def test_cache_usage_is_the_share_of_rows_that_run():
    async with in_this_process(cache_tokens=1024) as site:
        assert (await site.engine.info()).cache_usage == 0
        async with aclosing(site.engine.generate(PROMPT, LONG)) as chunks:
            await anext(chunks)
            assert (await site.engine.info()).cache_usage == 0.25
            await site.engine.pause(keep=True)
            assert (await site.engine.info()).cache_usage == 0.25


@place
@keep_or_not
async def test_a_reader_that_leaves_during_a_pause_leaves_nothing_behind(place, keep):
    async with place() as site:
        async with aclosing(site.engine.generate(PROMPT, LONG)) as chunks:
            await anext(chunks)
            await site.engine.pause(keep=keep)
        await site.engine.resume()

        async def is_idle():
            info = await site.local.info()
            return (info.num_running, info.num_waiting) == (0, 0)

        await until(is_idle)
        assert len((await collect(site.engine.generate(PROMPT, Sampling(max_new_tokens=3)))).ids_R) == 3


@place
@keep_or_not
async def test_an_engine_that_is_closed_during_a_pause_says_so_to_its_readers(place, keep):
    async with place() as site:
        chunks = site.engine.generate(PROMPT, LONG)
        await anext(chunks)
        await site.engine.pause(keep=keep)
        reading = asyncio.create_task(collect(chunks))
        await site.engine.close()
        with pytest.raises(EngineError, match="closed"):
            await asyncio.wait_for(reading, 5)


@place
@keep_or_not
async def test_eight_answers_over_twenty_changes_of_weights_are_whole(place, keep, versions, folder_of):
    num_tokens = 0

    async def read_all(site, index):
        nonlocal num_tokens
        collector = Collector()
        async for chunk in site.engine.generate([*PROMPT, 40 + index], LONG):
            collector.add(chunk)
            num_tokens += len(chunk.ids)
        return collector.generation()

    async with place() as site:
        tasks = [asyncio.create_task(read_all(site, index)) for index in range(8)]
        for version in range(1, 21):

            async def has_gone_on(goal=num_tokens + 16):
                return num_tokens >= min(goal, 8 * 200)

            await until(has_gone_on)
            await site.engine.pause(keep=keep)
            await site.engine.load(folder_of(version), PolicyVersion(version))
            await site.engine.resume()
        async with asyncio.timeout(30):
            answers = await asyncio.gather(*tasks)
    for index, answer in enumerate(answers):
        assert (len(answer.ids_R), answer.finish_reason) == (200, FinishReason.LENGTH)
        found = [version for version, _, _ in parts(answer)]
        assert found == sorted(found)
        assert len(found) > 5
        if not keep:
            assert_agrees([versions[version % 3] for version in range(21)], [*PROMPT, 40 + index], answer)


async def test_shared_weights_that_change_in_place_are_used_from_the_cut_on(versions):
    async with in_this_process() as site:
        collector = Collector()
        async with aclosing(site.engine.generate(PROMPT, LONG)) as chunks:
            await read(chunks, 20, collector)
            await site.engine.pause()
            with torch.no_grad():
                for parameter in site.model.module.parameters():
                    parameter.mul_(1.1)
            await site.engine.load(Weights(kind="shared"), PolicyVersion(1))
            await site.engine.resume()
            async for chunk in chunks:
                collector.add(chunk)
    answer = collector.generation()
    assert [version for version, _, _ in parts(answer)] == [0, 1]
    assert_agrees(versions, PROMPT, answer)
