"""The names under which verl finds ours, registered by the plugin in every process that imports verl.

Mostly names: what stands behind them is imported when it is needed. The trainers must be there before verl looks for
one, and it looks before it calls anything of ours.
"""
# pyright: reportMissingImports=false

import importlib
from typing import Any

__all__ = ["register"]

_NAME = "manege"


def register() -> None:
    """Safe to repeat."""
    from verl.trainer.ppo import core_algos
    from verl.workers.rollout import base, replica

    core_algos.register_adv_est(_NAME)(_advantages)
    core_algos.register_policy_loss(_NAME)(_policy_loss)
    replica.RolloutReplicaRegistry.register(_NAME, _replica)
    base._ROLLOUT_REGISTRY[_NAME, "async"] = "manege.verl.replica.ServerAdapter"  # verl has no other way
    importlib.import_module("manege.verl.trainers")


def _advantages(**given: Any) -> Any:
    from manege.verl.credit import batch_advantages

    return batch_advantages(**given)


def _policy_loss(**given: Any) -> Any:
    from manege.verl.credit import policy_loss

    return policy_loss(**given)


def _replica() -> Any:
    from manege.verl.replica import Replica

    return Replica
