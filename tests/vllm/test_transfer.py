"""Weights from a trainer's memory into vLLM: its weight-transfer endpoints with our transfer engine inside it."""

import numpy as np
import pytest
import torch

from manege.engine.base import Sampling, Weights, collect
from manege.engine.upstream import UpstreamEngine
from manege.engine.weight_sender import WeightSender
from manege.errors import EngineError
from manege.model.folder import open_folder
from manege.model.load import load_model
from manege.types import PolicyVersion
from tests.conftest import TINY_MODEL
from tests.vllm.serving import changed, logprobs_of

pytestmark = [pytest.mark.vllm, pytest.mark.anyio, pytest.mark.timeout(600)]

FOLDER = open_folder(str(TINY_MODEL))
PROMPT = FOLDER.tokenizer.encode("<|user|>q a<|end|><|assistant|>").ids


@pytest.fixture
def sender():
    made = WeightSender()
    yield made
    made.close()


@pytest.fixture
async def engine(vllm_url, sender):
    made = UpstreamEngine(vllm_url, fetches=True)
    await load(made, sender.publish(load_model(FOLDER).module.named_parameters()))
    yield made
    await made.close()


async def load(engine, weights):
    version = PolicyVersion((await engine.info()).version + 1)
    await engine.pause()
    try:
        await engine.load(weights, version)
    finally:
        await engine.resume()
    return version


async def agrees(engine, model, version):
    """Whether it samples from these weights, under this version, and with nothing cached of others."""
    prompt = [*PROMPT, *range(97, 97 + 140)]
    answer = await collect(engine.generate(prompt, Sampling(max_new_tokens=40, seed=3)))
    expected = logprobs_of(model, prompt, answer.ids_R.tolist())
    assert [span.version for span in answer.spans] == [version]
    return float(np.abs(answer.logprobs_R - expected).max()) < 1e-4


async def test_new_weights_pass_from_memory_to_memory(engine, sender, tmp_path):
    first, second = load_model(FOLDER), changed(FOLDER, tmp_path / "new", scale=0.2)
    assert "lm_head.weight" not in dict(second.module.named_parameters())  # a tied head passes too
    for model, other in ((second, first), (first, second), (second, first)):
        version = await load(engine, sender.publish(model.module.named_parameters()))
        assert await agrees(engine, model, version)
        assert not await agrees(engine, other, version)


async def test_a_copy_is_sent_whatever_the_trainer_does_meanwhile(engine, sender):
    model, still = load_model(FOLDER), load_model(FOLDER)
    weights = sender.publish(model.module.named_parameters())
    with torch.no_grad():
        model.module.get_parameter("model.embed_tokens.weight").zero_()
    assert await agrees(engine, still, await load(engine, weights))


async def test_a_folder_is_taken_too(engine, tmp_path):
    model = changed(FOLDER, tmp_path / "new", scale=0.2)
    version = await load(engine, Weights(kind="folder", folder=str(tmp_path / "new")))
    assert await agrees(engine, model, version)


async def test_what_the_trainer_refuses_changes_nothing(engine, sender, tmp_path):
    model = changed(FOLDER, tmp_path / "new", scale=0.2)
    weights = sender.publish(model.module.named_parameters())
    version = await load(engine, weights)
    gone = Weights(kind="transfer", address=f"{weights.address.partition('/')[0]}/1")
    with pytest.raises(EngineError, match="init_weight_transfer_engine answered 500"):
        await load(engine, gone)
    assert await agrees(engine, model, version)


async def test_a_transfer_that_breaks_off_gives_the_last_weights_again(engine, sender, tmp_path, caplog):
    model = changed(FOLDER, tmp_path / "new", scale=0.2)
    version = await load(engine, sender.publish(model.module.named_parameters()))
    parameters = list(load_model(FOLDER).module.named_parameters())
    # The last tensor has another shape than the model's: all layers before it have been loaded.
    broken = [*parameters[:-1], (parameters[-1][0], torch.zeros(3))]
    with pytest.raises(EngineError, match="update_weights answered 500"):
        await load(engine, sender.publish(broken))
    assert await agrees(engine, model, version)
    assert "a worker could not use them" in caplog.text
