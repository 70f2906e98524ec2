"""Harnesses on what a real, small model says, which is mostly not what they ask for: SmolLM2 on the local engine."""

import asyncio

import numpy as np
import pytest

from manege.cli.parts import local_engine
from manege.config import EngineConfig, ModelConfig
from manege.model.folder import open_folder
from manege.trainer.algo.forest import build_forest
from manege.trainer.algo.samples import build_samples
from manege.types import Delivered, Outcome
from tests.harnesses.policy import MODEL
from tests.harnesses.running import run_harness

pytestmark = pytest.mark.anyio
CONTEXT_LIMIT = 8192
SAMPLING = {"max_new_tokens": 24}


@pytest.fixture
async def engine():
    _, made = await asyncio.to_thread(local_engine, ModelConfig(path=MODEL), EngineConfig(), seed=0)
    yield made
    await made.close()


async def test_mini_swe_agent_goes_on_whatever_the_model_says(engine, tmp_path):
    env = {"MSWEA_GLOBAL_CALL_LIMIT": "3"}
    ran = await run_harness("mini-swe-agent", engine, tmp_path, context_limit=CONTEXT_LIMIT, sampling=SAMPLING, env=env)
    check(ran)
    assert len(ran.calls) == 3


@pytest.mark.harnesses
async def test_pi_takes_every_answer(engine, tmp_path):
    num_calls = 0
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        ran = await run_harness("pi", engine, folder, context_limit=CONTEXT_LIMIT, sampling=SAMPLING)
        check(ran)
        num_calls += len(ran.calls)
    assert num_calls >= 2


def check(ran):
    """The harness came to an end of its own or to the end of its time, and all that was sampled is accounted for."""
    assert ran.rollout.outcome in (Outcome.OK, Outcome.AGENT_TIMEOUT), ran.rollout.message
    assert ran.left == []
    tokenizer = open_folder(MODEL).tokenizer
    for call in ran.calls:
        assert np.isfinite(call.logprobs_R).all()
        assert len(call.response_ids_R) == len(call.logprobs_R) > 0
        said = tokenizer.decode(call.response_ids_R.tolist())
        content = call.reply["content"] or ""
        assert content in said
        assert content or call.reply.get("tool_calls")
    samples, ledger = build_samples(build_forest(ran.calls))
    undelivered = sum(len(call.response_ids_R) for call in ran.calls if call.delivered is not Delivered.YES)
    assert ledger.trained == sum(sample.num_trained for sample in samples) >= ledger.sampled - undelivered
