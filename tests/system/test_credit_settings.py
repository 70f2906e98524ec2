"""Settings of credit through all parts: what the loop does with a batch, and when it stops."""

import pytest

from tests.system.test_training import RUN_FILE, finish, manege, rows

SMALL = ["train.steps=2", "train.groups=4", "train.group_size=4", "evaluation.temperatures=[]"]


def train(folder, *settings):
    return finish(manege("train", RUN_FILE, f"folder={folder}", *SMALL, *settings))


@pytest.mark.timeout(240)
def test_an_update_of_several_steps_is_one_version_and_every_token_is_accounted_for(tmp_path):
    settings = ["credit.ratio=decoupled", "credit.zero_variance=refill", "credit.advantage=returns"]
    code, _, err = train(tmp_path, *settings, "credit.discount=0.5", "train.mini_batches=3")
    assert code == 0, err
    for number, row in enumerate(rows(tmp_path, "step"), 1):
        assert (row["step"], row["policy_version"]) == (number, number)
        assert row["optimiser_steps"] == 3
        assert row["refilled_groups"] >= 0
        assert row["num_rollouts"] == 4 * 4
        assert sum(row["tokens_by_reason"].values()) == row["sampled_tokens"]
        assert row["gap_by_distance"] == {"0": pytest.approx({"mean": 0, "max": 0, "kl": 0}, abs=1e-4)}


@pytest.mark.timeout(240)
def test_groups_with_a_single_verdict_teach_nothing_and_that_is_said_once(tmp_path):
    scorer = "scorer.run=tests.programs:score_first_of_group"
    code, _, err = train(tmp_path, scorer, "train.max_failed_fraction=0.9")
    assert code == 0, err
    for row in rows(tmp_path, "step"):
        assert (row["lone_groups"], row["constant_groups"], row["optimiser_steps"]) == (4, 4, 0)
        assert (row["policy_version"], row["num_verdicts"]) == (0, 4)
    assert err.count("groups with a single verdict have nothing to be compared with") == 1


@pytest.mark.timeout(240)
def test_too_few_trained_tokens_stop_the_run_with_what_to_do(tmp_path):
    settings = ["sampling.max_new_tokens=1", "credit.cut_short=mask", "credit.min_trained_fraction=0.9"]
    code, _, err = train(tmp_path, *settings)
    assert code != 0
    assert "less than credit.min_trained_fraction = 0.9" in err
    assert "cut_short (raise sampling.max_new_tokens" in err
    assert "Traceback" not in err


def test_a_combination_that_is_not_tested_starts_nothing(tmp_path):
    code, _, err = train(tmp_path / "run", "credit.level=sample", "credit.loss=cispo")
    assert code != 0
    assert 'is not a tested combination; the nearest one has loss = "ppo" (docs/reference/credit.md)' in err
    assert not (tmp_path / "run").exists()
