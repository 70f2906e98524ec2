"""From logits to the next tokens and their log-probabilities.

The log-probability is always that of softmax(logits / T), whatever a grammar, top-k and top-p left to choose from; at
T = 0 the most likely token is taken and reported at T = 1. A token is chosen by one uniform number per sequence, so a
sequence with its own seed is reproducible whoever it shares the batch with.

Shape legend: S sequences, V vocabulary.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from manege.engine.base import Sampling
from manege.engine.constraints import BoolArray
from manege.errors import EngineError

__all__ = ["choose_tokens"]


def choose_tokens(
    logits_SV: Tensor,
    samplings: Sequence[Sampling],
    uniforms: Sequence[float],
    allowed: Mapping[int, BoolArray] | None = None,
) -> tuple[list[int], list[float]]:
    """Token ids and log-probabilities; `uniforms` are in [0, 1). `allowed` says of some sequences, by index, which ids
    may be chosen: at least one. Raises EngineError for logits that are not finite."""
    temperatures = [sampling.temperature or 1.0 for sampling in samplings]
    if any(temperature != 1.0 for temperature in temperatures):
        logits_SV = logits_SV / torch.tensor(temperatures, device=logits_SV.device)[:, None]
    total_S1 = logits_SV.logsumexp(-1, keepdim=True)
    open_SV = _mask(logits_SV, allowed) if allowed else logits_SV
    greedy_S = [sampling.temperature == 0 for sampling in samplings]
    if all(greedy_S):
        ids_S1 = open_SV.argmax(-1, keepdim=True)
    else:
        # With a total of its own: all that is allowed may be too unlikely for a float.
        open_total_S1 = open_SV.logsumexp(-1, keepdim=True) if allowed else total_S1
        probabilities_SV = (open_SV - open_total_S1).exp_()
        for index, sampling in enumerate(samplings):
            if sampling.top_k or sampling.top_p < 1.0:
                _truncate(probabilities_SV[index], sampling)
        cumulative_SV = probabilities_SV.cumsum(-1)
        end_S1 = cumulative_SV[:, -1:]
        targets_S1 = torch.tensor(uniforms, device=logits_SV.device)[:, None] * end_S1
        # As float32 the number may round up to 1; below the end, and with right=True, no token of probability 0 is hit.
        targets_S1 = targets_S1.minimum(end_S1.nextafter(torch.zeros_like(end_S1)))
        # What is not finite may be beyond the end; it is refused below.
        ids_S1 = torch.searchsorted(cumulative_SV, targets_S1, right=True).clamp_(max=logits_SV.shape[1] - 1)
        if any(greedy_S):
            greedy = torch.tensor(greedy_S, device=logits_SV.device)[:, None]
            ids_S1 = torch.where(greedy, open_SV.argmax(-1, keepdim=True), ids_S1)
    logprobs_S1 = logits_SV.gather(1, ids_S1) - total_S1
    # All that is wanted in one piece: a GPU is waited for once.
    wanted_S3 = torch.cat([ids_S1.double(), logprobs_S1.double(), total_S1.double()], dim=1)
    ids, logprobs, totals = zip(*wanted_S3.tolist(), strict=True)
    if not all(map(math.isfinite, totals)):
        raise EngineError("the model computed logits that are not finite; its weights have diverged")
    return [int(id) for id in ids], list(logprobs)


def _mask(logits_SV: Tensor, allowed: Mapping[int, BoolArray]) -> Tensor:
    """A copy in which what is not allowed has no probability."""
    masked_SV = logits_SV.clone()
    for index, allowed_V in allowed.items():
        masked_SV[index].masked_fill_(~torch.from_numpy(allowed_V).to(logits_SV.device), -torch.inf)
    return masked_SV


def _truncate(probabilities_V: Tensor, sampling: Sampling) -> None:
    """Set what top-k and top-p exclude to 0, in place. At least the most likely token stays."""
    sorted_V, order_V = probabilities_V.sort(descending=True)
    excluded_V = sorted_V.cumsum(0) - sorted_V >= sampling.top_p * sorted_V.sum()
    if sampling.top_k:
        excluded_V[sampling.top_k :] = True
    excluded_V[0] = False
    probabilities_V[order_V[excluded_V]] = 0.0
