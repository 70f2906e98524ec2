"""`manege show` and `manege replay` on a real training: while it runs, afterwards, and through a gateway."""

import asyncio
import json
import signal
import time

import pytest

from manege.cli import main
from manege.controller.hacks import hack_events, hacks_of
from manege.sandbox.spec import Seen
from manege.store.base import Ending
from manege.store.sql import SqlStore
from manege.types import Event, Outcome, RolloutSpec, Task
from tests.calls import make_call
from tests.system.test_parts_alone import TINY, serving
from tests.system.test_training import RUN_FILE, finish, manege, rows, wait_for_steps

pytestmark = pytest.mark.timeout(300)
OVERRIDES = [
    *("train.steps=1000", "train.groups=2", "train.group_size=4", "train.mini_batches=2", "train.stop_success=1"),
    *("tasks.num_heldout=1", "credit.advantage=grpo", "credit.weighting=token_mean"),
]
FROM_CALLS = {
    *("num_rollouts", "num_verdicts", "num_calls", "num_samples", "samples_per_rollout", "samples_histogram"),
    *("sampled_tokens", "dead_tokens", "excluded_tokens", "context_tokens", "tokens_by_reason", "branches"),
    *("reward_mean", "success_rate", "informative_groups", "refilled_groups", "call_unique_fraction"),
}
"""Metrics of a step that its stored calls decide."""
OF_REPLAY = {"loss", "mass_success", "mass_failure", "advantage_size"}


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
    wait_for_steps(process, folder, 1)
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
    assert len(ended) >= 2 * 4
    assert all(known[row["id"]] == row for row in ended)
    assert data("show", folder, early["rollout"]["rollout"]["spec"]["id"]) == early["rollout"]
    steps = early["replay"]["as run"]
    assert steps
    assert steps == data("replay", folder)["as run"][: len(steps)]


def test_a_replay_with_the_runs_own_settings_gives_the_runs_own_numbers(run, data):
    folder, _ = run
    steps, again = rows(folder, "step"), data("replay", folder)["as run"]
    # It may have been stopped between the last rollout of a step and the end of the step.
    assert len(again) - len(steps) in (0, 1)
    assert set(again[0]) >= FROM_CALLS
    losses = []
    for was, now in zip(steps, again, strict=False):
        losses.append((was.get("loss", 0.0), now.pop("loss")))
        assert {name: now[name] for name in now if name not in OF_REPLAY} == {
            n: was[n] for n in now if n not in OF_REPLAY
        }
    assert max(abs(now) for _, now in losses) > 0.02
    # The second mini-batch of a step is seen by a policy that the first one has moved a little.
    assert all(abs(was - now) < 0.05 * max(0.1, abs(now)) for was, now in losses)


def test_other_settings_give_other_credit_to_the_same_tokens(run, data, answer):
    folder, _ = run
    both = data("replay", folder, "--set", "credit.advantage=centred", "--set", "credit.weighting=rollout_mean")
    was, now = both["as run"], both["replayed"]
    assert len(was) == len(now)
    for before, after in zip(was, now, strict=True):
        assert [before[name] for name in FROM_CALLS] == [after[name] for name in FROM_CALLS]
        # A mini-batch is a whole group, whose advantages add up to zero.
        assert abs(after["loss"]) < 1e-6
        assert after["advantage_size"] < before["advantage_size"] or not before["advantage_size"]
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


