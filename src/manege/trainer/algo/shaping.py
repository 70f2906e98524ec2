"""What is taken off a rollout's reward for its length, before rewards are compared."""

__all__ = ["overlong_penalty"]


def overlong_penalty(num_tokens: int, *, limit: int, buffer: int, penalty: float) -> float:
    """0 up to `limit - buffer` sampled tokens, from there on linearly up to the whole `penalty` at `limit` and beyond.

    Soft overlong punishment of DAPO (arXiv 2503.14476, eq. 13); there its size is 1 and it counts the tokens of one
    answer, here those that a rollout sampled in all its calls.

    limit 100, buffer 20, penalty 1/2:  80 -> 0   90 -> 1/4   100 -> 1/2   150 -> 1/2
    """
    share = (num_tokens - (limit - buffer)) / buffer
    return penalty * min(1.0, max(0.0, share))
