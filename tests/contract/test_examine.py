"""What `manege doctor --engine` finds out of vLLM, started well and badly."""

import pytest

from manege.engine.examining.examine import Verdict, examine
from manege.model.folder import open_folder
from tests.conftest import TINY_MODEL
from tests.vllm.serving import served

pytestmark = [pytest.mark.vllm, pytest.mark.anyio, pytest.mark.timeout(900)]


async def examined(url):
    """Texts that are ok, texts that are missing, and the verdict."""
    *findings, verdict = [found async for found in examine(url, open_folder(str(TINY_MODEL)))]
    assert isinstance(verdict, Verdict)
    return [each.text for each in findings if each.ok], [each.text for each in findings if each.ok is False], verdict


async def test_vllm_as_a_run_starts_it_takes_token_ids_and_new_weights(vllm_url):
    ok, missing, verdict = await examined(vllm_url)
    assert missing == []
    assert ok[0].startswith("vLLM 0.")
    assert "2048 tokens of context" in ok
    assert "/inference/v1/generate, whose answers say which weights sampled what" in ok
    assert "log-probabilities at temperature 0.6: those of softmax(logits / T)" in ok
    assert "its tokens are those of the model folder" in ok
    assert "pause and resume (tried for a moment, with everything kept)" in ok
    assert (verdict.mode, verdict.wire, verdict.can_train) == ("tokens", "vllm", True)


async def test_vllm_without_its_settings_is_told_which_it_lacks(tmp_path):
    with served(TINY_MODEL, tmp_path, logprobs_mode="raw_logprobs", enable_scale_out=False) as url:
        _, missing, verdict = await examined(url)
    assert "log-probabilities at temperature 0.6: not those of softmax(logits / T)" in missing
    assert verdict.mode is None
    assert {"--enable-scale-out", "--logprobs-mode processed_logprobs"} <= set(verdict.options)
