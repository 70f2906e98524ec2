"""What a group becomes for verl: rows whose weighted sum has the gradient of our own trainer, however verl cuts them.

Nothing here needs verl: its part, a padded batch and a sum over its tokens, is written out.
"""

import random
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch

from manege.config import CreditConfig, TrainConfig
from manege.model.attend import causal_attend
from manege.model.folder import open_folder
from manege.model.load import load_model
from manege.trainer.batch import build_batch
from manege.trainer.collect import Group
from manege.trainer.engines.torch import TorchEngine
from manege.trainer.objective import objective_of
from manege.types import GroupId, Outcome, Rollout, RolloutId, RolloutSpec, RunId, Task
from manege.verl.credit import policy_loss, weigh
from manege.verl.rows import group_rows
from tests.calls import linear_rollout, make_call

FOLDER = open_folder(str(Path(__file__).parents[2] / "tiny" / "model"))
TASK = Task(id="t", input={})
FILLER = 260


@dataclass
class ActorConfig:
    """The part of verl's that the loss reads."""

    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.28
    clip_ratio_c: float = 3.0
    global_batch_info: dict = field(default_factory=lambda: {"dp_size": 1})


def make_group(name, rewards, calls):
    rollouts = [
        Rollout(
            spec=RolloutSpec(id=RolloutId(f"{name}{i}"), run=RunId("run"), task=TASK, group=GroupId(name)),
            state=Outcome.OK.state,
            attempt=0,
            outcome=Outcome.OK,
            reward=reward,
            created_s=0.0,
        )
        for i, reward in enumerate(rewards)
    ]
    return Group(task=TASK, rollouts=rollouts, calls=calls)


def branches(name):
    """A conversation and two more beside it: three samples of unequal length."""
    main = linear_rollout(name, [([10, 11], [20, 21]), ([12], [22, 23, 24])])
    beside = [make_call(f"{name}x{i}", [7, 8, 30 + i], [40 + i] * (i + 2), rollout=name, version=i) for i in range(2)]
    return [*main, *beside]


GROUPS = [
    make_group(
        "a",
        [1.0, 0.25, None, 0.0],
        [branches("a0"), linear_rollout("a1", [([10, 11], [20, 30])]), branches("a2"), []],
    ),
    make_group("b", [0.5, 1.0], [linear_rollout("b0", [([50], [51, 52])]), branches("b1")]),
]


def rows_of(groups, credit):
    return [
        row for group in groups for row in group_rows(group, credit, uid=group.id, max_tokens=None, filler_id=FILLER)
    ]


def gradient(model):
    return torch.cat([p.grad.flatten() for p in model.module.parameters() if p.grad is not None])


def verls_gradient(rows, *, micro_batch):
    """As verl does it: padded rows, a sum per micro-batch, weighted advantages."""
    model = load_model(FOLDER, dtype=torch.float64)
    weights = weigh([row.share.to_json() for row in rows])
    for begin in range(0, len(rows), micro_batch):
        part = list(zip(rows, weights, strict=True))[begin : begin + micro_batch]
        size = max(len(row.response_ids_R) for row, _ in part)
        logprobs_BR, old_BR, advantages_BR, mask_BR = (torch.zeros(len(part), size).double() for _ in range(4))
        for i, (row, weight) in enumerate(part):
            ids_T = torch.from_numpy(np.concatenate([row.prompt_ids_P, row.response_ids_R])).long()
            hidden = model.hidden(ids_T, torch.arange(len(ids_T)), causal_attend([len(ids_T)]))
            all_T = torch.log_softmax(model.logits(hidden), -1)[:-1].gather(1, ids_T[1:, None])[:, 0]
            length = len(row.response_ids_R)
            logprobs_BR[i, :length] = all_T[-length:]
            for target, values in ((old_BR, row.logprobs_R), (mask_BR, row.mask_R)):
                target[i, :length] = torch.from_numpy(values)
            advantages_BR[i, :length] = weight * torch.from_numpy(row.advantages_R)
        loss, _ = policy_loss(
            old_log_prob=old_BR,
            log_prob=logprobs_BR,
            advantages=advantages_BR,
            response_mask=mask_BR,
            config=ActorConfig(),
        )
        loss.backward()
    return gradient(model)


@pytest.mark.parametrize("weighting", ["rollout_mean", "token_mean", "constant", "sample_mean"])
@pytest.mark.parametrize("micro_batch", [1, 3, 100])
def test_the_gradient_is_that_of_our_own_trainer(weighting, micro_batch):
    credit = CreditConfig(weighting=weighting, constant_tokens=16 if weighting == "constant" else None)
    model = load_model(FOLDER, dtype=torch.float64)
    engine = TorchEngine(model, FOLDER, TrainConfig())
    batch = build_batch(GROUPS, credit, success_reward=1.0, rng=random.Random(0))
    engine.accumulate(batch.samples, objective_of(credit))
    ours = gradient(model)
    theirs = verls_gradient(rows_of(GROUPS, credit), micro_batch=micro_batch)
    assert float((ours - theirs).norm() / ours.norm()) < 1e-6


def test_a_rollout_without_a_call_counts_and_one_without_a_verdict_does_not():
    rows = rows_of(GROUPS, CreditConfig())
    assert {(row.share.group, row.session) for row in rows} == {("a", 0), ("a", 1), ("a", 3), ("b", 0), ("b", 1)}
    [silent] = [row for row in rows if (row.share.group, row.session) == ("a", 3)]
    assert silent.mask_R.tolist() == [0]
    assert silent.reward == 0.0
    assert silent.share.group_rollouts == 3
    weights = dict(
        zip([(r.share.group, r.session, r.index) for r in rows], weigh([r.share.to_json() for r in rows]), strict=True)
    )
    assert weights["a", 3, 0] == 0.0
    assert weights["a", 1, 0] == pytest.approx(1 / (5 * 2))


def test_a_row_begins_with_its_first_trained_token_and_knows_its_versions():
    rows = {(row.session, row.index): row for row in rows_of(GROUPS[:1], CreditConfig())}
    first = rows[0, 0]
    assert first.prompt_ids_P.tolist() == [1, 2, 3, 4, 5, 6, 10, 11]
    assert first.response_ids_R.tolist() == [20, 21, 12, 22, 23, 24]
    assert first.mask_R.tolist() == [1, 1, 0, 1, 1, 1]
    assert first.versions == (1, 1)
    assert rows[0, 1].versions == (0, 0)


def test_a_group_without_a_verdict_has_no_row():
    assert rows_of([make_group("n", [None, None], [branches("n0"), []])], CreditConfig()) == []
