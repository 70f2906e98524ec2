"""The pure parts of the controller: plan, verdicts, outcomes, the agent's environment, folders."""

import json
import stat
from pathlib import Path

import pytest

from manege.controller.environment import agent_environment, fill
from manege.controller.folders import make_folders, remove_left_over
from manege.controller.outcome import judge_agent, judge_score
from manege.controller.plan import Actions, Lease, plan, retry_after_s
from manege.controller.record import AttemptRecord
from manege.controller.verdict import Verdict, parse_verdict
from manege.errors import HarnessError
from manege.sandbox.spec import Exit
from manege.types import Outcome, Rollout, RolloutSpec, RolloutState, Task
from tests.calls import make_call


def lease(attempt=0, ends_s=130.0):
    return Lease(attempt=attempt, ends_s=ends_s)


@pytest.mark.parametrize(
    ("desired", "actual", "actions"),
    [
        ({}, {}, {"num_claim": 2}),
        ({"a": lease()}, {}, {"start": ["a"], "num_claim": 1}),
        ({"a": lease()}, {"a": 0}, {"num_claim": 1}),
        ({}, {"a": 0}, {"kill": ["a"], "num_claim": 1}),
        ({"a": lease(attempt=1)}, {"a": 0}, {"kill": ["a"], "num_claim": 1}),
        ({"a": lease(ends_s=100.0)}, {"a": 0}, {"kill": ["a"], "num_claim": 1}),
        ({"a": lease(ends_s=100.0)}, {}, {"num_claim": 2}),
        ({"a": lease(ends_s=110.0), "b": lease()}, {"a": 0, "b": 0}, {"renew": ["a", "b"]}),
        ({"a": lease(), "b": lease(), "c": lease()}, {"a": 0, "d": 0}, {"start": ["b", "c"], "kill": ["d"]}),
    ],
    ids=["idle", "new", "running", "lost", "next attempt", "lapsed", "lapsed, dead", "due", "too many"],
)
def test_the_plan_follows_from_leases_and_agents(desired, actual, actions):
    want = Actions(**({"start": [], "kill": [], "renew": [], "num_claim": 0} | actions))
    assert plan(desired, actual, now_s=100.0, slots=2, renew_before_s=10.0) == want


def test_a_failed_rollout_rests_twice_as_long_after_each_attempt_up_to_five_minutes():
    assert [retry_after_s(attempt, 2) for attempt in range(9)] == [2, 4, 8, 16, 32, 64, 128, 256, 300]
    assert retry_after_s(3, 0) == 0


@pytest.mark.parametrize(("text", "reward"), [("1", 1.0), ("0.5", 0.5), ("-0.25", -0.25), ("1e3", 1e3), ("null", None)])
def test_a_verdict_is_a_number_or_none(text, reward):
    assert parse_verdict(text, ()) == Verdict(reward=reward)


@pytest.mark.parametrize(
    "text",
    [
        '"0.5"',
        "true",
        "false",
        "NaN",
        "Infinity",
        "-Infinity",
        "1e999",
        "9" * 400,
        "[1]",
        "{}",
        '{"calls": {}}',
        "good",
        "",
    ],
)
def test_nonsense_is_not_a_verdict(text):
    for verdict in (text, '{"reward": %s, "calls": {}}' % (text or '""'), '{"reward": %s, "won": 1}' % (text or '""')):
        with pytest.raises(ValueError, match="want a finite number or null"):
            parse_verdict(verdict, ())


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ('{"reward": 1}', Verdict(reward=1.0)),
        ('{"reward": null, "message": "no idea"}', Verdict(reward=None, message="no idea")),
        ('{"reward": 0.5, "message": null, "calls": {"a": 1}}', Verdict(reward=0.5, call_rewards={"a": 1.0})),
        ('{"reward": 0, "hacks": ["forged results"]}', Verdict(reward=0.0, hacks=("forged results",))),
    ],
)
def test_a_verdict_may_come_with_a_message(text, verdict):
    assert parse_verdict(text, {"a"}) == verdict


@pytest.mark.parametrize(
    "rest", ['"message": 1', '"hacks": "x"', '"hacks": [1]', '"calls": null', '"calls": [1]', '"other": 1']
)
def test_an_object_of_another_kind_is_not_a_verdict(rest):
    with pytest.raises(ValueError, match="want a"):
        parse_verdict(f'{{"reward": 1, {rest}}}', ())


@pytest.mark.parametrize(("text", "reward"), [("0.5", 0.5), ("null", None)])
def test_a_verdict_may_say_what_single_calls_earned(text, reward):
    verdict = parse_verdict(f'{{"reward": {text}, "calls": {{"a": 1, "b": -0.25}}}}', {"a", "b", "c"})
    assert verdict == Verdict(reward=reward, call_rewards={"a": 1.0, "b": -0.25})


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ('{"a": "1"}', "reward of call 'a' is '1', want a finite number"),
        ('{"a": true}', "reward of call 'a' is True, want a finite number"),
        ('{"a": NaN}', "reward of call 'a' is nan, want a finite number"),
        ('{"a": null}', "reward of call 'a' is None, want a finite number"),
        ('{"z": 1}', "call 'z', which this attempt did not make"),
        ("[1]", "`calls` are .1., want an object of numbers"),
    ],
)
def test_nonsense_is_not_the_reward_of_a_call(calls, message):
    with pytest.raises(ValueError, match=message):
        parse_verdict(f'{{"reward": 1, "calls": {calls}}}', {"a"})


def ended(**changes):
    return Exit(**({"code": 0, "signal": None, "cpu_seconds": 1, "num_left": 0} | changes))


@pytest.mark.parametrize(
    ("seen", "num_calls", "outcome", "message"),
    [
        (ended(), 2, Outcome.OK, None),
        (ended(), 0, Outcome.OK, None),
        (ended(code=3), 2, Outcome.OK, "the agent ended with exit code 3"),
        (ended(code=None, signal=11), 2, Outcome.OK, "the agent ended with signal 11"),
        (ended(code=3), 0, Outcome.AGENT_ERROR, "before its first model call (exit code 3): no key"),
        (ended(code=None, signal=11), 0, Outcome.AGENT_ERROR, "before its first model call (signal 11)"),
        (ended(code=None, signal=9, limit="memory"), 2, Outcome.AGENT_ERROR, "limit of memory"),
        (ended(code=None, signal=9, timed_out=True), 2, Outcome.AGENT_TIMEOUT, "within 600 s (agent.limits.run_s)"),
    ],
    ids=["done", "no call", "exit code", "signal", "crash", "crash by signal", "memory", "time"],
)
def test_what_an_agent_did_is_its_outcome(seen, num_calls, outcome, message):
    record = AttemptRecord(
        workspace=Path(),
        stdout="",
        stderr="Traceback\nno key\n",
        exit_code=seen.code,
        timed_out=seen.timed_out,
        calls=[make_call("c", [1], [2])] * num_calls,
    )
    got, text = judge_agent(seen, record, run_s=600)
    assert got is outcome
    assert text == message if message is None else message in text


GOOD, HUNG, NONE = Verdict(reward=1.0), Verdict(reward=None, failure="hung"), Verdict(reward=None)


@pytest.mark.parametrize(
    ("before", "verdict", "control", "after"),
    [
        (Outcome.OK, GOOD, None, Outcome.OK),
        (Outcome.AGENT_TIMEOUT, GOOD, None, Outcome.AGENT_TIMEOUT),
        (Outcome.OK, NONE, None, Outcome.OK),
        (Outcome.OK, HUNG, None, Outcome.INFRA_ERROR),
        (Outcome.OK, HUNG, GOOD, Outcome.AGENT_ERROR),
        (Outcome.OK, HUNG, NONE, Outcome.AGENT_ERROR),
        (Outcome.AGENT_TIMEOUT, HUNG, GOOD, Outcome.AGENT_TIMEOUT),
        (Outcome.OK, HUNG, HUNG, Outcome.INFRA_ERROR),
        (Outcome.AGENT_TIMEOUT, HUNG, HUNG, Outcome.INFRA_ERROR),
    ],
)
def test_scoring_can_only_worsen_an_outcome(before, verdict, control, after):
    assert judge_score(before, None, verdict, control)[0] is after


def rollout(**changes):
    task = Task(id="t", input={"question": "why?", "number": 3, "list": [1, "ä"]}, hidden={"answer": "forty-two"})
    spec = RolloutSpec(**({"id": "r1", "run": "run", "task": task} | changes))
    return Rollout(spec=spec, state=RolloutState.RUNNING, attempt=1, created_s=0)


