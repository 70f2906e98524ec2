"""Calls and batches made by hand, for tests of the credit code and of train engines."""

import numpy as np

from manege.trainer.algo.forest import build_forest
from manege.trainer.algo.samples import build_samples
from manege.trainer.algo.weights import sample_weights
from manege.trainer.engines.base import WeightedSample
from manege.types import Call, CallId, Delivered, FinishReason, PolicyVersion, RolloutId, VersionSpan


def make_call(
    name, prompt, response, *, parent=None, delivered=Delivered.YES, rollout="r", logprobs=None, version=1, **more
):
    return Call(
        id=CallId(name),
        rollout_id=RolloutId(rollout),
        attempt=0,
        parent=parent,
        protocol="chat",
        mode="train",
        prompt_ids_P=np.asarray(prompt, np.int32),
        response_ids_R=np.asarray(response, np.int32),
        logprobs_R=np.asarray([-0.5] * len(response) if logprobs is None else logprobs, np.float32),
        spans=[VersionSpan(first_token=0, version=PolicyVersion(version))],
        temperature=1.0,
        finish_reason=FinishReason.STOP,
        delivered=delivered,
        created_s=0.0,
        ended_s=0.0,
        **{"request": {}, "reply": {}, **more},
    )


HEAD = [1, 2, 3, 4, 5, 6]


def linear_rollout(name, turns):
    """One conversation; every turn continues the last."""
    calls, stream = [], list(HEAD)
    for number, (prompt, response) in enumerate(turns):
        stream += prompt
        calls.append(make_call(f"{name}{number}", stream, response, rollout=name, logprobs=[-3.0] * len(response)))
        stream = stream + response
    return calls


ROLLOUTS = [
    (1.0, linear_rollout("a", [([10, 11], [20, 21]), ([12], [22, 23, 24])])),
    (-0.5, linear_rollout("b", [([10, 11], [20, 30]), ([13, 14], [31])])),
    (-0.5, linear_rollout("c", [([10, 40], [41])])),
    (0.0, linear_rollout("d", [([50], [51, 52])])),
]


def split(calls):
    """The same calls as samples of their own, one per call, each with its full context."""
    return [build_samples(build_forest([call]))[0][0] for call in calls]


def merged(calls):
    return list(build_samples(build_forest(calls))[0])


def weighted(rule, cut, rollouts=ROLLOUTS):
    samples = [cut(calls) for _, calls in rollouts]
    weights = sample_weights(samples, rule, constant_tokens=16)
    return [
        WeightedSample(sample=s, advantages_M=np.full(s.num_trained, advantage, np.float32), weight=w)
        for (advantage, _), row, ws in zip(rollouts, samples, weights, strict=True)
        for s, w in zip(row, ws, strict=True)
    ]
