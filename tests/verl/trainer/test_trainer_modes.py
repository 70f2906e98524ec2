"""verl's own trainer, started as its users do, with agents in our harnesses: it learns, and by our gradient.

Every start of verl takes a minute or more on two cores, so each run is asked many things.
"""

import argparse
import asyncio
import math
import random
from itertools import islice

import pytest

from manege.cli.rebuild import complete_groups
from manege.cli.stored import stored_run
from manege.config import CreditConfig, TrainConfig
from manege.model.folder import open_folder
from manege.model.load import load_model
from manege.trainer.batch import build_batch
from manege.trainer.engines.torch import TorchEngine
from manege.trainer.objective import objective_of
from manege.types import Outcome
from tests.verl.trainer.running import GROUPS, SIZE, TINY, train

pytestmark = [pytest.mark.verl, pytest.mark.timeout(1200)]

SCORE, ROWS = "critic/score/mean", "manege/rows"
PROGRAMS = TINY.parent / "verl" / "trainer" / "programs"


async def stored_groups(folder):
    """All of a run, in the order of their completion."""
    async with stored_run(argparse.Namespace(run=str(folder), gateway=None)) as stored:
        groups = [members for members in complete_groups(stored.rollouts) if members is not None]
        return [await stored.group(members, call_rewards=False) for members in groups]


def our_step(groups):
    """What our own trainer makes of the same groups, from the same weights."""
    credit, folder = CreditConfig(), open_folder(str(TINY / "model"))
    engine = TorchEngine(load_model(folder), folder, TrainConfig())
    batch = build_batch(groups, credit, success_reward=1.0, rng=random.Random(0))
    return engine.step(batch.samples, objective_of(credit)).metrics


def test_sync_learns_with_our_gradient(tmp_path):
    steps, log = train(tmp_path, "manege_sync", steps=6)
    assert sorted(steps) == list(range(1, 7))
    groups = asyncio.run(stored_groups(tmp_path / "run"))
    assert [len(group.rollouts) for group in groups] == [SIZE] * (6 * GROUPS)
    # The first step's groups were all sampled by the weights that the run began with.
    first = groups[:GROUPS]
    assert {span.version for group in first for calls in group.calls for call in calls for span in call.spans} == {0}
    ours = our_step(first)
    assert steps[1]["actor/grad_norm"] == pytest.approx(ours["grad_norm"], rel=1e-4)
    assert steps[1]["actor/pg_loss"] == pytest.approx(ours["loss"], rel=1e-4, abs=1e-6)
    # Versions are verl's global steps, and every step trains what its own weights sampled.
    assert all(row["training/off_policy/trajectory_staleness/max"] == 0 for row in steps.values())
    assert steps[6][SCORE] > steps[1][SCORE] + 0.1, [row[SCORE] for row in steps.values()]
    assert "Disabled critic" in log


def test_colocate_async_with_several_samples_per_rollout_and_agents_that_fail(tmp_path):
    steps, _ = train(
        tmp_path,
        "manege_colocate_async",
        steps=4,
        run_file=PROGRAMS / "run.toml",
        more=[f"data.train_batch_size={GROUPS // 2}", f"actor_rollout_ref.actor.ppo_mini_batch_size={GROUPS // 2}"],
    )
    assert sorted(steps) == [1, 2, 3, 4]
    groups = asyncio.run(stored_groups(tmp_path / "run"))
    rollouts = [(r, calls) for group in groups for r, calls in zip(group.rollouts, group.calls, strict=True)]
    assert any(r.outcome is Outcome.AGENT_ERROR and not calls for r, calls in rollouts)
    assert any(r.outcome is Outcome.OK and r.reward is None for r, _ in rollouts)
    versions = {span.version for _, calls in rollouts for call in calls for span in call.spans}
    assert versions >= {0, 1, 2}
    for row in steps.values():
        assert math.isfinite(row["actor/grad_norm"])
        # More rows than rollouts, in one optimiser step: each of its metrics is there once.
        assert row["training/off_policy/trajectory_staleness/max"] <= 8
    assert max(row["training/off_policy/trajectory_staleness_worst/max"] for row in steps.values()) >= 1
    assert len(list(islice(groups, 4 * GROUPS // 2))) == 4 * GROUPS // 2
