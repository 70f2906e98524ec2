"""Our side of the benchmark of sample building: calls to the arrays of each micro-batch, one after the other, as the
train engine makes and drops them. More than the adapter does: advantages and weights are in it."""

import random

import numpy as np
from sample_building_rollouts import GROUP_SIZE
from sample_building_serve import serve

from manege.config import CreditConfig
from manege.trainer.algo.batching import micro_batches
from manege.trainer.algo.tree import build_tree
from manege.trainer.batch import build_batch
from manege.trainer.collect import Group
from manege.types import Call, Delivered, FinishReason, Outcome, Rollout, RolloutSpec, RolloutState, Task, VersionSpan

MICRO_BATCH_TOKENS = 32_768
"""Two of the longest samples."""
TASK = Task(id="t", input={})


def load(rollouts, rewards):
    """Groups of ended rollouts with their calls, as the trainer's feed gives them."""
    calls = [
        [our_call(f"r{index}", turn, call) for turn, call in enumerate(rollout)]
        for index, rollout in enumerate(rollouts)
    ]
    ended = [
        Rollout(
            spec=RolloutSpec(id=f"r{index}", run="bench", task=TASK),
            state=RolloutState.SUCCEEDED,
            attempt=0,
            outcome=Outcome.OK,
            reward=reward,
            created_s=0.0,
        )
        for index, reward in enumerate(rewards)
    ]
    cuts = [slice(first, first + GROUP_SIZE) for first in range(0, len(rollouts), GROUP_SIZE)]
    return [Group(task=TASK, rollouts=ended[cut], calls=calls[cut]) for cut in cuts]


def our_call(name, turn, call):
    return Call(
        id=f"{name}-{turn}",
        rollout_id=name,
        attempt=0,
        parent=None,
        protocol="chat",
        mode="train",
        prompt_ids_P=call.prompt,
        response_ids_R=call.response,
        logprobs_R=call.logprobs,
        spans=[VersionSpan(first_token=0, version=1)],
        temperature=1.0,
        finish_reason=FinishReason.STOP,
        delivered=Delivered.YES,
        request={},
        reply={},
        created_s=0.0,
        ended_s=0.0,
    )


def build(groups):
    batch = build_batch(groups, CreditConfig(), success_reward=1.0, rng=random.Random(0))
    samples = batch.samples
    sequences = (item.sample.ids_T for item in samples)
    batches = micro_batches(sequences, MICRO_BATCH_TOKENS, share=True)
    trained = sum(packed([samples[index] for index in indices]) for indices in batches)
    return {"samples": len(samples), "trained": trained}


def packed(items):
    """What the engine computes on: the prefix tree, and per trained token its place in it and its constants."""
    tree = build_tree([item.sample.ids_T for item in items])
    positions = [(item.sample.positions_M, nodes_T) for item, nodes_T in zip(items, tree.sequences, strict=True)]
    targets_M = tree.ids_N[np.concatenate([nodes_T[where] for where, nodes_T in positions])]
    np.unique(np.concatenate([nodes_T[where - 1] for where, nodes_T in positions]), return_inverse=True)
    np.concatenate([item.sample.logprobs_M for item in items])
    np.concatenate([item.advantages_M for item in items])
    for name in ("weight", "temperature"):
        values = [getattr(item if name == "weight" else item.sample, name) for item in items]
        np.concatenate([np.full(item.sample.num_trained, value) for item, value in zip(items, values, strict=True)])
    calls = [span.stop - span.start for item in items for span in item.sample.spans]
    np.repeat(np.arange(len(calls)), calls)
    return len(targets_M)


if __name__ == "__main__":
    serve(load, build)
