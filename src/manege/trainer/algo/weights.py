"""The share of each sample in the loss: loss = sum over samples s of weight_s * sum over trained t of l_t.

N rollouts have a reward in the optimiser step (those with advantage zero, or without any call, included), T_i trained
tokens in rollout i:
    rollout_mean  1 / (N T_i)     every rollout counts the same, every token of a rollout the same
    constant      1 / (N L)       no length term (Dr. GRPO, arXiv 2503.20783)
    token_mean    1 / sum_j T_j   every token the same
    sample_mean   1 / (S T_s)     the mean over samples; depends on how a rollout falls apart, for study only
The first three depend on rollouts only: however a harness cuts a rollout into samples, the gradient is the same.
"""

from collections.abc import Sequence

from manege.trainer.algo.samples import Sample

__all__ = ["sample_weight", "sample_weights"]


def sample_weights(
    rollouts: Sequence[Sequence[Sample]], rule: str, *, constant_tokens: int | None = None
) -> Sequence[Sequence[float]]:
    """Weights in the shape of `rollouts`: the samples of each rollout that has a reward (perhaps none)."""
    tokens = [sum(sample.num_trained for sample in samples) for samples in rollouts]
    num_samples, num_tokens = sum(len(samples) for samples in rollouts), sum(tokens)
    return [
        [
            sample_weight(
                rule,
                num_rollouts=len(rollouts),
                num_samples=num_samples,
                num_tokens=num_tokens,
                rollout_tokens=tokens[index],
                sample_tokens=sample.num_trained,
                constant_tokens=constant_tokens,
            )
            for sample in samples
        ]
        for index, samples in enumerate(rollouts)
    ]


def sample_weight(
    rule: str,
    *,
    num_rollouts: int,
    num_samples: int,
    num_tokens: int,
    rollout_tokens: int,
    sample_tokens: int,
    constant_tokens: int | None,
) -> float:
    """Of one sample, from the sizes of its optimiser step (N, S, sum of T_j), its rollout (T_i) and itself (T_s)."""
    if rule == "rollout_mean":
        return 1 / (num_rollouts * rollout_tokens)
    if rule == "token_mean":
        return 1 / num_tokens
    if rule == "constant":
        assert constant_tokens is not None
        return 1 / (num_rollouts * constant_tokens)
    if rule == "sample_mean":
        return 1 / (num_samples * sample_tokens)
    raise ValueError(f"unknown weighting {rule!r}; known: rollout_mean, constant, token_mean, sample_mean")