def keep(folder, groups, *, run="study", config=None, earned=None, hacks=None, clock=time.time):
    """A store with groups of rollouts: name -> (outcome, reward, log-probabilities of its one answer) of each; what
    single calls earned; and what agents were seen to try."""

    async def write():
        store = await SqlStore.open(folder / "manege.db", clock=clock)
        if config is not None:
            await store.put_run(run, config)
        for group, members in groups.items():
            task = Task(id=f"task-{group}", input={})
            names = [f"{run}-{group}{index}" for index in range(len(members))]
            await store.create_rollouts(
                [RolloutSpec(id=name, run=run, task=task, group=group, max_attempts=1) for name in names]
            )
            await store.claim(controller="c", limit=99, lease_s=1000)
            for name, (outcome, reward, logprobs) in zip(names, members, strict=True):
                if logprobs:
                    answer = range(50, 50 + len(logprobs))
                    await store.add_call(make_call(f"call-{name}", [1, 2], answer, rollout=name, logprobs=logprobs))
                if outcome is not None:
                    of_calls = {call: value for call, value in (earned or {}).items() if call == f"call-{name}"}
                    events = hack_events(agent=(hacks or {}).get(name, ()))
                    for event_type, told in events:
                        event = {"rollout_id": name, "attempt": 0, "event_type": event_type, "data": told}
                        await store.add_event(Event(**event, timestamp_s=0.0))
                    ending = Ending(
                        outcome=outcome,
                        reward=reward,
                        message=f"{outcome}",
                        call_rewards=of_calls,
                        evidence={"hacks": hacks_of(events)} if events else {},
                    )
                    await store.finish(name, 0, ending)
        await store.close()

    asyncio.run(write())


PAIR = [(Outcome.OK, 1.0, [-0.5] * 2), (Outcome.OK, 0.0, [-1.0] * 4)]
EQUAL = [(Outcome.OK, 1.0, [-0.5] * 2), (Outcome.OK, 1.0, [-0.5] * 3)]
STUDY = {"name": "study", "train": {"groups": 1}, "credit": {"weighting": "token_mean"}}


@pytest.mark.parametrize(
    ("setting", "loss", "success", "failure"),
    [
        # A = 1/2 of 2 tokens, -1/2 of 4, each token 1/6: (-1 + 2) / 6.
        ("credit.loss=gspo", 1 / 6, 1 / 6, 2 / 6),
        # A token counts 1 / (2 T): both rollouts weigh the same.
        ("credit.weighting=rollout_mean", 0, 1 / 4, 1 / 4),
        # An optimiser step each, -1/2 and 1/2, of which 2 and 4 tokens are trained.
        ("credit.weighting=rollout_mean train.mini_batches=2", 1 / 6, 1 / 2, 1 / 2),
        # -A log mu: (1/2 1/2 2 - 1/2 1 4) / 6.
        ("credit.loss=cispo", -1.5 / 6, 1 / 6, 2 / 6),
        # The others' mean instead of all's: twice the advantages.
        ("credit.advantage=rloo", 2 / 6, 2 / 6, 4 / 6),
    ],
)
def test_loss_and_gradient_mass_by_hand(tmp_path, data, setting, loss, success, failure):
    keep(tmp_path, {"a": PAIR}, config=STUDY)
    # Only PPO has a dual clip.
    settings = [*setting.split(), "credit.dual_clip=3.0"]
    both = data("replay", tmp_path, *(word for each in settings for word in ("--set", each)))
    [was], [now] = both["as run"], both["replayed"]
    assert was["loss"] == pytest.approx(1 / 6)
    assert [now["loss"], now["mass_success"], now["mass_failure"]] == pytest.approx([loss, success, failure], abs=1e-7)


def test_rewards_of_calls_are_read_from_the_store(tmp_path, data):
    keep(tmp_path, {"a": PAIR}, config=STUDY, earned={"call-study-a1": 3.0})
    [step] = data("replay", tmp_path, "--set", "credit.advantage=returns")["replayed"]
    # 1 and 0 + 3, mean 2: -1 for 2 tokens, 1 for 4.
    assert step["loss"] == pytest.approx((2 - 4) / 6)


