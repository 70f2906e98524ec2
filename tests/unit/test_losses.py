"""Losses by hand: every number here can be worked out on paper."""

import dataclasses
import math

import pytest
import torch

from manege.config import CreditConfig
from manege.trainer.losses.calls import call_mean
from manege.trainer.losses.combine import token_loss
from manege.trainer.losses.kl import k3
from manege.trainer.losses.mismatch import mismatch_weight
from manege.trainer.objective import objective_of

PPO = objective_of(CreditConfig(clip_low=0.2, clip_high=0.3, dual_clip=3.0))
CISPO = dataclasses.replace(PPO, loss="cispo")
GSPO = dataclasses.replace(PPO, loss="gspo")


def logs(*values):
    return torch.tensor(values, dtype=torch.float64).log()


def evaluate(objective, *, policy, recorded, advantages, calls=None, proximal=None, reference=None):
    """The result, and the gradient by each token's log-probability; all policies are given as probabilities."""
    logprobs_M = logs(*policy).requires_grad_()
    result = token_loss(
        logprobs_M,
        logs(*recorded),
        logprobs_M.detach() if proximal is None else logs(*proximal),
        torch.tensor(advantages, dtype=torch.float64),
        torch.tensor(calls or [0] * len(policy)),
        objective,
        reference_M=None if reference is None else logs(*reference),
    )
    result.loss_M.sum().backward()
    return result, logprobs_M.grad.tolist()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.2, 1.0, -1.2, -1.2),
        (1.5, 1.0, -1.3, 0.0),
        (0.5, 1.0, -0.5, -0.5),
        (0.5, -1.0, 0.8, 0.0),
        (2.0, -1.0, 2.0, 2.0),
        (5.0, -1.0, 3.0, 0.0),
    ],
)
def test_ppo_by_hand(ratio, advantage, loss, gradient):
    result, got = evaluate(PPO, policy=[0.1 * ratio], recorded=[0.1], advantages=[advantage])
    assert result.loss_M.item() == pytest.approx(loss)
    assert got == pytest.approx([gradient])
    assert result.clipped_M.item() == (gradient == 0)


def test_without_a_dual_clip_a_bad_answer_has_no_bound():
    objective = dataclasses.replace(PPO, dual_clip=None)
    result, gradient = evaluate(objective, policy=[0.5], recorded=[0.1], advantages=[-1.0])
    assert result.loss_M.item() == pytest.approx(5)
    assert gradient == pytest.approx([5])
    assert not result.clipped_M.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "gradient", "clipped"),
    [
        (1.1, 1.0, -1.1, False),
        (5.0, 1.0, -1.3, True),
        (5.0, -1.0, 1.3, True),
        (0.5, 2.0, -1.6, True),
        (0.5, 0.0, 0.0, True),
    ],
)
def test_cispo_bounds_the_weight_and_keeps_every_gradient(ratio, advantage, gradient, clipped):
    result, got = evaluate(CISPO, policy=[0.1 * ratio], recorded=[0.1], advantages=[advantage])
    assert got == pytest.approx([gradient])
    assert result.loss_M.item() == pytest.approx(gradient * math.log(0.1 * ratio))
    assert result.clipped_M.item() == clipped


def test_cispo_has_no_lower_bound_where_clip_low_is_one():
    objective = dataclasses.replace(CISPO, clip_low=1.0)
    _, gradient = evaluate(objective, policy=[0.01], recorded=[0.1], advantages=[1.0])
    assert gradient == pytest.approx([-0.1])


def test_gspo_takes_one_ratio_per_call():
    # Call 0: ratios 2 and 0.5, so s = 1. Call 1: ratios 4 and 1, so s = 2, which is clipped.
    result, gradient = evaluate(
        GSPO, policy=[0.4, 0.1, 0.4, 0.2], recorded=[0.2, 0.2, 0.1, 0.2], advantages=[1.0] * 4, calls=[0, 0, 1, 1]
    )
    assert result.loss_M.tolist() == pytest.approx([-1, -1, -1.3, -1.3])
    assert gradient == pytest.approx([-1, -1, 0, 0])
    assert result.clipped_M.tolist() == [False, False, True, True]


