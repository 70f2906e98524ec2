"""Where nothing works, a training stops after a bounded number of attempts and says why."""

import asyncio
import signal

import pytest

from manege.store.reading import StoreReader
from manege.types import Outcome
from tests.system.kill.processes import until
from tests.system.kill.site import Site


def stopped_with(site):
    """What the trainer printed."""
    trainer = site.parts["trainer"]
    until(trainer.has_ended, "the training stops", timeout_s=60)
    assert trainer.code == 2, site.logs()
    return trainer.log.read_text()


async def ended(site):
    reader = await StoreReader.open(site.data / "manege.db")
    try:
        return (await reader.terminal(run="staged", after=0, limit=1000)).rollouts
    finally:
        await reader.close()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ([], "4 of 4 rollouts of this step failed for a reason that is not their agent's"),
        (
            ["tasks.heldout=staged_tasks:generate", "tasks.num_heldout=12"],
            "the first 8 rollouts of the evaluation failed for a reason that is not their agent's",
        ),
    ],
    ids=["in a step", "in the evaluation before the first"],
)
def test_a_setup_that_always_fails_ends_the_run_with_its_words(tmp_path, changes, said):
    with Site(tmp_path, apart=False, changes=["agent.setup=staged_tasks:fail", *changes]) as site:
        site.start()
        text = stopped_with(site)
        assert said in text
        assert "no such image" in text
        rollouts = asyncio.run(ended(site))
    assert {(rollout.outcome, rollout.attempt) for rollout in rollouts} == {(Outcome.INFRA_ERROR, 1)}


@pytest.mark.full
def test_an_engine_that_is_gone_for_good_ends_the_run(tmp_path):
    with Site(tmp_path, apart=True) as site:
        site.order("busy")
        site.start()
        until(lambda: site.state()["inflight"], "a call")
        site.parts["engine"].kill(signal.SIGKILL)
        text = stopped_with(site)
    assert "failed for a reason that is not their agent's" in text
    assert f"the engine at http://127.0.0.1:{site.engine_port} cannot be reached" in text