CHEATED = [
    Seen(kind="git", detail="git log --all", count=3, flags=True),
    Seen(kind="packages", detail="pip install six", count=1, flags=False),
]
HACKS = {
    "study-a0": CHEATED,
    "study-b1": [Seen(kind="git", detail="git fetch", count=1, flags=True)],
    "study-b0": [Seen(kind="git", detail="git log", count=9, flags=False)],
}
TOLD = {
    "num_rollouts": 7,
    "num_flagged": 2,
    "flagged_rewarded": 0.5,
    "others_rewarded": 0.75,
    "kinds": [
        {
            "kind": "git",
            "num_events": 13,
            "num_rollouts": 3,
            "num_flagged": 2,
            "rewarded": 0.5,
            "examples": [
                {"rollout": "study-a0", "detail": "git log --all", "count": 3, "flags": True},
                {"rollout": "study-b1", "detail": "git fetch", "count": 1, "flags": True},
                {"rollout": "study-b0", "detail": "git log", "count": 9, "flags": False},
            ],
        },
        {
            "kind": "packages",
            "num_events": 1,
            "num_rollouts": 1,
            "num_flagged": 0,
            "rewarded": None,
            "examples": [{"rollout": "study-a0", "detail": "pip install six", "count": 1, "flags": False}],
        },
    ],
}


def test_what_agents_tried_is_told_by_kind_with_whether_it_paid(tmp_path, data, answer, refusal):
    """Of a store, of an export, and through a gateway; what it paid for is ranked, the flagged one first."""
    keep(tmp_path, {"a": PAIR, "b": PAIR, "c": [(None, None, [])], "d": EQUAL}, config=STUDY, hacks=HACKS)
    told = data("show", tmp_path, "--hacks")
    assert {name: value for name, value in told.items() if name != "ranked"} == TOLD
    assert [ranked["rollout"] for ranked in told["ranked"]][:1] == ["study-a0"]
    assert {ranked["rollout"] for ranked in told["ranked"]} == {"study-a0", "study-b0", "study-d0", "study-d1"}
    shown = answer("show", tmp_path, "--hacks")
    assert "flagged 3 (usual 0)" in " ".join(shown.split())
    assert "2 of 7 rollouts are flagged; rewarded: 50% of them, 75% of the others" in shown
    assert "study-a0 git log --all (3 times)" in shown
    for form in ("jsonl", "parquet"):
        answer("export", tmp_path, "--format", form, "--out", tmp_path / f"run.{form}")
        assert data("show", tmp_path / f"run.{form}", "--hacks") == told
    words = ["gateway", "--model", TINY / "model", "--port", 0, "--folder", tmp_path]
    with serving(*words, ready=r"gateway (http://\S+),", log=tmp_path / "gateway.txt") as url:
        way = ["--gateway", url, "--key-file", tmp_path / "operator.key"]
        assert data("show", "study", "--hacks", *way) == told
    assert "--hacks is of a whole run" in refusal("show", tmp_path, "study-a0", "--hacks")
    assert "flagged for git (credit.flagged = keep)" in answer("show", tmp_path, "study-a0")
    assert "flagged" not in answer("show", tmp_path, "study-a1")


def test_a_run_without_hacks_says_so(tmp_path, data, answer):
    keep(tmp_path, {"a": PAIR}, config=STUDY)
    assert data("show", tmp_path, "--hacks")["kinds"] == []
    assert "2 rollouts, none of which tried anything that is reported" in answer("show", tmp_path, "--hacks")


@pytest.mark.parametrize(
    ("flagged", "loss", "reasons"),
    [
        # As without: -1/2 and 1/2, of 2 and 4 tokens, each 1/6.
        ("keep", 1 / 6, {"trained": 6}),
        # Rewards 0 and 0 teach nothing.
        ("zero", 0, {"trained": 6}),
        ("mask", 0, {"trained": 4, "flagged": 2}),
    ],
)
def test_a_replay_may_mask_or_zero_who_cheated(tmp_path, data, answer, flagged, loss, reasons):
    keep(tmp_path, {"a": PAIR}, config=STUDY, hacks={"study-a0": CHEATED})
    [step] = data("replay", tmp_path, "--set", f"credit.flagged={flagged}")["replayed"]
    assert step["loss"] == pytest.approx(loss)
    assert step["tokens_by_reason"] == reasons
    assert (step["flagged"], step["flagged_rewarded"], step["reward_mean"]) == (1, 1.0, 0.5)
    assert "  flagged" in answer("replay", tmp_path, "--set", f"credit.flagged={flagged}")


def test_the_tree_of_a_masked_rollout_says_why(tmp_path, data):
    config = STUDY | {"credit": STUDY["credit"] | {"flagged": "mask"}}
    keep(tmp_path, {"a": PAIR}, config=config, hacks={"study-a0": CHEATED})
    [call] = data("show", tmp_path, "study-a0")["calls"]
    assert (call["reason"], call["num_trained"]) == ("flagged", 0)


def test_a_replay_may_refill_groups_and_leaves_out_what_its_trainer_gave_up(tmp_path, data, answer, refusal):
    cancelled = [(Outcome.OK, 1.0, [-0.5]), (Outcome.CANCELLED, None, [])]
    groups = {"a": EQUAL, "b": PAIR, "c": EQUAL, "d": cancelled, "e": EQUAL, "f": PAIR, "g": [(None, None, [-0.5])]}
    keep(tmp_path, groups, config={**STUDY, "train": {"groups": 2}})
    refill = ["--set", "credit.zero_variance=refill"]
    both = data("replay", tmp_path, *refill, "--set", "train.groups=1")
    was, now = both["as run"], both["replayed"]
    # a b, e f; c was waiting when d was given up.
    assert [step["informative_groups"] for step in was] == [1, 1]
    assert [step["num_rollouts"] for step in was] == [4, 4]
    # b for a; f for e, after c and d.
    assert [step["refilled_groups"] for step in now] == [1, 1]
    assert [step["tokens_by_reason"] for step in now] == [{"trained": 6, "replaced": 5}] * 2
    assert "replaced by others" in answer("replay", tmp_path, *refill, "--set", "train.groups=1")
    assert "study, replayed: its complete groups make no step yet" in refusal("replay", tmp_path, *refill)


def test_the_head_says_what_a_rollout_is_worth_and_what_is_not_known_yet(tmp_path, answer, data):
    lost = [(Outcome.OK, 1.0, [-0.5]), (Outcome.INFRA_ERROR, None, [-0.5] * 3), (Outcome.AGENT_TIMEOUT, None, [])]
    keep(tmp_path, {"a": lost, "b": [(None, None, [-0.5]), PAIR[0]]}, config=STUDY)
    assert "reward 1, advantage +0.5 (centred, of rewards 1 - 0)" in answer("show", tmp_path, "study-a0")
    assert "3 no_verdict" in answer("show", tmp_path, "study-a1")
    [call] = data("show", tmp_path, "study-a1")["calls"]
    assert (call["reason"], call["num_trained"]) == ("no_verdict", 0)
    ended = answer("show", tmp_path, "study-a2")
    assert "failed, agent_timeout; reward 0, no advantage: nothing of it is trained" in ended
    assert "the agent made no model call" in ended
    assert "no advantage yet: 1 of its group have not ended" in answer("show", tmp_path, "study-b1")
    assert "running; reward -" in answer("show", tmp_path, "study-b0")


def test_one_folder_may_hold_runs_with_and_without_a_config(tmp_path, data, refusal):
    keep(tmp_path, {"a": PAIR}, config=STUDY)
    keep(tmp_path, {"b": PAIR}, run="default")
    assert f"{tmp_path}/study, {tmp_path}/default" in refusal("show", tmp_path)
    assert [row["id"] for row in data("show", f"{tmp_path}/default")] == ["default-b1", "default-b0"]
    assert data("show", f"{tmp_path}/default", "default-b0")["advantages"] == {"call-default-b0": 0.5}
