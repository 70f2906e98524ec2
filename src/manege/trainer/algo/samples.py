"""Samples: root-to-leaf paths of the forest, in which each sampled token of each call is trained exactly once.

In: the forest of one attempt. Out: samples, and a ledger that accounts for every sampled token (ledger.py).
A call that lies on several paths is trained on the first of them (in the order of their leaves) and is context on the
others. Dead answers are never trained: they never reached the agent, so what followed does not depend on them.
A sample longer than the limit is kept up to the limit; what lies beyond is counted as truncated. Samples copy no
prompt: they read the arrays of their last call, which holds the whole path.

Worked example: call A (prompt p, answer a); B and C both continue A. Paths: A-B and A-C.
    sample 1:  p a b' b     mask  0 1 0 1     (b', c': what the harness added; context)
    sample 2:  p a c' c     mask  0 0 0 1     (a is trained in sample 1, context here)
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from manege.errors import TrainerError
from manege.trainer.algo.fates import ALL_CALLS, SampleRules, reasons
from manege.trainer.algo.forest import Forest
from manege.trainer.algo.ledger import Fate, Ledger, Reason
from manege.types import Call, CallId, FloatArray, IntArray, RolloutId

__all__ = ["Sample", "Span", "build_samples"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Trained tokens [start, stop) of a sample: the answer of one call."""

    call_id: CallId
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One token sequence and which of its tokens are trained. T tokens, M trained ones, span after span."""

    rollout_id: RolloutId
    prompt_ids_P: IntArray
    """Of the path's last call ..."""
    response_ids_R: IntArray
    """... as far as the sample's limit reaches."""
    spans: Sequence[Span]
    logprobs_M: FloatArray
    """Recorded log-probabilities of the trained tokens."""
    versions_M: IntArray
    """Policy versions that sampled them; -1 where nobody knows."""
    temperature: float
    call_ids: Sequence[CallId]
    """The path, root first."""

    def __post_init__(self) -> None:
        if not sum(span.stop - span.start for span in self.spans) == len(self.logprobs_M) == len(self.versions_M):
            raise TrainerError(f"sample of rollout {self.rollout_id}: its arrays have unequal lengths")

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.prompt_ids_P) + len(self.response_ids_R)

    @property
    def num_trained(self) -> int:
        """M."""
        return len(self.logprobs_M)

    @property
    def ids_T(self) -> IntArray:
        """The whole sequence, as a copy."""
        return np.concatenate([self.prompt_ids_P, self.response_ids_R])

    @property
    def positions_M(self) -> IntArray:
        """Of the trained tokens."""
        return np.concatenate([np.arange(span.start, span.stop, dtype=np.int32) for span in self.spans])

    @property
    def mask_T(self) -> npt.NDArray[np.bool_]:
        """True where a token is trained."""
        mask_T = np.zeros(self.num_tokens, np.bool_)
        mask_T[self.positions_M] = True
        return mask_T


def build_samples(forest: Forest, rules: SampleRules = ALL_CALLS) -> tuple[Sequence[Sample], Ledger]:
    """Samples of one attempt, and where every sampled token went. Raises TrainerError when that does not add up."""
    why = reasons(forest, rules)
    owners: dict[int, int] = {}
    for end in _ends(forest, why):
        for index in forest.path(end):
            owners.setdefault(index, end)
    samples = [_sample(forest, end, owners, why, rules.max_tokens) for end in sorted(set(owners.values()))]
    samples = [sample for sample in samples if sample.spans]
    return samples, _account(forest, why, samples, rules.max_tokens)


def _ends(forest: Forest, why: Sequence[Reason]) -> Sequence[int]:
    """Leaves, less dead ones; a call that only dead answers continued is an end of a path, too."""
    covered: set[int] = set()
    ends: list[int] = []
    leaves = forest.leaves()
    dead = [leaf for leaf in leaves if why[leaf].fate is Fate.DEAD]
    for end in [leaf for leaf in leaves if why[leaf].fate is not Fate.DEAD] + [
        parent for leaf in dead if (parent := forest.parents[leaf]) is not None
    ]:
        if end not in covered:
            ends.append(end)
            covered.update(forest.path(end))
    return sorted(ends)


def _sample(forest: Forest, end: int, owners: dict[int, int], why: Sequence[Reason], limit: int | None) -> Sample:
    last, path = forest.calls[end], forest.path(end)
    size = len(last.prompt_ids_P) + len(last.response_ids_R)
    limit = size if limit is None else limit
    spans: list[Span] = []
    logprobs, versions, lengths = [np.empty(0, np.float32)], list[int](), list[int]()
    for index in path:
        call = forest.calls[index]
        start = len(call.prompt_ids_P)
        stop = start + _num_within(call, limit)
        if owners[index] == end and why[index] is Reason.TRAINED and start < stop:
            spans.append(Span(call_id=call.id, start=start, stop=stop))
            logprobs.append(call.logprobs_R[: stop - start])
            for version, length in _versions(call, stop - start):
                versions.append(version)
                lengths.append(length)
    return Sample(
        rollout_id=last.rollout_id,
        prompt_ids_P=last.prompt_ids_P[:limit],
        response_ids_R=last.response_ids_R[: max(0, limit - len(last.prompt_ids_P))],
        spans=spans,
        logprobs_M=np.concatenate(logprobs),
        versions_M=np.repeat(np.array(versions, np.int32), lengths),
        temperature=_temperature([forest.calls[index] for index in path]),
        call_ids=[forest.calls[index].id for index in path],
    )


def _account(forest: Forest, why: Sequence[Reason], samples: Sequence[Sample], limit: int | None) -> Ledger:
    """Trained tokens are counted in the samples, all others at their calls: so a token that is trained twice, or that
    should be trained and is not, breaks the sum."""
    tokens, beyond = Counter[Reason](), 0
    for call, reason in zip(forest.calls, why, strict=True):
        if reason is not Reason.TRAINED:
            tokens[reason] += len(call.response_ids_R)
        elif limit is not None:
            beyond += len(call.response_ids_R) - _num_within(call, limit)
    tokens[Reason.TRAINED] = sum(sample.num_trained for sample in samples)
    tokens[Reason.OVER_LIMIT] = beyond
    by_id = {call.id: call for call in forest.calls}
    read = sum(_num_within(by_id[call_id], sample.num_tokens) for sample in samples for call_id in sample.call_ids)
    return Ledger(
        sampled=sum(len(call.response_ids_R) for call in forest.calls),
        tokens=+tokens,
        calls=Counter(why),
        context=read - tokens[Reason.TRAINED],
    )


def _num_within(call: Call, limit: int) -> int:
    """Sampled tokens of a call among the first `limit` of its path."""
    return min(len(call.response_ids_R), max(0, limit - len(call.prompt_ids_P)))


def _versions(call: Call, num_tokens: int) -> Iterator[tuple[int, int]]:
    """(version, tokens) of the first `num_tokens` of the answer; version -1 where no span covers them."""
    starts = [min(span.first_token, num_tokens) for span in call.spans] + [num_tokens]
    yield -1, starts[0]
    for span, start, stop in zip(call.spans, starts, starts[1:], strict=False):
        yield span.version, stop - start


def _temperature(calls: Sequence[Call]) -> float:
    temperatures = {call.temperature for call in calls}
    if len(temperatures) > 1:
        raise TrainerError(
            f"rollout {calls[0].rollout_id}: calls of one conversation were sampled at temperatures "
            f"{sorted(temperatures)}; train mode must fix one"
        )
    return temperatures.pop()
