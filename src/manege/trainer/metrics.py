"""The metrics of a run: one table of names, one JSONL file.

A name that is not in the table cannot be written; docs/reference/metrics.md is generated from it.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from manege.trainer.durable import sync, write_text

__all__ = ["METRICS", "MetricsFile", "read_metrics"]

METRICS: Mapping[str, str] = {
    "kind": "`step` or `evaluation`",
    "step": "updates done, from 1 on; of an evaluation: updates before it",
    "groups": "ids of the groups that the step trained, in their order; a group is in one step at most",
    "replaced": "ids of the constant groups that others were made for",
    "optimiser_steps": "optimiser steps of the update: mini-batches that have a gradient; 0: nothing to learn",
    "policy_version": "version that was published (step), or the oldest one that sampled (evaluation)",
    "policy_version_last": "the newest version that sampled an evaluation: training goes on beside it",
    "time_s": "seconds since the epoch",
    "train_s": "seconds of training so far; evaluations that it waits for apart",
    "trainer_idle_s": "seconds that the trainer waited for the step's rollouts",
    "update_s": "seconds of the update, with pausing and publishing",
    "drain_s": "seconds of it until no token was sampled any more (train.inflight)",
    "unsettled_calls": "model calls that were still under way then, and went on under the new weights",
    "held_calls": "model calls that had to wait for the end of a pause since the last update",
    "held_s": "seconds that they waited, added up",
    "engine_idle_s": "seconds since the last update, pauses apart, in which an engine had no call; mean of the engines",
    "staleness_mean": "mean over the groups of versions between their oldest token and the one that they trained",
    "staleness_max": "the largest of these; at most train.max_staleness with train.schedule = async",
    "staleness_histogram": "groups by these",
    "carried_over": "groups under way that the step did not train",
    "carried_age_max": "versions since the oldest of these was asked for",
    "rollout_s_mean": "mean seconds from start to end of the step's rollouts that were not cut off",
    "dropped_rollouts": "rollouts that were cut off since the last step (train.staleness_policy)",
    "dropped_groups": "groups that were not trained since they were too old or too little was left of them",
    "dropped_s_mean": "mean seconds that the rollouts ran that were cut off; longer than the others': what is trained "
    "leans towards short ones",
    "reward_mean": "mean reward of the rollouts that have one, before shaping; groups that were replaced count, too",
    "success_rate": "share of these rollouts whose reward reaches scorer.success_reward",
    "flagged": "rollouts that tried to cheat, by their hack reports; credit.flagged says what becomes of them",
    "flagged_rewarded": "share of those with a reward whose reward, as it was given, reaches scorer.success_reward",
    "length_penalty_mean": "mean of what credit.length_penalty took off the rewards",
    "temperature": "sampling temperature of an evaluation; 0 is greedy",
    "num_tasks": "held-out tasks of an evaluation",
    "low": "lower end of the 95 % interval of success_rate (Wilson)",
    "high": "upper end of the 95 % interval of success_rate (Wilson)",
    "num_rollouts": "rollouts of the step",
    "num_verdicts": "rollouts with a reward that counts",
    "num_calls": "model calls",
    "num_samples": "samples built from the calls",
    "samples_per_rollout": "samples per rollout that has a reward and any sample; 1.0 for a linear agent",
    "samples_per_rollout_max": "most samples of a rollout",
    "one_sample_fraction": "share of these rollouts that are a single sample",
    "samples_histogram": "these rollouts by their number of samples",
    "branches": "places where a rollout is not one line of calls, by kind (trainer/algo/branches.py)",
    "call_unique_fraction": "distinct tokens of all calls, common beginnings once, over their prompts and answers",
    "sampled_tokens": "tokens that the engine sampled for the step's rollouts",
    "tokens_per_s": "sampled tokens of the step per second of it",
    "rollouts_per_s": "rollouts of the step per second of it",
    "informative_groups": "groups with an advantage other than zero",
    "constant_groups": "the other groups: all rewards are equal, or there is one at most",
    "lone_groups": "groups with a single reward, which has nothing to be compared with",
    "refilled_groups": "constant groups that others were made for (credit.zero_variance)",
    "loss": "value of the loss",
    "grad_norm": "norm of the gradient before clipping",
    "learning_rate": "of this step",
    "trained_tokens": "tokens of the optimiser steps: those with advantage zero add nothing and are not computed",
    "dead_tokens": "sampled tokens of answers that never reached the agent",
    "truncated_tokens": "sampled tokens beyond the longest sample, and of answers cut short where a run masks those",
    "excluded_tokens": "sampled tokens left out for another reason",
    "context_tokens": "sampled tokens that are only read, in a sample beside the one that trains them",
    "tokens_by_reason": "sampled tokens by what became of them and why; adds up to sampled_tokens",
    "calls_by_reason": "calls by the same reasons; those without usable tokens appear here only",
    "trained_fraction": "share of the sampled tokens that count in the loss, also with advantage zero",
    "unique_tokens": "tokens computed by the update; shared prefixes count once",
    "total_tokens": "tokens of all samples of the update",
    "unique_ratio": "unique_tokens / total_tokens: what the prefix tree saved",
    "clip_fraction": "share of trained tokens whose gradient the clip removed (cispo: whose weight it bounded)",
    "masked_fraction": "share of trained tokens outside credit.mismatch_band",
    "mismatch_weight_mean": "mean weight of the trained tokens by credit.ratio; 1 for `recorded`, 0 where masked",
    "kl_reference": "mean divergence of the policy from the model that the run began with (k3), in nats per token",
    "entropy": "mean entropy of the policy where it sampled the trained tokens, in nats",
    "gap_mean": "mean absolute difference of trainer and sampler log-probabilities, before the weights change",
    "gap_max": "largest such difference",
    "gap_kl": "divergence of the trainer's policy from the sampler's (k3), in nats per token",
    "gap_by_distance": "mean, max and kl of that gap by the number of policy versions between sampling and update",
}


class MetricsFile:
    """Appends one JSON object per line; it is on the disk when `write` returns."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, row: Mapping[str, Any]) -> None:
        """Unknown names are a bug of ours."""
        unknown = set(row) - set(METRICS)
        assert not unknown, f"metrics that are not in the table: {sorted(unknown)}"
        is_new = not self._path.exists()
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(dict(row)) + "\n")
            file.flush()
            os.fsync(file.fileno())
        if is_new:
            sync(self._path.parent)

    def truncate(self, *, step: int) -> None:
        """Forget rows after this step: a resumed run makes them again."""
        if not self._path.exists():
            return
        kept = [row for row in read_metrics(self._path) if row["step"] <= step]
        write_text(self._path, "".join(json.dumps(dict(row)) + "\n" for row in kept))


def read_metrics(path: Path) -> Sequence[Mapping[str, Any]]:
    """All complete lines; a last line cut by a crash is left out."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows
