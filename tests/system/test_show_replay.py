"""`manege show` and `manege replay` on a real training: while it runs, afterwards, and through a gateway."""

import json
import signal

import pytest

from manege.cli import main
from tests.system.test_parts_alone import TINY, serving
from tests.system.test_training import RUN_FILE, finish, manege, rows, wait_for_steps

pytestmark = pytest.mark.timeout(300)
OVERRIDES = [
    *("train.steps=1000", "train.groups=2", "train.group_size=4", "train.mini_batches=2", "train.stop_success=1"),
    *("tasks.num_heldout=2", "credit.advantage=grpo", "credit.weighting=token_mean"),
]
FROM_CALLS = {
    *("num_rollouts", "num_verdicts", "num_calls", "num_samples", "samples_per_rollout", "samples_histogram"),
    *("sampled_tokens", "dead_tokens", "excluded_tokens", "context_tokens", "tokens_by_reason", "branches"),
    *("reward_mean", "success_rate", "informative_groups", "refilled_groups", "call_unique_fraction"),
}
"""Metrics of a step that its stored calls decide."""


def apart(*words):
    """Data of a verb in a process of its own."""
    code, out, err = finish(manege(*words, "--json"), 60)
    assert code == 0, err
    return json.loads(out)


@pytest.fixture
def answer(capsys):
    """What a verb prints, run in this process: starting one takes longer than all that it does."""

    def ask(*words):
        capsys.readouterr()
        assert main([str(word) for word in words]) == 0
        return capsys.readouterr().out

    return ask


@pytest.fixture
def data(answer):
    return lambda *words: json.loads(answer(*words, "--json"))


