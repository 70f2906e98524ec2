"""Random rollouts for property tests: agents that go on, branch, start sub-agents, ask twice and lose answers.

A rollout is drawn as moves, so that hypothesis can shrink it; its numbers (advantages, log-probabilities) come from a
seed. Recorded and proximal log-probabilities lie around those of a model, so that every branch of every loss is taken.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from manege.trainer.algo.forest import build_forest
from manege.trainer.algo.samples import Sample, build_samples
from manege.trainer.algo.weights import sample_weights
from manege.trainer.engines.base import WeightedSample
from manege.types import Call, CallId, Delivered
from tests.calls import HEAD, make_call

TOKENS = st.lists(st.integers(10, 12), min_size=1, max_size=3)
MOVES = st.lists(
    st.tuples(
        st.sampled_from(["continue", "continue", "agent", "repeat"]),
        st.integers(0, 5),
        TOKENS,
        TOKENS,
        st.sampled_from([Delivered.YES, Delivered.YES, Delivered.NO, Delivered.UNKNOWN]),
    ),
    min_size=1,
    max_size=6,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Credited:
    """One rollout, with what the update knows about each of its calls."""

    calls: Sequence[Call]
    advantages: Mapping[CallId, float]
    proximal: Mapping[CallId, np.ndarray]


Cut = Callable[[Sequence[Call]], Sequence[Sample]]


def play(name, moves):
    """Calls of one rollout. Tokens are few, so that conversations meet by chance as well."""
    calls = []
    for number, (kind, which, new, response, delivered) in enumerate(moves):
        before = calls[which % len(calls)] if calls else None
        if before is None or kind == "agent":
            prompt = [*HEAD[: 2 + which % 2], *new]
        elif kind == "repeat":
            prompt = before.prompt_ids_P
        else:
            prompt = [*before.prompt_ids_P, *before.response_ids_R, *new]
        calls.append(make_call(f"{name}{number}", prompt, response, rollout=name, delivered=delivered))
    return calls


def credit(rollouts, engine, seed, *, per_call=False):
    """Advantages of rollouts (or of calls, as `returns` gives them) and log-probabilities near those of the engine."""
    rng = np.random.default_rng(seed)
    flat = [call for calls in rollouts for call in calls]
    present = dict(zip([call.id for call in flat], engine.logprobs([alone(call) for call in flat]), strict=True))

    def near(call, scale):
        """Mostly close, now and then far away."""
        size = len(call.response_ids_R)
        far = rng.choice([0.0, -2.5, 2.5], size, p=[0.8, 0.1, 0.1])
        return (present[call.id] + rng.normal(0, scale, size) + far).astype(np.float32)

    credited = []
    for calls in rollouts:
        shared = rng.normal()
        credited.append(
            Credited(
                calls=[dataclasses.replace(call, logprobs_R=near(call, 0.3)) for call in calls],
                advantages={call.id: rng.normal() if per_call else shared for call in calls},
                proximal={call.id: near(call, 0.1) for call in calls},
            )
        )
    return credited


def alone(call):
    """A call as a sample of its own."""
    return build_samples(build_forest([dataclasses.replace(call, delivered=Delivered.YES)]))[0][0]


def as_built(calls):
    """The samples that a run would train on."""
    return build_samples(build_forest(calls))[0]


def divided(seed):
    """The same trained calls, thrown at random into parts; each part is cut into samples on its own. A call keeps its
    whole context in any of them."""

    def cut(calls):
        trained = {span.call_id for sample in as_built(calls) for span in sample.spans}
        alive = [dataclasses.replace(call, delivered=Delivered.YES) for call in calls if call.id in trained]
        parts = np.random.default_rng(seed).integers(0, 3, len(alive))
        return [
            sample
            for part in range(3)
            for sample in as_built([call for call, number in zip(alive, parts, strict=True) if number == part])
        ]

    return cut


def batch_of(rollouts, weighting, cut=as_built, *, proximal=True):
    """The update of a step over all these rollouts."""
    samples = [cut(rollout.calls) for rollout in rollouts]
    weights = sample_weights(samples, weighting, constant_tokens=16)

    def per_token(sample, values):
        return np.concatenate([values(span) for span in sample.spans]).astype(np.float32)

    return [
        WeightedSample(
            sample=sample,
            advantages_M=per_token(
                sample, lambda span, known=rollout.advantages: np.full(span.stop - span.start, known[span.call_id])
            ),
            weight=weight,
            proximal_M=per_token(sample, lambda span, known=rollout.proximal: known[span.call_id])
            if proximal
            else None,
        )
        for rollout, row, row_weights in zip(rollouts, samples, weights, strict=True)
        for sample, weight in zip(row, row_weights, strict=True)
    ]
