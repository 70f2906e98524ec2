"""Samples: root-to-leaf paths of the forest, in which each sampled token of each call is trained exactly once.

In: the forest of one attempt. Out: samples, and a ledger that accounts for every sampled token.
A call that lies on several paths is trained on the first of them (in the order of their leaves) and is context on the
others. Dead answers are never trained: they never reached the agent, so what followed does not depend on them.

Worked example: call A (prompt p, answer a); B and C both continue A. Paths: A-B and A-C.
    sample 1:  p a b' b     mask  0 1 0 1     (b', c': what the harness added; context)
    sample 2:  p a c' c     mask  0 0 0 1     (a is trained in sample 1, context here)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from manege.errors import TrainerError
from manege.trainer.algo.forest import Forest
from manege.types import Call, CallId, Delivered, FloatArray, IntArray, RolloutId

__all__ = ["Fate", "Ledger", "Sample", "build_samples"]


class Fate(StrEnum):
    """What becomes of a sampled token."""

    TRAINED = "trained"
    DEAD = "dead"
    EXCLUDED = "excluded"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One token sequence with its loss mask. T tokens; arrays are parallel."""

    rollout_id: RolloutId
    ids_T: IntArray
    mask_T: npt.NDArray[np.bool_]
    """True where the token was sampled by the policy and is trained in this sample."""
    logprobs_T: FloatArray
    """Recorded log-probability of the token where `mask_T` is set, else 0."""
    versions_T: IntArray
    """Policy version that sampled the token where `mask_T` is set, else -1."""
    temperature: float
    call_ids: Sequence[CallId]
    """The path, root first."""

    def __post_init__(self) -> None:
        if not len(self.ids_T) == len(self.mask_T) == len(self.logprobs_T) == len(self.versions_T):
            raise TrainerError(f"sample of rollout {self.rollout_id}: its arrays have unequal lengths")

    @property
    def num_trained(self) -> int:
        """Trained tokens."""
        return int(self.mask_T.sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Every sampled token of a rollout, by fate."""

    sampled: int
    trained: int
    dead: int
    excluded: int
    context: int
    """Further occurrences of trained tokens in other samples; not part of the sum."""

    def __post_init__(self) -> None:
        if self.sampled != self.trained + self.dead + self.excluded:
            raise TrainerError(f"the ledger does not add up: {self}; this is a bug in sample building")


def build_samples(forest: Forest, *, with_side_calls: bool = True) -> tuple[Sequence[Sample], Ledger]:
    """Samples of one attempt and where every sampled token went. Without side calls (titles, summaries ...) what was
    sampled for those is excluded."""
    leaves = forest.leaves()
    fates = [
        Fate.EXCLUDED
        if call.constrained or (call.thread.startswith("side:") and not with_side_calls)
        else _fate(forest, index, set(leaves))
        for index, call in enumerate(forest.calls)
    ]
    ends = [index for index in leaves if fates[index] is not Fate.DEAD]
    ends += _orphans(forest, leaves, fates, ends)
    owner: dict[int, int] = {}
    for end in ends:
        for index in forest.path(end):
            owner.setdefault(index, end)
    samples = [_sample(forest, end, owner, fates) for end in sorted(ends)]
    samples = [sample for sample in samples if sample.num_trained]
    sizes = dict.fromkeys(Fate, 0)
    for call, fate in zip(forest.calls, fates, strict=True):
        sizes[fate] += len(call.response_ids_R)
    in_samples = sum(_num_sampled(forest, sample) for sample in samples)
    trained = sum(sample.num_trained for sample in samples)
    return samples, Ledger(
        sampled=sum(len(call.response_ids_R) for call in forest.calls),
        trained=trained,
        dead=sizes[Fate.DEAD],
        excluded=sizes[Fate.EXCLUDED],
        context=in_samples - trained,
    )


def _orphans(forest: Forest, leaves: Sequence[int], fates: Sequence[Fate], ends: Sequence[int]) -> list[int]:
    """Calls that only dead answers continued are ends of paths too."""
    covered = {index for end in ends for index in forest.path(end)}
    extra: list[int] = []
    for leaf in leaves:
        parent = forest.parents[leaf]
        if fates[leaf] is Fate.DEAD and parent is not None and parent not in covered:
            extra.append(parent)
            covered.update(forest.path(parent))
    return extra


def _fate(forest: Forest, index: int, leaves: set[int]) -> Fate:
    call = forest.calls[index]
    if not np.isfinite(call.logprobs_R).all():
        return Fate.EXCLUDED
    if index not in leaves or call.delivered is Delivered.YES:
        return Fate.TRAINED
    if call.delivered is Delivered.NO:
        return Fate.DEAD
    twins = [
        other
        for other in range(len(forest.calls))
        if other != index and np.array_equal(forest.calls[other].prompt_ids_P, call.prompt_ids_P)
    ]
    used = any(other not in leaves or forest.calls[other].delivered is Delivered.YES for other in twins)
    return Fate.DEAD if used else Fate.TRAINED


def _sample(forest: Forest, end: int, owner: dict[int, int], fates: Sequence[Fate]) -> Sample:
    last = forest.calls[end]
    ids_T = np.concatenate([last.prompt_ids_P, last.response_ids_R]).astype(np.int32)
    mask_T = np.zeros(len(ids_T), np.bool_)
    logprobs_T = np.zeros(len(ids_T), np.float32)
    versions_T = np.full(len(ids_T), -1, np.int32)
    path = forest.path(end)
    for index in path:
        call = forest.calls[index]
        if owner[index] != end or fates[index] is not Fate.TRAINED:
            continue
        where = slice(len(call.prompt_ids_P), len(call.prompt_ids_P) + len(call.response_ids_R))
        mask_T[where] = True
        logprobs_T[where] = call.logprobs_R
        versions_T[where] = _versions(call)
    return Sample(
        rollout_id=last.rollout_id,
        ids_T=ids_T,
        mask_T=mask_T,
        logprobs_T=logprobs_T,
        versions_T=versions_T,
        temperature=_temperature([forest.calls[index] for index in path]),
        call_ids=[forest.calls[index].id for index in path],
    )


def _versions(call: Call) -> IntArray:
    versions_R = np.full(len(call.response_ids_R), -1, np.int32)
    for span in call.spans:
        versions_R[span.first_token :] = span.version
    return versions_R


def _temperature(calls: Sequence[Call]) -> float:
    temperatures = {call.temperature for call in calls}
    if len(temperatures) > 1:
        raise TrainerError(
            f"rollout {calls[0].rollout_id}: calls of one conversation were sampled at temperatures "
            f"{sorted(temperatures)}; train mode must fix one"
        )
    return temperatures.pop()


def _num_sampled(forest: Forest, sample: Sample) -> int:
    by_id = {call.id: call for call in forest.calls}
    return sum(len(by_id[call_id].response_ids_R) for call_id in sample.call_ids)
