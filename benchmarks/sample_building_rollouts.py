"""Rollouts as harnesses leave them, for the benchmark of sample building; numpy only, so that any Python reads them.

A rollout is a list of calls in the order of their answers; a call is (prompt ids, response ids, log-probabilities). All
kinds have the same number of calls and grow to a length drawn between a quarter and the whole of the limit:
    linear      every prompt continues the call before it
    drift       at three turns the last answer comes back as other tokens, as text that was tokenised again does
    sub-agents  a third of the calls belong to three conversations of their own, one after the other
    compaction  half way the history is replaced by a summary, and grows again
"""

from dataclasses import dataclass

import numpy as np

__all__ = [
    "GROUP_SIZE",
    "KINDS",
    "Call",
    "make_rollouts",
    "read_rollouts",
    "smallest_widths",
    "unique_tokens",
    "write_rollouts",
]

GROUP_SIZE = 8
SYSTEM_TOKENS, TASK_TOKENS, SUMMARY_TOKENS = 800, 200, 400
"""One system prompt for all, one task for each group."""
ANSWER_SHARE = 0.3
"""Of the tokens of a turn; the rest is what the harness adds."""
FIRST_ID, NUM_IDS = 1000, 150_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One model call; int32, int32 and float32."""

    prompt: np.ndarray
    response: np.ndarray
    logprobs: np.ndarray


def make_rollouts(kind, *, num_rollouts, num_calls, max_tokens, seed):
    """A list of rollouts; those of one group of 8 share their first prompt."""
    rng = np.random.default_rng(seed)
    system = _ids(rng, SYSTEM_TOKENS)
    rollouts = []
    for index in range(num_rollouts):
        if index % GROUP_SIZE == 0:
            task = _ids(rng, TASK_TOKENS)
        length = int(rng.integers(max_tokens // 4, max_tokens + 1))
        rollouts.append(KINDS[kind](rng, np.concatenate([system, task]), num_calls, length))
    return rollouts


def _linear(rng, start, num_calls, length):
    return list(_conversation(rng, start, num_calls, length))


def _drift(rng, start, num_calls, length):
    turns = set(rng.choice(np.arange(1, num_calls), 3, replace=False).tolist())
    return list(_conversation(rng, start, num_calls, length, drift=turns))


def _sub_agents(rng, start, num_calls, length):
    each = num_calls // 9
    quarter = (num_calls - 3 * each) // 4
    calls = []
    for number, call in enumerate(_conversation(rng, start, num_calls - 3 * each, length), start=1):
        calls.append(call)
        if number in (quarter, 2 * quarter, 3 * quarter):
            calls += _conversation(rng, _ids(rng, len(start)), each, length // 2)
    return calls


def _compaction(rng, start, num_calls, length):
    first = num_calls // 2
    calls = _conversation(rng, start, first, length)
    summary = np.concatenate([start, _ids(rng, SUMMARY_TOKENS)])
    return [*calls, *_conversation(rng, summary, num_calls - first, length)]


KINDS = {"linear": _linear, "drift": _drift, "sub-agents": _sub_agents, "compaction": _compaction}


def _conversation(rng, start, num_calls, length, drift=()):
    """Calls whose last one ends at `length` tokens, or a little later where the start is long."""
    growth = max(length - len(start) - 3 * num_calls, 1)
    cuts = np.sort(rng.integers(0, growth, num_calls - 1))
    sizes = np.diff([0, *cuts, growth]) + 3
    history, response, observation = start, _ids(rng, 0), _ids(rng, 0)
    for turn, size in enumerate(sizes.tolist()):
        if turn in drift:
            response = response.copy()
            response[len(response) // 2] += 1
        history = np.concatenate([history, response, observation])
        num_sampled = max(int(size * ANSWER_SHARE), 1)
        response, observation = _ids(rng, num_sampled), _ids(rng, size - num_sampled)
        logprobs = -rng.exponential(0.5, num_sampled).astype(np.float32)
        yield Call(prompt=history, response=response, logprobs=logprobs)


def _ids(rng, count):
    return rng.integers(FIRST_ID, FIRST_ID + NUM_IDS, count, dtype=np.int32)


def write_rollouts(path, rollouts):
    """Flat arrays: no reader needs more than numpy."""
    calls = [call for rollout in rollouts for call in rollout]
    np.savez(
        path,
        calls=[len(rollout) for rollout in rollouts],
        prompts=[len(call.prompt) for call in calls],
        responses=[len(call.response) for call in calls],
        prompt_ids=np.concatenate([call.prompt for call in calls]),
        response_ids=np.concatenate([call.response for call in calls]),
        logprobs=np.concatenate([call.logprobs for call in calls]),
        rewards=np.arange(len(rollouts)) % 2,  # every group has both, so that no rollout is left out
    )


def read_rollouts(path):
    """The rollouts, every array in memory of its own as after decoding an answer, and the rewards."""
    with np.load(path) as file:
        prompts = iter(np.split(file["prompt_ids"], np.cumsum(file["prompts"])[:-1]))
        responses = iter(np.split(file["response_ids"], np.cumsum(file["responses"])[:-1]))
        logprobs = iter(np.split(file["logprobs"], np.cumsum(file["responses"])[:-1]))
        rollouts = [
            [
                Call(prompt=next(prompts).copy(), response=next(responses).copy(), logprobs=next(logprobs).copy())
                for _ in range(size)
            ]
            for size in file["calls"].tolist()
        ]
        return rollouts, [float(reward) for reward in file["rewards"]]


def unique_tokens(rollouts):
    """Tokens that no earlier call of the same rollout has as part of the same prefix."""
    total = 0
    for rollout in rollouts:
        seen = []
        for call in rollout:
            full = np.concatenate([call.prompt, call.response])
            total += len(full) - max((_shared(full, other) for other in seen), default=0)
            seen.append(full)
    return total


def smallest_widths(rollouts):
    """Longest prompt and longest response of the rows that come of joining each call with the one before it where it
    continues that: paddings to these widths lose nothing."""
    longest_prompt = longest_response = 0
    for rollout in rollouts:
        start, before = 0, np.empty(0, np.int32)
        for call in rollout:
            if _shared(before, call.prompt) < max(len(before), 1):
                start = len(call.prompt)
            before = np.concatenate([call.prompt, call.response])
            longest_prompt = max(longest_prompt, start)
            longest_response = max(longest_response, len(before) - start)
    return longest_prompt, longest_response


def _shared(a, b):
    size = min(len(a), len(b))
    different = np.flatnonzero(a[:size] != b[:size])
    return int(different[0]) if len(different) else size
