"""The local engine samples exactly from the model: its log-probabilities are those of a plain forward pass.

The model is a random Qwen3 (grouped heads, norms on queries and keys), small enough for milliseconds.
"""

import asyncio
import random
from contextlib import aclosing

import numpy as np
import pytest
import torch

from manege.config import EngineConfig
from manege.engine.base import Sampling, Weights, collect
from manege.engine.local import LocalEngine
from manege.errors import EngineError, ModelError, ProtocolError
from manege.model.attend import causal_attend
from manege.model.llama import Llama
from manege.model.load import export_folder, load_model
from manege.types import PolicyVersion
from tests.unit.test_model_llama import SIZES, write_random_model

pytestmark = pytest.mark.anyio

VOCABULARY = SIZES["vocab_size"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    settings = {"head_dim": 32, "max_position_embeddings": 2048}
    return write_random_model(tmp_path_factory.mktemp("random"), "qwen3", settings)


@pytest.fixture
def model(folder):
    return load_model(folder)


@pytest.fixture
async def start(model, folder):
    """Starts engines over the model and closes them."""
    engines = []

    def start(model=model, **settings):
        engines.append(LocalEngine(model, folder, config=EngineConfig(threads=1, **settings), seed=0))
        return engines[-1]

    yield start
    for engine in engines:
        await engine.close()


def prompt(length, seed=0):
    return random.Random(seed).choices(range(VOCABULARY), k=length)


def plain_logprobs(model, prompt_ids, answer_ids, temperature=1.0):
    ids = torch.tensor([*prompt_ids, *answer_ids])
    with torch.no_grad():
        hidden = model.hidden(ids, torch.arange(len(ids)), causal_attend([len(ids)]))
        logits = model.logits(hidden[len(prompt_ids) - 1 : -1]) / temperature
    return logits.log_softmax(-1).gather(1, ids[len(prompt_ids) :, None])[:, 0].numpy()


def assert_agrees(model, prompt_ids, answer, temperature=1.0):
    expected = plain_logprobs(model, prompt_ids, answer.ids_R.tolist(), temperature)
    np.testing.assert_allclose(answer.logprobs_R, expected, atol=1e-4, rtol=0)


async def gather(engine, prompts, sampling):
    return await asyncio.gather(*(collect(engine.generate(ids, sampling)) for ids in prompts))


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
async def test_sequences_that_join_and_leave_a_batch_agree_with_the_plain_model(start, model, temperature):
    engine = start(max_batch=5)
    prompts = [prompt(3 + 11 * i, seed=i) for i in range(12)]
    lengths = [2 + 5 * (i % 4) for i in range(12)]
    answers = await asyncio.gather(
        *(
            collect(engine.generate(ids, Sampling(temperature=temperature, max_new_tokens=length)))
            for ids, length in zip(prompts, lengths, strict=True)
        )
    )
    assert [len(answer.ids_R) for answer in answers] == lengths
    for ids, answer in zip(prompts, answers, strict=True):
        assert_agrees(model, ids, answer, temperature)


async def test_a_prompt_read_in_chunks_agrees(start, model):
    engine = start(prefill_chunk=7)
    prompts = [prompt(61, seed=1), prompt(5, seed=2), prompt(30, seed=3)]
    for ids, answer in zip(prompts, await gather(engine, prompts, Sampling(max_new_tokens=6)), strict=True):
        assert_agrees(model, ids, answer)


async def test_the_next_turn_reuses_all_that_was_computed(start, model):
    engine = start()
    ids = prompt(50)
    for turn in range(4):
        answer = await collect(engine.generate(ids, Sampling(max_new_tokens=8)))
        assert_agrees(model, ids, answer)
        # The last sampled token was never fed to the model.
        assert answer.num_cached == (0 if turn == 0 else len(ids) - 6)
        ids = [*ids, *answer.ids_R.tolist(), *prompt(5, seed=turn)]


async def test_rollouts_that_start_together_compute_their_common_prefix_once(start, model):
    engine = start(prefill_chunk=64)
    system = prompt(150)
    prompts = [system + prompt(10, seed=i // 4) for i in range(12)]
    answers = await gather(engine, prompts, Sampling(max_new_tokens=4))
    for ids, answer in zip(prompts, answers, strict=True):
        assert_agrees(model, ids, answer)
    # One reads the system prompt, one of each task its 10 tokens; a few tokens are not worth waiting for.
    assert (await engine.info()).stats["prefilled"] < 150 + 3 * 10 + 12 * 10
    repeated = await gather(engine, prompts, Sampling(max_new_tokens=1))
    assert [answer.num_cached for answer in repeated] == [159] * 12


async def test_branches_of_one_conversation_do_not_disturb_each_other(start, model):
    engine = start()
    root = prompt(40)
    first = await collect(engine.generate(root, Sampling(max_new_tokens=10)))
    branches = [[*root, *first.ids_R[:size].tolist(), *prompt(4, seed=size)] for size in (0, 3, 10)]
    for ids, answer in zip(branches, await gather(engine, branches, Sampling(max_new_tokens=9)), strict=True):
        assert_agrees(model, ids, answer)
        assert answer.num_cached >= 40


async def test_a_full_cache_makes_requests_wait_and_rows_grow_for_long_ones(start, model):
    engine = start(cache_tokens=600, max_batch=8)  # two rows of 256, then one of 600
    prompts = [prompt(200 + 20 * i, seed=i) for i in range(5)] + [prompt(500, seed=9)]
    answers = await asyncio.wait_for(gather(engine, prompts, Sampling(max_new_tokens=70)), 60)
    for ids, answer in zip(prompts, answers, strict=True):
        assert len(answer.ids_R) == 70
        assert_agrees(model, ids, answer)
    assert (await engine.info()).context_limit == 600


async def test_a_running_answer_goes_on_under_new_weights_and_agrees_with_them(start, model):
    engine = start()
    prompts = [prompt(20 + i, seed=i) for i in range(3)]
    answers = [asyncio.create_task(collect(engine.generate(ids, Sampling(max_new_tokens=60)))) for ids in prompts]
    while (await engine.info()).stats["sampled"] < 20:
        await asyncio.sleep(0.001)
    await engine.pause()
    old = load_model_copy(model)
    with torch.no_grad():
        for parameter in model.module.parameters():
            parameter.mul_(1.1)
    await engine.load(Weights(kind="shared"), PolicyVersion(1))
    await engine.resume()
    for ids, answer in zip(prompts, await asyncio.gather(*answers), strict=True):
        (_, old_version), (change, new_version) = ((span.first_token, span.version) for span in answer.spans)
        assert (old_version, new_version) == (0, 1)
        tokens = answer.ids_R.tolist()
        expected_old = plain_logprobs(old, ids, tokens)
        expected_new = plain_logprobs(model, ids, tokens)
        np.testing.assert_allclose(answer.logprobs_R[:change], expected_old[:change], atol=1e-4, rtol=0)
        np.testing.assert_allclose(answer.logprobs_R[change:], expected_new[change:], atol=1e-4, rtol=0)
        assert abs(expected_new - expected_old).max() > 0.01  # the two versions can be told apart
    # And what was computed under the old weights is never reused.
    assert (await collect(engine.generate(prompts[0], Sampling(max_new_tokens=1)))).num_cached == len(prompts[0]) - 1


def load_model_copy(model):
    copy = Llama(model.config)
    copy.module.load_state_dict(model.module.state_dict())
    return copy


async def test_the_cache_does_not_outlive_its_weights(start):
    engine = start()
    ids = prompt(30)
    await collect(engine.generate(ids, Sampling(max_new_tokens=2)))
    await engine.pause()
    await engine.load(Weights(kind="shared"), PolicyVersion(1))
    await engine.resume()
    assert (await collect(engine.generate(ids, Sampling(max_new_tokens=2)))).num_cached == 0


async def test_weights_are_read_from_a_folder(start, model, folder, tmp_path):
    trained = load_model(folder)
    with torch.no_grad():
        trained.module.get_parameter("model.norm.weight").mul_(1.5)
    export_folder(trained, folder, tmp_path / "step-1")
    engine = start()
    await engine.pause()
    await engine.load(Weights(kind="folder", folder=str(tmp_path / "step-1")), PolicyVersion(1))
    await engine.resume()
    ids = prompt(30)
    assert_agrees(trained, ids, await collect(engine.generate(ids, Sampling(max_new_tokens=8))))
    for weights, error, reason in (
        (Weights(kind="folder", folder=str(tmp_path)), ModelError, "has no"),
        (Weights(kind="tape"), EngineError, "'tape' have no folder"),
    ):
        with pytest.raises(error, match=reason):
            await engine.load(weights, PolicyVersion(2))
    assert (await engine.info()).version == 1


async def test_greedy_takes_the_most_likely_tokens(start, model):
    engine = start()
    ids = prompt(25)
    answer = await collect(engine.generate(ids, Sampling(temperature=0, max_new_tokens=10)))
    assert_agrees(model, ids, answer)
    for i, token in enumerate(answer.ids_R.tolist()):
        everything = torch.tensor([*ids, *answer.ids_R[:i].tolist()])
        hidden = model.hidden(everything, torch.arange(len(everything)), causal_attend([len(everything)]))
        assert model.logits(hidden[-1:]).argmax().item() == token


async def test_an_abort_frees_the_slot_for_the_next(start):
    engine = start(max_batch=1)
    async with aclosing(engine.generate(prompt(5), Sampling(max_new_tokens=2000))) as chunks:
        await anext(chunks)
        follower = asyncio.create_task(collect(engine.generate(prompt(6), Sampling(max_new_tokens=2))))
        await asyncio.sleep(0.05)
        assert not follower.done()
    assert len((await asyncio.wait_for(follower, 2)).ids_R) == 2


class BreaksDown(Llama):
    """Computes for a while, then fails, as a machine without memory does."""

    steps_left = 5

    def hidden(self, ids_N, positions_N, attend):
        self.steps_left -= 1
        if self.steps_left < 0:
            raise MemoryError("no memory left")
        return super().hidden(ids_N, positions_N, attend)


async def test_a_worker_that_dies_leaves_nobody_waiting(start, model):
    broken = BreaksDown(model.config)
    broken.module.load_state_dict(model.module.state_dict())
    engine = start(model=broken, max_batch=2)
    readers = [collect(engine.generate(prompt(4, seed=i), Sampling(max_new_tokens=50))) for i in range(4)]
    results = await asyncio.wait_for(asyncio.gather(*readers, return_exceptions=True), 5)
    assert [type(result) for result in results] == [EngineError] * 4
    assert "no memory left" in str(results[0])
    for call in (engine.info, engine.pause, engine.resume):
        with pytest.raises(EngineError, match="no memory left"):
            await asyncio.wait_for(call(), 5)
    with pytest.raises(EngineError, match="no memory left"):
        await collect(engine.generate(prompt(4), Sampling(max_new_tokens=1)))


@pytest.mark.parametrize(
    ("ids", "reason"), [([], "has no tokens"), ([1, VOCABULARY], "token id 300"), ([-1], "token id -1")]
)
async def test_a_prompt_that_is_no_prompt_is_refused(start, ids, reason):
    with pytest.raises(ProtocolError, match=reason):
        await collect(start().generate(ids, Sampling(max_new_tokens=1)))
