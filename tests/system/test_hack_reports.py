"""What an agent tried, from its process to the trainer: real controllers, gateways and stores."""

import pytest

from manege.sandbox.probe import probe
from manege.trainer.collect import GroupFeed
from manege.trainer.credit import counted, is_flagged
from manege.types import Outcome, Task
from tests.system.test_controller import QUESTION, controlling, run_config, run_one

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(not probe().notify, reason="; ".join(probe().missing())),
]
CHEAT = ["sh", "-c", "cat /etc/shadow; git status; pip --version; pip install --retries 0 six; echo > test_a.py"]


async def told(client, rollout):
    kinds = rollout.evidence.get("hacks", {})
    events = {kind: await client.events(rollout.spec.id, f"hack.{kind}") for kind in kinds}
    return {kind: [event.data for event in each] for kind, each in events.items()}


async def test_what_an_agent_tries_is_told_once_and_flags_its_rollout(client, tmp_path):
    rollout = await run_one(client, tmp_path, run_config(CHEAT))
    assert (rollout.outcome, rollout.reward) == (Outcome.OK, 1.0), rollout.message
    assert rollout.evidence["hacks"] == {"file": True, "packages": False}
    assert await told(client, rollout) == {
        "file": [{"flags": True, "items": [{"detail": "/etc/shadow", "count": 1, "flags": True}]}],
        "packages": [
            {"flags": False, "items": [{"detail": "pip install --retries 0 six", "count": 1, "flags": False}]}
        ],
    }


async def test_changed_tests_are_told_and_do_not_flag(client, tmp_path):
    config = run_config([*CHEAT[:2], "echo > test_a.py; mkdir a; echo > a/test_b.py; echo > c.py"])
    scorer = config.scorer.model_copy(update={"restore": ["test_*.py", "a/**"]})
    rollout = await run_one(client, tmp_path, config.model_copy(update={"scorer": scorer}))
    assert not is_flagged(rollout)
    [[data]] = (await told(client, rollout)).values()
    assert [item["detail"] for item in data["items"]] == ["a", "test_a.py"]


async def test_who_does_nothing_wrong_has_no_report(client, tmp_path):
    rollout = await run_one(client, tmp_path, run_config("ask_once"))
    assert (rollout.outcome, "hacks" in rollout.evidence) == (Outcome.OK, False)


async def test_the_trainer_knows_who_cheated(client, tmp_path):
    config = run_config(CHEAT)
    feed = GroupFeed(client, "run", cursor=0, reward_from="scorer", max_attempts=1)
    await client.put_run("run", config.to_json())
    async with controlling(client, tmp_path):
        await feed.start(Task(id="t", input=QUESTION), size=2, is_train=True, temperature=1.0)
        group = await feed.next_group()
    zero = config.credit.model_copy(update={"flagged": "zero"})
    assert [counted(rollout, config.credit) for rollout in group.rollouts] == [1.0, 1.0]
    assert [counted(rollout, zero) for rollout in group.rollouts] == [0.0, 0.0]
