"""`manege eval --samples`: several rollouts per task, here and at a gateway elsewhere."""

import asyncio
import json

import pytest

from manege.store.sql import SqlStore
from manege.trainer.passing import pass_at
from tests.conftest import OPERATOR_KEY
from tests.system.test_controller import UNSAFE, controlling
from tests.system.test_training import RUN_FILE, finish, manege

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(400)]


async def rollouts_of(path, run):
    store = await SqlStore.open(path)
    try:
        return (await store.list_rollouts(run=run, limit=None)).rollouts, await _calls(store, run)
    finally:
        await store.close()


async def _calls(store, run):
    rollouts = (await store.list_rollouts(run=run, limit=None)).rollouts
    return [call for calls in (await store.calls([each.spec.id for each in rollouts])).values() for call in calls]


async def test_pass_at_k_is_what_the_stored_rollouts_say(tmp_path):
    words = ["eval", RUN_FILE, "--samples", 3, "--json", "tasks.num_heldout=8", "evaluation.temperatures=[1.0]"]
    code, out, err = await asyncio.to_thread(finish, manege(*words, f"folder={tmp_path / 'run'}"))
    assert code == 0, err
    row = json.loads(out)
    rollouts, calls = await rollouts_of(tmp_path / "run" / "manege.db", "tiny")
    assert len(rollouts) == 24
    assert all(not each.spec.is_train and each.spec.temperature == 1.0 for each in rollouts)
    successes = dict.fromkeys((each.spec.task.id for each in rollouts), 0)
    for each in rollouts:
        successes[each.spec.task.id] += each.reward == 1.0
    assert row["successes"] == successes
    assert 0 < sum(successes.values()) < 24
    for rate, k in zip(row["pass_at"], (1, 2, 3), strict=True):
        chances = [pass_at(k, num=3, num_success=count) for count in successes.values()]
        assert (rate["k"], rate["rate"]) == (k, pytest.approx(sum(chances) / 8))
        assert rate["low"] < rate["rate"] < rate["high"]
    assert row["success_rate"] == row["pass_at"][0]["rate"]
    assert row["turns_per_rollout"] == len(calls) / 24
    assert row["prompt_tokens_per_rollout"] == sum(len(call.prompt_ids_P) for call in calls) / 24
    assert row["sampled_tokens_per_rollout"] == sum(len(call.response_ids_R) for call in calls) / 24
    assert "pass@3" in err


@pytest.mark.skipif(UNSAFE.unsafe, reason="agents cannot be isolated on this machine")
async def test_rollouts_of_a_gateway_elsewhere_are_a_run_of_their_own(tmp_path, gateway, client):
    await client.put_run("run", {"mine": True})
    (tmp_path / "key").write_text(OPERATOR_KEY)
    (tmp_path / "tasks.jsonl").write_text('{"id": "a", "input": {"question": "q"}}\n')
    (tmp_path / "run.toml").write_text(
        'name = "run"\ntasks = { train = "none.jsonl", heldout = "tasks.jsonl" }\n'
        "evaluation = { temperatures = [1.0] }\n"
        'agent = { run = "tests.programs:ask_once", env = { QUESTION = "{question}" } }\n'
        'scorer = { run = "tests.programs:score_one" }\n'
    )
    words = ["eval", tmp_path / "run.toml", "--gateway", gateway.url, "--key-file", tmp_path / "key", "--samples", 2]
    async with controlling(client, tmp_path / "controller"):
        code, out, err = await asyncio.to_thread(finish, manege(*words, "--json"))
    assert code == 0, err
    row = json.loads(out)
    assert (row["successes"], row["turns_per_rollout"]) == ({"a": 2}, 1.0)
    assert (await client.get_run("run")).config == {"mine": True}
    assert len((await client.terminal(run="run-eval", after=0)).rollouts) == 2
