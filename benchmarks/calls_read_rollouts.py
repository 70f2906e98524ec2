"""Rollouts for the benchmark of reading calls; numpy only, so that any Python makes them.

long     a conversation whose prompts have that many tokens on average; it grows by an answer and a tool's result
growing  a conversation whose prompt grows to that length
apart    prompts of that length that share nothing
"""

import numpy as np
from sample_building_rollouts import Call

__all__ = ["KINDS", "text_of"]

FIRST_TOKENS, NUM_SAMPLED, NUM_RESULT = 1000, 74, 74
WORDS = np.array(["the", "river", "is", "seven", "of", "a"])


def long(rng, num_calls, num_tokens):
    first = num_tokens - (num_calls - 1) * (NUM_SAMPLED + NUM_RESULT) // 2
    return _conversation(rng, num_calls, first, NUM_RESULT)


def growing(rng, num_calls, num_tokens):
    added = (num_tokens - FIRST_TOKENS) // (num_calls - 1) - NUM_SAMPLED
    return _conversation(rng, num_calls, FIRST_TOKENS, added)


def apart(rng, num_calls, num_tokens):
    return [_call(rng, _ids(rng, num_tokens)) for _ in range(num_calls)]


KINDS = {"long": long, "growing": growing, "apart": apart}


def text_of(ids):
    """About as many letters as such tokens stand for."""
    return " ".join(WORDS[ids % len(WORDS)])


def _conversation(rng, num_calls, first, added):
    history, calls = _ids(rng, first), []
    for _ in range(num_calls):
        calls.append(_call(rng, history))
        history = np.concatenate([history, calls[-1].response, _ids(rng, added)])
    return calls


def _call(rng, prompt):
    logprobs = -rng.exponential(0.5, NUM_SAMPLED).astype(np.float32)
    return Call(prompt=prompt, response=_ids(rng, NUM_SAMPLED), logprobs=logprobs)


def _ids(rng, count):
    return rng.integers(1000, 151_000, count, dtype=np.int32)
