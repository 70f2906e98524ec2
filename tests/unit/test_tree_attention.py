"""Attention over a prefix tree is that of each sequence alone, whatever the sizes of its segments."""

import numpy as np
import pytest
import torch

from manege.model.attend import causal_attend
from manege.trainer.algo.tree import build_tree, separate
from manege.trainer.engines.tree_attention import TreeAttention

HEADS, KV_HEADS, HEAD_DIM = 6, 2, 16


def sequences(rng, *, shared, ends):
    """One beginning, several ends of these lengths."""
    beginning = rng.integers(0, 1000, shared)
    return [np.concatenate([beginning, rng.integers(0, 1000, length)]).astype(np.int32) for length in ends]


CASES = {
    "short ones": {"shared": 40, "ends": [5, 30, 31, 64]},
    "a long end of a short beginning": {"shared": 20, "ends": [300, 7, 280]},
    "long ends of a long beginning": {"shared": 400, "ends": [300, 257, 3]},
    "long ones that share nothing": {"shared": 0, "ends": [256, 700]},
}


@pytest.mark.parametrize("lay_out", [build_tree, separate])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_tree_gives_values_and_gradients_of_separate_sequences(case, lay_out):
    rng = np.random.default_rng(0)
    torch.manual_seed(0)
    of_case = sequences(rng, **case)
    tree = lay_out(of_case)
    size = len(tree.ids_N)
    inputs = [torch.randn(size, heads, HEAD_DIM, dtype=torch.float64) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    for tensor in inputs:
        tensor.requires_grad_(True)
    ours = TreeAttention(tree, device=torch.device("cpu"), dtype=torch.float64)(0, *inputs, 0.2)
    weights = [torch.randn(len(ids), HEADS, HEAD_DIM, dtype=torch.float64) for ids in of_case]
    gathered = [ours[torch.from_numpy(nodes)] for nodes in tree.sequences]
    got = torch.autograd.grad(sum((w * x).sum() for w, x in zip(weights, gathered, strict=True)), inputs)

    alone = [
        causal_attend([len(nodes)])(0, *(tensor[torch.from_numpy(nodes)] for tensor in inputs), 0.2)
        for nodes in tree.sequences
    ]
    want = torch.autograd.grad(sum((w * x).sum() for w, x in zip(weights, alone, strict=True)), inputs)
    for one, other in zip([*gathered, *got], [*alone, *want], strict=True):
        torch.testing.assert_close(one, other, atol=1e-10, rtol=1e-8)
