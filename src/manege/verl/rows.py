"""An ended group to rows of verl's batch: a row per sample, with all that its credit needs later.

Advantages are formed here, over all rollouts of the group that have a reward, by the same code as in our own trainer.
Weights cannot be: they depend on which groups verl draws for an optimiser step. So each row carries its advantages and
a `Share`, and `credit.py` makes weights of the shares of a whole batch.

A rollout with a reward and without a trained token has a row, too, of two tokens and an empty mask: it counts in the
baseline, in N and in verl's metrics, and adds nothing to the gradient. A rollout without a reward has none.

Shape legend: P tokens before the first trained one, R the others, of which M are trained.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from manege.config import CreditConfig
from manege.trainer.algo.samples import Sample
from manege.trainer.collect import Group
from manege.trainer.credit import CreditedRollout, credit_group, sample_rules, shaped_rewards
from manege.types import FloatArray, IntArray

__all__ = ["Row", "Share", "group_rows"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What a row's weight is made of, once it is known which groups are trained together."""

    group: str
    """verl's uid of the group."""
    weighting: str
    """credit.weighting ..."""
    constant_tokens: int | None
    """... and its L."""
    group_rollouts: int
    """Rollouts of the group that have a reward ..."""
    group_samples: int
    """... their samples ..."""
    group_tokens: int
    """... and their trained tokens."""
    rollout_tokens: int
    """Trained tokens of this row's rollout ..."""
    sample_tokens: int
    """... and of the row."""

    def to_json(self) -> Mapping[str, Any]:
        """Plain, for verl's queue."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A sample as verl trains it."""

    session: int
    """The rollout's number within its group ..."""
    index: int
    """... and the row's within the rollout."""
    prompt_ids_P: IntArray
    response_ids_R: IntArray
    mask_R: IntArray
    """1 where a token is trained."""
    logprobs_R: FloatArray
    """Recorded; 0 where nothing is trained."""
    advantages_R: FloatArray
    """Without weight; 0 where nothing is trained."""
    reward: float
    """Of the rollout, after shaping."""
    versions: tuple[int, int] | None
    """The oldest and the newest that sampled it; None: unknown."""
    num_calls: int
    share: Share


def group_rows(
    group: Group, credit: CreditConfig, *, uid: str, max_tokens: int | None, filler_id: int
) -> Sequence[Row]:
    """`max_tokens`: of the longest sample; `filler_id`: the token of rows that train nothing. Raises TrainerError when
    tokens do not add up."""
    rewards = shaped_rewards(group, credit)
    rollouts = credit_group(group, rewards, credit, sample_rules(credit, max_tokens))
    judged = [rollout for rollout in rollouts if rollout.reward is not None]
    group_tokens = sum(_num_trained(rollout) for rollout in judged)
    group_samples = sum(len(rollout.samples) for rollout in judged)
    rows: list[Row] = []
    for session, rollout in enumerate(rollouts):
        if rollout.reward is None:
            continue

        def share(sample_tokens: int, rollout: CreditedRollout = rollout) -> Share:
            return Share(
                group=uid,
                weighting=credit.weighting,
                constant_tokens=credit.constant_tokens,
                group_rollouts=len(judged),
                group_samples=group_samples,
                group_tokens=group_tokens,
                rollout_tokens=_num_trained(rollout),
                sample_tokens=sample_tokens,
            )

        if not rollout.samples:
            rows.append(_empty(session, rollout.reward, share(0), filler_id))
        for index, (sample, advantages_M) in enumerate(zip(rollout.samples, rollout.advantages, strict=True)):
            rows.append(_row(session, index, sample, advantages_M, rollout.reward, share(sample.num_trained)))
    return rows


def _num_trained(rollout: CreditedRollout) -> int:
    return sum(sample.num_trained for sample in rollout.samples)


def _row(session: int, index: int, sample: Sample, advantages_M: FloatArray, reward: float, share: Share) -> Row:
    ids_T, positions_M = sample.ids_T, sample.positions_M
    begin = int(positions_M[0])
    positions_M = positions_M - begin

    def spread(values_M: FloatArray) -> FloatArray:
        values_R = np.zeros(len(ids_T) - begin, np.float32)
        values_R[positions_M] = values_M
        return values_R

    known = sample.versions_M[sample.versions_M >= 0]
    return Row(
        session=session,
        index=index,
        prompt_ids_P=ids_T[:begin],
        response_ids_R=ids_T[begin:],
        mask_R=spread(np.ones(len(positions_M), np.float32)).astype(np.int32),
        logprobs_R=spread(sample.logprobs_M),
        advantages_R=spread(advantages_M),
        reward=reward,
        versions=(int(known.min()), int(known.max())) if len(known) else None,
        num_calls=len(sample.call_ids),
        share=share,
    )


def _empty(session: int, reward: float, share: Share, filler_id: int) -> Row:
    ids, zero = np.array([filler_id], np.int32), np.zeros(1, np.float32)
    return Row(
        session=session,
        index=0,
        prompt_ids_P=ids,
        response_ids_R=ids,
        mask_R=zero.astype(np.int32),
        logprobs_R=zero,
        advantages_R=zero,
        reward=reward,
        versions=None,
        num_calls=0,
        share=share,
    )