def test_an_agent_finds_its_model_its_task_and_nothing_hidden(tmp_path):
    folders = make_folders(tmp_path, rollout())
    environment = agent_environment(
        rollout(),
        gateway_url="http://127.0.0.1:7",
        agent_key="ma-key",
        folders=folders,
        mapped={"QUESTION": "Q: {question}", "N": "{number}", "LIST": "{list}", "JSON": '{"a": 1}'},
    )
    assert environment["OPENAI_BASE_URL"] == "http://127.0.0.1:7/v1"
    assert environment["ANTHROPIC_BASE_URL"] == environment["GOOGLE_GEMINI_BASE_URL"] == "http://127.0.0.1:7"
    keys = ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN", "GEMINI_API_KEY", "AGL_KEY")
    assert {environment[name] for name in keys} == {"ma-key"}
    events = "http://127.0.0.1:7/api/rollouts/r1/attempt/1/events"
    assert environment["MANEGE_EVENT_URL"] == environment["AGL_EVENT_URL"] == events
    assert environment["AGL_OPENAI_BASE_URL"] == "http://127.0.0.1:7/proxy/rollout/r1/attempt/1/mode/train/openai/v1"
    mapped = {name: environment[name] for name in ("QUESTION", "N", "LIST", "JSON")}
    assert mapped == {"QUESTION": "Q: why?", "N": "3", "LIST": '[1, "ä"]', "JSON": '{"a": 1}'}
    assert json.loads(folders.task_file.read_text()) == {"id": "t", "input": rollout().spec.task.input}
    assert "forty-two" not in json.dumps(environment)


def test_a_validation_rollout_has_its_own_path(tmp_path):
    spec = rollout(is_train=False)
    folders = make_folders(tmp_path, spec)
    environment = agent_environment(spec, gateway_url="http://h", agent_key="k", folders=folders, mapped={})
    assert "/mode/val/" in environment["AGL_OPENAI_BASE_URL"]


def test_an_unknown_field_is_named():
    with pytest.raises(HarnessError, match=r"agent.env.Q = '\{qestion\}'.*no field 'qestion'; it has a, b"):
        fill("{qestion}", {"b": 1, "a": 2}, name="Q")


def test_folders_are_private_fresh_and_below_the_run_folder(tmp_path):
    folders = make_folders(tmp_path, rollout(id="../../up"))
    (folders.workspace / "old").touch()
    assert folders.root.parent == tmp_path / "workspaces"
    assert folders.logs.parent.parent == tmp_path / "rollouts"
    assert stat.S_IMODE(folders.root.stat().st_mode) == 0o700
    assert list(make_folders(tmp_path, rollout(id="../../up")).workspace.iterdir()) == []


def test_locked_folders_are_removed_and_links_not_followed(tmp_path):
    folders = make_folders(tmp_path, rollout())
    kept = tmp_path / "kept"
    kept.touch()
    locked = folders.workspace / "locked"
    locked.mkdir()
    (locked / "file").touch()
    (folders.workspace / "link").symlink_to(kept)
    locked.chmod(0)
    folders.remove()
    assert not folders.root.exists()
    assert kept.exists()


def test_folders_that_a_killed_controller_left_are_removed_and_nothing_else(tmp_path):
    left = make_folders(tmp_path, rollout())
    (left.workspace / "file").touch()
    control = make_folders(tmp_path, rollout(), suffix=".control")
    foreign = tmp_path / "workspaces"
    (foreign / "notes").mkdir()
    (foreign / "project.1").mkdir()
    (foreign / "task.json").touch()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "task.json").touch()
    (foreign / "link.0").symlink_to(tmp_path / "elsewhere")
    remove_left_over(tmp_path)
    assert not left.root.exists()
    assert not control.root.exists()
    assert left.logs.exists()
    assert sorted(path.name for path in foreign.iterdir()) == ["link.0", "notes", "project.1", "task.json"]
    assert (tmp_path / "elsewhere" / "task.json").exists()


def test_what_is_kept_lies_beside_the_logs(tmp_path):
    for text in ("first", "second"):
        folders = make_folders(tmp_path, rollout())
        (folders.workspace / "file").write_text(text)
        folders.keep()
        assert (folders.logs / "left" / "workspace" / "file").read_text() == text
    assert not folders.root.exists()
