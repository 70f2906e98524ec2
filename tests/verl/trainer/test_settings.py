"""What verl's configuration and a run file say together, and what is refused before anything is rolled out."""

import pytest

from manege.errors import ConfigError
from tests.verl.trainer.running import SETTINGS, TINY

pytestmark = pytest.mark.verl


def settings(*more):
    from hydra import compose, initialize_config_module

    from manege.verl.settings import read_settings

    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=[*SETTINGS, f"+manege.run={TINY / 'run.toml'}", *more])
    return read_settings(config)


@pytest.mark.parametrize("mode", ["sync", "colocate_async", "separate_async"])
def test_modes_of_several_steps_a_batch_are_refused_beside_our_credit(mode):
    asked = f"trainer.v1.trainer_mode={mode}"
    with pytest.raises(ConfigError, match=f"trainer.v1.trainer_mode=manege_{mode}"):
        settings(asked)
    credit = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.policy_loss.loss_mode=vanilla"]
    assert (
        settings(asked, *credit).train.group_size == settings(f"trainer.v1.trainer_mode=manege_{mode}").train.group_size
    )


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["actor_rollout_ref.actor.policy_loss.loss_mode=vanilla"], "loss_mode=manege, not 'vanilla'"),
        (["actor_rollout_ref.actor.use_kl_loss=True"], "use_kl_loss=True"),
        (["actor_rollout_ref.actor.entropy_coeff=0.1"], "entropy_coeff=0.1"),
        (["+manege.credit.clip_high=0.4"], "actor_rollout_ref.actor.clip_ratio_high"),
    ],
)
def test_what_would_do_nothing_or_something_else_is_refused(more, message):
    with pytest.raises(ConfigError, match=message):
        settings("trainer.v1.trainer_mode=manege_sync", *more)
