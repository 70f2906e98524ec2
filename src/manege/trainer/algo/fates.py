"""What becomes of a call's sampled tokens, as far as the call itself and the forest decide it.

Defects come first (a call that cannot be trained is excluded with its reason, never repaired), then the run's rules,
then delivery: an answer that nothing continued is dead if the agent did not get it, or if that is unknown and another
answer to the same request was used. A delivered answer is a second use, never a retry.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from manege.trainer.algo.forest import Forest
from manege.trainer.algo.ledger import Reason
from manege.types import Call, Delivered, FinishReason

__all__ = ["ALL_CALLS", "SampleRules", "reasons"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRules:
    """What the run leaves out."""

    side_calls: bool = True
    """Train calls beside the agent's work."""
    cut_short: bool = True
    """Train answers that hit the token limit (`finish_reason = length`)."""
    max_tokens: int | None = None
    """The longest sample; tokens beyond are truncated. None: no limit."""


ALL_CALLS = SampleRules()
"""Nothing is left out."""


def reasons(forest: Forest, rules: SampleRules) -> Sequence[Reason]:
    """One per call."""
    leaves = set(forest.leaves())
    return [
        _defect(call)
        or _rule(call, rules)
        or (_death(forest, index, leaves) if index in leaves else None)
        or Reason.TRAINED
        for index, call in enumerate(forest.calls)
    ]


def _defect(call: Call) -> Reason | None:
    if call.flaw is not None:
        return Reason.NO_IDS
    if len(call.response_ids_R) != len(call.logprobs_R):
        return Reason.UNEQUAL_LENGTHS
    if not len(call.response_ids_R):
        return Reason.EMPTY
    # The first token of a sequence has nothing that predicts it.
    if not len(call.prompt_ids_P):
        return Reason.NO_IDS
    # NaN and infinity survive a sum.
    return None if math.isfinite(call.logprobs_R.sum()) else Reason.NO_LOGPROBS


def _rule(call: Call, rules: SampleRules) -> Reason | None:
    if call.constrained:
        return Reason.CONSTRAINED
    if call.thread.startswith("side:") and not rules.side_calls:
        return Reason.SIDE_CALL
    if call.finish_reason is FinishReason.LENGTH and not rules.cut_short:
        return Reason.CUT_SHORT
    return None


def _death(forest: Forest, index: int, leaves: set[int]) -> Reason | None:
    call = forest.calls[index]
    if call.delivered is Delivered.NO:
        return Reason.NOT_DELIVERED
    if call.delivered is Delivered.UNKNOWN and any(
        other not in leaves or forest.calls[other].delivered is Delivered.YES for other in _twins(forest, index)
    ):
        return Reason.RETRIED
    return None


def _twins(forest: Forest, index: int) -> Sequence[int]:
    """Other calls with the same prompt: answers to the same normalised request."""
    prompt_P = forest.calls[index].prompt_ids_P
    return [
        other
        for other, call in enumerate(forest.calls)
        if other != index and np.array_equal(call.prompt_ids_P, prompt_P)
    ]
