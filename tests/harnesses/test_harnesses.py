"""Every shipped harness, real and unmodified, does a coding task whose model is the scripted engine."""

import re
from collections import Counter

import numpy as np
import pytest

from manege.harnesses.harness import load, names
from manege.trainer.algo.forest import build_forest
from manege.trainer.algo.ledger import Reason
from manege.trainer.algo.samples import build_samples
from manege.trainer.credit import is_flagged
from manege.types import Outcome
from tests.harnesses.matrix import record
from tests.harnesses.policy import coding_reply, delegating_reply, tool_call
from tests.harnesses.running import run_harness, scripted
from tests.harnesses.table import ROWS

pytestmark = pytest.mark.anyio


def test_every_harness_is_a_row():
    assert sorted(ROWS) == sorted(names())


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, id=name, marks=() if row.in_ci else pytest.mark.harnesses) for name, row in ROWS.items()],
)
async def test_the_task_is_done_and_every_token_is_captured_once(name, tmp_path):
    row = ROWS[name]
    ran = await run_harness(name, scripted(coding_reply(row.shell)), tmp_path)
    rollout, calls = ran.rollout, ran.calls
    assert (rollout.outcome, rollout.reward) == (Outcome.OK, 1.0), (rollout.message, rollout.evidence)
    assert not is_flagged(rollout), rollout.evidence["hacks"]
    main = [call for call in calls if call.thread == "main"]
    assert len(main) == 4
    assert {call.thread for call in calls} - {"main"} == row.side_threads
    samples, ledger = build_samples(build_forest(calls))
    assert ledger.tokens == {Reason.TRAINED: ledger.sampled}
    assert all(num_trained_in(samples, call) == 1 for call in calls)
    in_main = [sample for sample in samples if sample.call_ids[-1] in {call.id for call in main}]
    if row.one_sample:
        assert len(in_main) == 1
    else:
        assert "one per call" in load(name).samples
    assert ran.left == []
    record(load(name), calls=calls, samples=samples, seconds=ran.seconds)


@pytest.mark.parametrize(
    ("name", "tool", "others"),
    [
        ("claude-code", "Agent", {"run_in_background": False}),
        ("opencode", "task", {"subagent_type": "general"}),
    ],
)
async def test_sub_agents_are_threads_and_samples_of_their_own(name, tool, others, tmp_path):
    def delegate(told):
        return tool_call(tool, {"description": "Look at a file", "prompt": told, **others})

    await check_sub_agent(name, delegating_reply(ROWS[name].shell, delegate, None), tmp_path)


async def test_sub_agents_of_codex_are_threads_and_samples_of_their_own(tmp_path):
    def wait(prompt):
        # The result of spawn_agent is the last to name it.
        return tool_call("wait_agent", {"targets": re.findall(r'"agent_id": ?"([0-9a-f-]+)"', prompt)[-1:]})

    reply = delegating_reply(ROWS["codex"].shell, lambda told: tool_call("spawn_agent", {"message": told}), wait)
    await check_sub_agent("codex", reply, tmp_path)


async def check_sub_agent(name, reply, folder):
    ran = await run_harness(name, scripted(reply), folder)
    assert (ran.rollout.outcome, ran.rollout.reward) == (Outcome.OK, 1.0), (ran.rollout.message, ran.rollout.evidence)
    threads = Counter(call.thread for call in ran.calls)
    (agent,) = set(threads) - {"main"} - ROWS[name].side_threads
    assert re.fullmatch(r"agent:[\w-]+", agent)
    assert threads[agent] == 2
    samples, ledger = build_samples(build_forest(ran.calls))
    assert ledger.tokens == {Reason.TRAINED: ledger.sampled}
    assert all(num_trained_in(samples, call) == 1 for call in ran.calls)
    assert len(samples) == 2 + len(ROWS[name].side_threads)


async def test_the_attribution_line_of_claude_code_is_filtered(tmp_path):
    """As deployed it has one; started by us it is told to leave it out."""
    env = {"CLAUDE_CODE_ATTRIBUTION_HEADER": "1"}
    ran = await run_harness("claude-code", scripted(coding_reply(ROWS["claude-code"].shell)), tmp_path, env=env)
    assert ran.rollout.reward == 1.0
    assert all(any(edit.startswith("attribution line: ") for edit in call.edits) for call in ran.calls)
    assert all("x-anthropic-billing-header" not in str(call.request["messages"]) for call in ran.calls)
    samples, _ = build_samples(build_forest(ran.calls))
    assert len(samples) == 1


def num_trained_in(samples, call):
    """In how many samples the call's sampled tokens are trained; they are trained all together or not at all."""
    where = slice(len(call.prompt_ids_P), len(call.prompt_ids_P) + len(call.response_ids_R))
    found = 0
    for sample in samples:
        if call.id in sample.call_ids:
            mask = sample.mask_T[where]
            assert mask.all() or not mask.any()
            assert np.array_equal(sample.ids_T[where], call.response_ids_R)
            found += int(mask.all())
    return found