def test_gspo_gradient_is_that_of_the_ratio_times_the_advantage_of_the_call():
    # s = sqrt(1.2 * 0.9); d(sum of l)/d(log pi_t) = -s A for each of the two tokens.
    result, gradient = evaluate(GSPO, policy=[0.12, 0.09], recorded=[0.1, 0.1], advantages=[-2.0, -2.0])
    s = math.sqrt(1.08)
    assert result.loss_M.tolist() == pytest.approx([2 * s, 2 * s])
    assert gradient == pytest.approx([2 * s, 2 * s])


def test_mean_over_a_call_reaches_each_of_its_tokens_in_any_order():
    values = torch.tensor([1.0, 5.0, 3.0])
    assert call_mean(values, torch.tensor([0, 1, 0])).tolist() == [2, 5, 2]


@pytest.mark.parametrize(
    ("level", "weights"),
    [("token", [0.0, 0.5, 2.0, 0.0, 1.5]), ("call", [math.sqrt(0.05), math.sqrt(0.05), 2.0, 2.0, 2.0])],
)
def test_mismatch_weight_is_capped_and_masked_on_both_sides(level, weights):
    # Means of the calls: sqrt(0.1 * 0.5) = 0.22, and (3 * 6 * 1.5) ** (1 / 3) = 3.
    distances = [0.1, 0.5, 3.0, 6.0, 1.5]
    weight_M, masked_M = mismatch_weight(
        logs(*[0.1 * d for d in distances]),
        logs(*[0.1] * 5),
        torch.tensor([0, 0, 1, 1, 1]),
        level=level,
        cap=2.0,
        band=5.0,
    )
    assert weight_M.tolist() == pytest.approx(weights)
    assert masked_M.tolist() == [weight == 0 for weight in weights]


def test_decoupled_clips_against_the_start_of_the_update_and_weighs_by_its_distance_from_the_sampler():
    objective = dataclasses.replace(PPO, ratio="decoupled")
    # pi / prox = 1.1 (within the clip) though pi / mu = 1.65; prox / mu = 1.5. The second token is masked.
    result, gradient = evaluate(
        objective, policy=[0.33, 0.9], recorded=[0.2, 0.1], proximal=[0.3, 0.9], advantages=[1.0, 1.0]
    )
    assert result.loss_M.tolist() == pytest.approx([-1.65, 0])
    assert gradient == pytest.approx([-1.65, 0])
    assert result.weight_M.tolist() == pytest.approx([1.5, 0])
    assert result.masked_M.tolist() == [False, True]


def test_a_masked_token_does_not_count_as_clipped():
    objective = dataclasses.replace(PPO, ratio="decoupled")
    result, _ = evaluate(objective, policy=[0.9], recorded=[0.01], proximal=[0.3], advantages=[1.0])
    assert (result.clipped_M.item(), result.masked_M.item()) == (False, True)


@pytest.mark.parametrize("loss", ["ppo", "cispo", "gspo"])
def test_decoupled_at_the_start_of_an_update_is_the_weighted_policy_gradient(loss):
    objective = dataclasses.replace(PPO, loss=loss, ratio="decoupled")
    _, gradient = evaluate(objective, policy=[0.3, 0.1], recorded=[0.2, 0.2], advantages=[1.0, -2.0], calls=[0, 1])
    assert gradient == pytest.approx([-1.5, 1.0])


@pytest.mark.parametrize(("ratio", "expected"), [(1, 0), (2, 1 - math.log(2)), (0.5, math.log(2) - 0.5)])
def test_k3_by_hand(ratio, expected):
    assert k3(logs(0.2), logs(0.2 * ratio)).item() == pytest.approx(expected)


def test_k3_is_the_divergence_in_expectation():
    p, q = logs(0.5, 0.3, 0.2), logs(0.2, 0.2, 0.6)
    assert (q.exp() * k3(q, p)).sum().item() == pytest.approx((q.exp() * (q - p)).sum().item())


def test_kl_term_pulls_towards_the_reference_without_any_advantage():
    objective = dataclasses.replace(PPO, kl=0.1)
    result, gradient = evaluate(objective, policy=[0.2], recorded=[0.2], advantages=[0.0], reference=[0.1])
    assert result.loss_M.item() == pytest.approx(0.1 * (0.5 - 1 + math.log(2)))
    assert gradient == pytest.approx([0.1 * (1 - 0.5)])
    assert result.kl_M.item() == pytest.approx(0.5 - 1 + math.log(2))
