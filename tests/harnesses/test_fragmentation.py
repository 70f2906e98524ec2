"""A real harness whose model says what a real one sampled, in other tokens than a tokenizer would choose."""

import pytest

from benchmarks.fragmentation import measure
from benchmarks.fragmentation_thoughts import sample_thoughts

pytestmark = [pytest.mark.anyio, pytest.mark.full]


@pytest.mark.timeout(600)
async def test_a_rollout_is_one_sample_with_continuation_and_falls_apart_without(tmp_path):
    sampled = await sample_thoughts(32, seed=0)
    thoughts = [thought for thought in sampled if not thought.is_canonical]
    assert thoughts
    found = {}
    for continued in (True, False):
        folder = tmp_path / str(continued)
        folder.mkdir()
        found[continued] = await measure("codex", thoughts, continued=continued, num_rollouts=2, folder=folder)
    for rollout in (*found[True], *found[False]):
        assert rollout.reward == 1.0
        assert rollout.num_trained == rollout.num_sampled
    assert [rollout.num_samples for rollout in found[True]] == [1, 1]
    assert [rollout.num_samples for rollout in found[False]] == [rollout.num_calls for rollout in found[False]]
