"""verl's configuration and a run file become one: who decides what, and what is refused.

`+manege.run=run.toml` names the run file; other keys below `manege` are the run file's own and win over it
(`+manege.folder=runs/first`). Agent, scorer, sandbox, limits, controller, gateway and the credit of rollouts are the
run file's. Model, batch, sampling temperature, context, update, schedule and engines are verl's: of those the run
file's keys are overwritten, or refused where they would silently do nothing.
"""
# pyright: reportMissingImports=false

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from manege.cli.arguments import read_run
from manege.config import CreditConfig, RunConfig
from manege.errors import ConfigError

__all__ = ["NAME", "is_ours", "read_settings"]

NAME = "manege"
"""Of the advantage estimator, the policy loss and the rollout engine."""

_VERLS: Mapping[str, str] = {
    "loss": "actor_rollout_ref.actor.policy_loss.loss_mode",
    "clip_low": "actor_rollout_ref.actor.clip_ratio_low",
    "clip_high": "actor_rollout_ref.actor.clip_ratio_high",
    "dual_clip": "actor_rollout_ref.actor.clip_ratio_c",
    "mismatch_level": "algorithm.rollout_correction.rollout_is",
    "mismatch_cap": "algorithm.rollout_correction.rollout_is_threshold",
    "mismatch_band": "algorithm.rollout_correction.rollout_rs_threshold",
    "kl": "actor_rollout_ref.actor.use_kl_loss, with an estimator of verl's",
    "zero_variance": "algorithm.filter_groups.enable",
    "min_trained_fraction": "no key: watch response_length and the ledger of `manege show`",
    "shuffle_rewards": "no key: it is for `manege train`",
}
"""Keys of `credit` that verl decides, and what does so there."""


def read_settings(config: DictConfig) -> RunConfig:
    """The run file as verl's configuration completes it. Raises ConfigError."""
    named = OmegaConf.select(config, "manege.run")
    if not named:
        raise ConfigError("verl's configuration names no run file; add +manege.run=run.toml")
    rollout = config.actor_rollout_ref.rollout
    given = OmegaConf.to_container(config.manege, resolve=True)
    assert isinstance(given, dict)
    overrides = [
        *_overrides({str(key): value for key, value in given.items() if key != "run"}),
        f"model.path={json.dumps(str(config.actor_rollout_ref.model.path))}",
        f"sampling.temperature={float(rollout.temperature)}",
        f"train.group_size={int(rollout.n)}",
        *([] if rollout.max_model_len is None else [f"model.max_context={int(rollout.max_model_len)}"]),
    ]
    run = read_run(argparse.Namespace(run_file=Path(named), overrides=overrides, quick=False, unsafe=False))
    _refuse_what_does_nothing(run.credit)
    if is_ours(config):
        _check_ours(config)
    return run


def is_ours(config: DictConfig) -> bool:
    """Whether our code forms the advantages, or an estimator of verl's, from rewards."""
    return config.algorithm.adv_estimator == NAME


def _overrides(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _overrides(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}={json.dumps(value)}"


def _refuse_what_does_nothing(credit: CreditConfig) -> None:
    for key, theirs in _VERLS.items():
        value = getattr(credit, key)
        if value != CreditConfig.model_fields[key].default:
            raise ConfigError(f"credit.{key} = {value!r} does nothing under verl's trainer, which has {theirs}")


def _check_ours(config: DictConfig) -> None:
    """What our loss cannot do, or would do with weights that are not a rollout's."""
    actor, mode = config.actor_rollout_ref.actor, config.trainer.v1.trainer_mode
    if mode in ("sync", "colocate_async", "separate_async"):
        raise ConfigError(
            f"trainer.v1.trainer_mode={mode} makes several optimiser steps of what was drawn together where rollouts "
            f"have several samples, and algorithm.adv_estimator={NAME} weighs for one: set "
            f"trainer.v1.trainer_mode={NAME}_{mode}, or use an estimator of verl's (algorithm.adv_estimator=grpo)"
        )
    if actor.policy_loss.loss_mode != NAME:
        raise ConfigError(
            f"algorithm.adv_estimator={NAME} has the weights of rollouts in its advantages, which only a sum keeps: "
            f"set actor_rollout_ref.actor.policy_loss.loss_mode={NAME}, not {actor.policy_loss.loss_mode!r}"
        )
    for key, value in (
        ("actor_rollout_ref.actor.use_kl_loss", actor.use_kl_loss),
        ("actor_rollout_ref.actor.entropy_coeff", actor.entropy_coeff),
        ("algorithm.use_kl_in_reward", config.algorithm.use_kl_in_reward),
    ):
        if value:
            raise ConfigError(
                f"{key}={value}: verl does not weigh this term by rollout; leave it off, or use an estimator of verl's "
                "(algorithm.adv_estimator=grpo)"
            )
