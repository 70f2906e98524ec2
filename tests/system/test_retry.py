"""Rollouts that the infrastructure failed are tried again later, by whatever controller asks then."""

import time

import pytest

from manege.store.base import Ending
from manege.types import Outcome
from tests.system.test_controller import controlling, run_config, settle, spec

pytestmark = pytest.mark.anyio

FAILS_TWICE = ["sh", "-c", "date +%s.%N >> {times}; test $(wc -l < {times}) -gt 2 || exit 1"]


async def test_attempts_follow_with_growing_pauses_and_the_last_one_may_succeed(client, tmp_path):
    times = tmp_path / "times"
    setup = [word.format(times=times) for word in FAILS_TWICE]
    await client.put_run("run", run_config(setup=setup).to_json())
    async with controlling(client, tmp_path, retry_s=0.5):
        (rollout,) = await settle(client, spec(max_attempts=3))
    assert (rollout.outcome, rollout.attempt, rollout.reward) == (Outcome.OK, 2, 1.0), rollout.message
    first, second, third = [float(line) for line in times.read_text().split()]
    assert second - first >= 0.5
    assert third - second >= 1


async def test_a_waiting_claim_gets_a_rollout_as_soon_as_it_may_be_tried_again(client):
    await client.create_rollouts([spec(max_attempts=2)])
    (claim,) = await client.claim(controller="c", limit=1, lease_s=30, wait_s=0)
    ending = Ending(outcome=Outcome.INFRA_ERROR, message="node died", retry_after_s=1.5)
    await client.finish(claim.rollout.spec.id, 0, ending)
    asked_s = time.monotonic()
    (again,) = await client.claim(controller="c", limit=1, lease_s=30, wait_s=30, holding=[])
    assert again.rollout.attempt == 1
    assert time.monotonic() - asked_s > 1.4
