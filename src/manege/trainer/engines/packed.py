"""A micro-batch laid out for a forward pass, and what the model says about its trained tokens.

A token that samples share as a prefix is one node and is computed once; every sample gathers its own. Nodes that
predict trained tokens are few, so logits are computed for those only. Made once per micro-batch, read by the policy and
by the reference alike.

Shape legend: N nodes of the tree, M trained tokens, sample after sample, U distinct nodes that predict them, V
vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from manege.errors import TrainerError
from manege.model.base import LanguageModel
from manege.trainer.algo.samples import Sample
from manege.trainer.algo.tree import build_tree, separate
from manege.trainer.engines.tree_attention import TreeAttention

__all__ = ["PackedSamples"]

_ENTROPY_ROWS = 32
"""Rows of logits at once: 6 MB at a vocabulary of 50,000, which stays in the cache."""


class PackedSamples:
    """The trained tokens of some samples."""

    def __init__(self, samples: Sequence[Sample], *, share: bool, device: torch.device, dtype: torch.dtype) -> None:
        """`share`: with the prefix tree. Raises TrainerError for a sample that begins with a sampled token."""
        for sample in samples:
            if any(span.start == 0 for span in sample.spans):
                raise TrainerError(f"rollout {sample.rollout_id}: the first token of a sample cannot be a sampled one")
        tree = (build_tree if share else separate)([sample.ids_T for sample in samples])
        nodes = [nodes_T[sample.positions_M] for sample, nodes_T in zip(samples, tree.sequences, strict=True)]
        predictors = [nodes_T[s.positions_M - 1] for s, nodes_T in zip(samples, tree.sequences, strict=True)]
        unique_U, row_M = np.unique(np.concatenate(predictors), return_inverse=True)
        heat_M = np.concatenate([np.full(sample.num_trained, sample.temperature) for sample in samples])

        def indices(values: np.ndarray) -> Tensor:
            return torch.from_numpy(values).long().to(device)

        self.num_nodes = len(tree.ids_N)
        self._ids_N, self._positions_N = indices(tree.ids_N), indices(tree.positions_N)
        self._attend = TreeAttention(tree, device=device, dtype=dtype)
        self._predictors_U, self._row_M = indices(unique_U), indices(row_M)
        self._targets_M = indices(tree.ids_N[np.concatenate(nodes)])
        # One temperature per row: samples that share a predicting node come from one run.
        self._heat_U1 = torch.ones(len(unique_U), 1, dtype=torch.float64, device=device)
        self._heat_U1[self._row_M, 0] = torch.from_numpy(heat_M).to(device)

    def logits(self, model: LanguageModel) -> Tensor:
        """(U, V), divided by the temperature; carries the gradient."""
        hidden_NE = model.hidden(self._ids_N, self._positions_N, self._attend)
        logits_UV = model.logits(hidden_NE.index_select(0, self._predictors_U))
        return logits_UV / self._heat_U1.to(logits_UV.dtype) if bool((self._heat_U1 != 1).any()) else logits_UV

    def logprobs(self, logits_UV: Tensor) -> Tensor:
        """(M,): of the trained tokens."""
        chosen_M = logits_UV[self._row_M, self._targets_M]
        return chosen_M - torch.logsumexp(logits_UV, dim=-1)[self._row_M]

    @torch.no_grad()
    def entropy(self, logits_UV: Tensor) -> Tensor:
        """(M,): of the policy where it sampled each trained token, over the whole vocabulary, in nats."""
        entropies = []
        for rows in logits_UV.detach().split(_ENTROPY_ROWS):
            logprobs = torch.log_softmax(rows, dim=-1)
            entropies.append(-(logprobs.exp() * logprobs).sum(dim=-1))
        return torch.cat(entropies)[self._row_M]
