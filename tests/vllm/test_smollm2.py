"""SmolLM2 in vLLM: log-probabilities as ours before and after an update, at the temperatures that training uses."""

import numpy as np
import pytest

from manege.engine.base import Sampling, Weights, collect
from manege.engine.upstream import UpstreamEngine
from manege.model.folder import open_folder
from manege.model.load import load_model
from manege.types import PolicyVersion
from tests.vllm.serving import changed, logprobs_of, served

pytestmark = [pytest.mark.vllm, pytest.mark.anyio, pytest.mark.timeout(1500)]

FOLDER = open_folder("smollm2")
TEXT = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
PROMPT = FOLDER.tokenizer.encode(TEXT).ids


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    with served(FOLDER.path, tmp_path_factory.mktemp("logs"), max_model_len=512) as address:
        yield address


async def test_logprobs_are_ours_before_and_after_an_update(url, tmp_path):
    engine = UpstreamEngine(url)
    before, after = load_model(FOLDER), changed(FOLDER, tmp_path / "new", scale=0.02)
    told = {}
    for version, model in enumerate((before, after)):
        if version:
            await engine.pause()
            await engine.load(Weights(kind="folder", folder=str(tmp_path / "new")), PolicyVersion(version))
            await engine.resume()
        for temperature in (1.0, 0.6, 0.0):
            sampling = Sampling(temperature=temperature, max_new_tokens=24, seed=4, stop_ids=FOLDER.eos_ids)
            answer = await collect(engine.generate(PROMPT, sampling))
            expected = logprobs_of(model, PROMPT, answer.ids_R.tolist(), temperature or 1.0)
            np.testing.assert_allclose(answer.logprobs_R, expected, atol=1e-4, rtol=0)
            assert [span.version for span in answer.spans] == [version]
            told[version, temperature] = answer
    greedy = told[0, 0.0]
    assert "Paris" in FOLDER.decode(greedy.ids_R.tolist())
    # The second weights are others.
    other = logprobs_of(after, PROMPT, greedy.ids_R.tolist())
    assert np.abs(other - greedy.logprobs_R).max() > 0.01
    await engine.close()