@pytest.fixture
def refusal(capsys):
    def ask(*words):
        capsys.readouterr()
        assert main([str(word) for word in words]) == 2
        out, err = capsys.readouterr()
        assert not out
        assert len(err.splitlines()) == 1, err
        return err

    return ask


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that was stopped, and what was shown of it while it went on."""
    folder = tmp_path_factory.mktemp("show") / "tiny"
    process = manege("train", RUN_FILE, f"folder={folder}", *OVERRIDES)
    wait_for_steps(process, folder, 2)
    early = {"list": apart("show", folder, "--all"), "replay": apart("replay", folder)}
    rollout_id = [row["id"] for row in early["list"] if row["is_train"] and row["num_calls"] > 1 and row["outcome"]][-1]
    early["rollout"] = apart("show", folder, rollout_id)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert finish(process, 60)[0] == 130
    return folder, early


def test_a_run_is_shown_while_its_training_goes_on(run, data):
    folder, early = run
    after = data("show", folder, "--all")
    assert len(after) >= len(early["list"])
    known = {row["id"]: row for row in after}
    ended = [row for row in early["list"] if row["outcome"]]
    assert len(ended) >= 2 * 2 * 4
    assert all(known[row["id"]] == row for row in ended)
    assert data("show", folder, early["rollout"]["rollout"]["spec"]["id"]) == early["rollout"]
    steps = early["replay"]["as run"]["by_step"]
    assert len(steps) >= 2
    assert steps == data("replay", folder)["as run"]["by_step"][: len(steps)]


def test_a_replay_with_the_runs_own_settings_gives_the_runs_own_numbers(run, data):
    folder, _ = run
    steps, again = rows(folder, "step"), data("replay", folder)["as run"]
    # It may have been stopped between the last rollout of a step and the end of the step.
    assert again["steps"] - len(steps) in (0, 1)
    assert set(again["by_step"][0]) >= FROM_CALLS
    losses = []
    for was, now in zip(steps, again["by_step"], strict=False):
        losses.append((was.get("loss", 0.0), now.pop("loss")))
        assert now == {name: was[name] for name in now}
    assert max(abs(now) for _, now in losses) > 0.02
    # The second mini-batch of a step is seen by a policy that the first one has moved a little.
    assert all(abs(was - now) < 0.05 * max(0.1, abs(now)) for was, now in losses)
    if again["steps"] == len(steps):
        assert sum(again["tokens"].values()) == sum(row["sampled_tokens"] for row in steps)


def test_other_settings_give_other_credit_to_the_same_tokens(run, data, answer):
    folder, _ = run
    both = data("replay", folder, "--set", "credit.advantage=centred", "--set", "credit.weighting=rollout_mean")
    was, now = both["as run"], both["replayed"]
    assert (was["tokens"], was["samples"]) == (now["tokens"], now["samples"])
    assert now["advantage"] < was["advantage"]
    # A mini-batch of whole groups: advantages of a group add up to zero.
    assert all(abs(step["loss"]) < 1e-6 for step in now["by_step"])
    text = answer("replay", folder, "--set", "credit.cut_short=mask")
    assert all(len(line) <= 100 for line in text.splitlines())
    assert "as run" in text
    assert "replayed: credit.cut_short=mask" in text


def test_the_tree_is_a_line_per_call_with_what_was_said(run, answer):
    folder, early = run
    shown = early["rollout"]
    text = answer("show", folder, shown["rollout"]["spec"]["id"])
    lines = text.splitlines()
    assert all(len(line) <= 100 for line in lines)
    assert f"task {shown['rollout']['spec']['task']['id']}" in lines[0]
    assert "advantage" in lines[1]
    for call in shown["calls"]:
        [line] = [line for line in lines if call["id"][:8] in line]
        assert call["said"] in line
        assert "trained" in line
    assert sum(call["num_trained"] for call in shown["calls"]) == shown["ledger"]["tokens"]["trained"]


def test_tokens_and_partings_are_read_with_the_runs_own_tokenizer(run, answer, refusal):
    folder, early = run
    rollout_id = early["rollout"]["rollout"]["spec"]["id"]
    calls = early["rollout"]["calls"]
    text = answer("show", folder, rollout_id, "--tokens")
    assert "context" in text
    assert "<|user|>q·" in text
    assert "┊<|end|>┊" in text
    assert "\x1b" not in text
    first, second = calls[0]["id"], calls[1]["id"]
    assert "the second call continues the first" in answer("show", folder, rollout_id, "--diff", first[:8], second[:8])
    assert "name two calls" in refusal("show", folder, rollout_id, "--diff", first, first)
    assert "did you mean" in refusal("show", folder, rollout_id, "--diff", first, "zz")


def test_a_gateway_shows_the_same_as_the_folder(run, data, refusal):
    folder, early = run
    rollout_id = early["rollout"]["rollout"]["spec"]["id"]
    words = ["gateway", "--model", TINY / "model", "--port", 0, "--folder", folder]
    by_folder = [data("show", folder, "--all"), data("show", folder, rollout_id), data("replay", folder)]
    with serving(*words, ready=r"gateway (http://\S+),", log=folder.parent / "gateway.txt") as url:
        way = ["--gateway", url, "--key-file", folder / "operator.key"]
        assert [
            data("show", "tiny", "--all", *way),
            data("show", "tiny", rollout_id, *way),
            data("replay", "tiny", *way),
        ] == by_folder
        assert "does not exist, or has no rollouts yet" in refusal("show", "nothing", *way)


def test_what_is_not_there_is_named_in_one_line(run, refusal):
    folder, _ = run
    assert f"did you mean {folder}" in refusal("show", folder.parent / "tinny")
    assert "did you mean" in refusal("show", folder, "zzz")
    assert "is the beginning of more than one" in refusal("show", folder, "")
    assert "did you mean 'credit.advantage'" in refusal("replay", folder, "--set", "credit.advantag=grpo")
    assert "a replay reads only credit.*" in refusal("replay", folder, "--set", "seed=3")
    assert "needs --key-file" in refusal("show", "tiny", "--gateway", "http://127.0.0.1:9")
