"""Calls made by hand, for tests of the credit code."""

import numpy as np

from manege.types import Call, CallId, Delivered, FinishReason, PolicyVersion, RolloutId, VersionSpan


def make_call(name, prompt, response, *, parent=None, delivered=Delivered.YES, rollout="r", logprobs=None, version=1):
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
        request={},
        reply={},
        created_s=0.0,
        ended_s=0.0,
    )
