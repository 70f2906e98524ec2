"""verl's own trainer, started as its users do, with agents in our harnesses: it learns, and by our gradient.

Every start of verl takes half a minute or more on two cores, so each run is asked many things.
"""

import argparse
import asyncio
import random

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
from tests.verl.trainer.running import GROUPS, HELDOUT, SIZE, TINY, logged, trained_groups

pytestmark = [pytest.mark.verl, pytest.mark.timeout(2400)]

SCORE, VALIDATION = "critic/score/mean", "val-core/tiny/reward/mean@1"
FORKED = TINY.parent / "verl" / "trainer" / "programs" / "run.toml"
FEWER = GROUPS // 2
FEW_GROUPS = [
    f"data.train_batch_size={FEWER}",
    f"actor_rollout_ref.actor.ppo_mini_batch_size={FEWER}",
    # Decoupled, as asynchronous trainers are to be.
    "algorithm.rollout_correction.bypass_mode=False",
    "algorithm.rollout_correction.rollout_is=token",
    "algorithm.rollout_correction.rollout_is_threshold=2.0",
]
SEPARATE = [
    "actor_rollout_ref.hybrid_engine=False",
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=1",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=manege_folder",
    "actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=manege.verl.checkpoint_folder",
]
VERLS_CREDIT = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.policy_loss.loss_mode=vanilla"]


def stored(folder):
    """Groups for training in the order of their completion, and rollouts for validation."""

    async def read():
        async with stored_run(argparse.Namespace(run=str(folder / "run"), gateway=None)) as run:
            groups = [members for members in complete_groups(run.rollouts) if members is not None]
            heldout = [rollout for rollout in run.rollouts if not rollout.spec.is_train]
            return [await run.group(members, call_rewards=False) for members in groups], heldout

    return asyncio.run(read())


def versions(groups):
    return {span.version for group in groups for calls in group.calls for call in calls for span in call.spans}


def check_first_step(row, groups):
    """It is what our own trainer makes of the same groups, from the same weights."""
    assert versions(groups) == {0}
    credit, folder = CreditConfig(), open_folder(str(TINY / "model"))
    engine = TorchEngine(load_model(folder), folder, TrainConfig())
    batch = build_batch(groups, credit, success_reward=1.0, rng=random.Random(0))
    ours = engine.step(batch.samples, objective_of(credit)).metrics
    assert row["actor/grad_norm"] == pytest.approx(ours["grad_norm"], rel=1e-4)
    assert row["actor/pg_loss"] == pytest.approx(ours["loss"], rel=1e-4, abs=1e-6)


def check_validation(steps, heldout, after):
    """verl's number is the mean of the scorer's verdicts."""
    rewards = [rollout.reward for rollout in sorted(heldout, key=lambda rollout: rollout.completion)]
    assert len(rewards) == len(after) * HELDOUT
    for number, step in enumerate(after):
        part = rewards[number * HELDOUT : (number + 1) * HELDOUT]
        verdicts = [reward for reward in part if reward is not None]
        assert steps[step][VALIDATION] == pytest.approx(sum(verdicts) / len(verdicts))


def group_uid(group):
    return group.id.rpartition("-")[0]


def test_sync_learns_with_our_gradient(tmp_path, trainings):
    more = ["trainer.val_before_train=True", "trainer.test_freq=6"]
    steps, log = trainings.run(tmp_path, "manege_sync", steps=6, more=more)
    assert sorted(steps) == list(range(7))
    groups, heldout = stored(tmp_path)
    assert [len(group.rollouts) for group in groups] == [SIZE] * (6 * GROUPS)
    check_first_step(steps[1], groups[:GROUPS])
    check_validation(steps, heldout, after=[0, 6])
    # Versions are verl's global steps, and every step trains what its own weights sampled.
    assert all(steps[step]["training/off_policy/trajectory_staleness/max"] == 0 for step in range(1, 7))
    assert steps[6][SCORE] > steps[1][SCORE] + 0.1, [steps[step][SCORE] for step in range(1, 7)]
    assert "Disabled critic" in log


def test_colocate_async_goes_on_after_it_was_killed(tmp_path, trainings):
    """With several samples per rollout, and agents that fail."""
    more = [*FEW_GROUPS, "trainer.v1.colocate_async.num_warmup_batches=2", "trainer.save_freq=2"]
    run = {"run_file": FORKED, "steps": 4, "more": more}
    trainings.run_and_kill(tmp_path, "manege_colocate_async", step=2, **run)
    before, _ = stored(tmp_path)
    by_uid = {group_uid(group): group for group in before}
    first = [by_uid[uid] for uid in trained_groups(tmp_path, 1)]
    check_first_step(logged(tmp_path)[1], first)

    steps, log = trainings.run(tmp_path, "manege_colocate_async", **run)
    assert sorted(steps) == [3, 4]
    # Two batches were under way: what had ended is trained as it was, the rest is asked for again.
    assert f"Restored {2 * FEWER} training prompt groups" in log
    assert "Re-issued" in log
    groups, _ = stored(tmp_path)
    rollouts = [(r, calls) for group in groups for r, calls in zip(group.rollouts, group.calls, strict=True)]
    assert any(r.outcome is Outcome.AGENT_ERROR and not calls for r, calls in rollouts)
    assert any(r.outcome is Outcome.OK and r.reward is None for r, _ in rollouts)
    later = [group for group in groups if group.id not in {group.id for group in before}]
    assert min(versions(later)) >= 2
    # verl lists what step 2 had trained after its checkpoint, and did not come to it.
    trained = [trained_groups(tmp_path, step) for step in (1, 3, 4)]
    assert [len(uids) for uids in trained] == [FEWER] * 3
    assert len(set.union(*trained)) == 3 * FEWER
    assert max(row["training/off_policy/trajectory_staleness_worst/max"] for row in steps.values()) >= 1


def test_separate_async_trains_while_a_server_of_its_own_samples(tmp_path, trainings):
    weights = tmp_path / "weights"
    folder = f"+actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.manege_folder.folder={weights}"
    more = [*FEW_GROUPS, *SEPARATE, folder, "trainer.v1.separate_async.parameter_sync_step=1", "trainer.test_freq=3"]
    steps, _ = trainings.run(tmp_path, "manege_separate_async", steps=3, run_file=FORKED, more=more)
    assert sorted(steps) == [1, 2, 3]
    groups, heldout = stored(tmp_path)
    by_uid = {group_uid(group): group for group in groups}
    check_first_step(steps[1], [by_uid[uid] for uid in trained_groups(tmp_path, 1)])
    check_validation(steps, heldout, after=[3])
    # Step 3 trains what was asked for in step 2.
    assert versions(groups) >= {0, 1}
    assert all(row["actor/grad_norm"] > 0 for row in steps.values())


@pytest.mark.parametrize("mode", ["sync", pytest.param("colocate_async", marks=pytest.mark.full)])
def test_verls_own_modes_train_by_verls_own_credit(tmp_path, trainings, mode):
    more = [*FEW_GROUPS, *VERLS_CREDIT]
    steps, _ = trainings.run(tmp_path, mode, steps=2, run_file=FORKED, more=more)
    assert sorted(steps) == [1, 2]
    groups, _ = stored(tmp_path)
    by_uid = {group_uid(group): group for group in groups}
    first = [by_uid[uid] for uid in trained_groups(tmp_path, 1)]
    assert len(first) == FEWER
    assert versions(first) == {0}
    assert all(row["actor/grad_norm"] > 0 for row in steps.values())
