"""The controller with a real gateway, real agents and real scorers."""

import asyncio
import contextlib
import json
import sys
import time
from argparse import Namespace

import pytest

from manege.cli.arguments import read_run
from manege.client import Client
from manege.config import ControllerConfig, RunConfig, SandboxConfig
from manege.controller.loop import Controller
from manege.errors import EngineError, HarnessError, SandboxError, UnauthorizedError
from manege.sandbox.probe import probe
from manege.types import Outcome, RolloutSpec, RolloutState, Task
from tests.conftest import OPERATOR_KEY
from tests.controllers import beside
from tests.ordinary_user import run_as_nobody
from tests.system.kill.processes import working_in

pytestmark = pytest.mark.anyio

UNSAFE = SandboxConfig(unsafe=not probe().isolates)
QUESTION = {"question": "What is the pin?"}


def run_config(agent="nothing", scorer="score_one", *, limits=None, **changes):
    """A run whose programs are functions of tests/programs.py, or commands."""

    def program(name):
        return f"tests.programs:{name}" if isinstance(name, str) else name

    setup = changes.pop("setup", None)
    return RunConfig.model_validate(
        {
            "name": "run",
            "tasks": {"train": "tasks.jsonl"},
            "agent": {
                "run": program(agent),
                "env": {"QUESTION": "{question}"},
                "setup": program(setup) if setup else None,
                "limits": {"run_s": 20, "score_s": 20} | (limits or {}),
            },
            "scorer": {"run": program(scorer)},
            **changes,
        }
    )


@contextlib.asynccontextmanager
async def controlling(client, folder, *, name="controller", **changes):
    config = ControllerConfig(**({"slots": 8} | changes))
    controller = Controller(client, name=name, folder=folder, config=config, sandbox=UNSAFE)
    async with beside(controller):
        yield controller


def spec(name="r1", **changes):
    task = Task(id="t", input=changes.pop("input", QUESTION), hidden=changes.pop("hidden", {"given": "secret"}))
    return RolloutSpec(**({"id": name, "run": "run", "task": task, "max_attempts": 1} | changes))


async def settle(client, *specs):
    """Create rollouts and wait for their end."""
    await client.create_rollouts(list(specs))
    ended, cursor = {}, 0
    while len(ended) < len(specs):
        page = await client.terminal(run="run", after=cursor, wait_s=30)
        cursor = page.cursor
        ended |= {rollout.spec.id: rollout for rollout in page.rollouts}
    return [ended[wanted.id] for wanted in specs]


async def run_one(client, folder, config, **changes):
    await client.put_run("run", config.model_dump(mode="json"))
    async with controlling(client, folder):
        (rollout,) = await settle(client, spec(**changes))
    return rollout


async def test_an_agent_is_set_up_run_and_scored_on_what_the_gateway_recorded(client, tmp_path):
    config = run_config("ask_once", "score_record", setup="prepare")
    rollout = await run_one(client, tmp_path, config)
    assert (rollout.outcome, rollout.reward, rollout.message) == (Outcome.OK, 1.0, None)
    evidence = rollout.evidence
    assert (evidence["exit_code"], evidence["num_calls"]) == (0, 1)
    assert set(evidence["seconds"]) == {"setup", "run", "score"}
    assert (evidence["sandbox"], evidence["not_isolated"]) == (list(probe().names()), list(probe().missing()))
    logs = tmp_path / "rollouts" / "r1" / "0"
    assert (logs / "stdout.txt").read_text() == evidence["stdout_tail"] != ""
    assert list((tmp_path / "workspaces").iterdir()) == []


@pytest.mark.parametrize(
    ("agent", "scorer", "limits", "outcome", "reward", "message"),
    [
        ("nothing", "score_one", {}, Outcome.OK, 1.0, None),
        ("nothing", "score_files", {}, Outcome.OK, 0.0, None),
        ("ask_once", "score_nothing", {}, Outcome.OK, None, None),
        ("ask_and_fail", "score_one", {}, Outcome.OK, 1.0, "exit code 3"),
        ("raise_error", "score_nothing", {}, Outcome.AGENT_ERROR, 0.0, "crashed before its first model call"),
        ("raise_error", "score_one", {}, Outcome.AGENT_ERROR, 1.0, "crashed before its first model call"),
        ("exhaust_memory", "score_nothing", {}, Outcome.AGENT_ERROR, 0.0, "limit of memory"),
        ("ask_and_hang", "score_nothing", {"run_s": 1}, Outcome.AGENT_TIMEOUT, 0.0, "within 1 s"),
        ("ask_and_hang", "score_files", {"run_s": 1}, Outcome.AGENT_TIMEOUT, 1.0, "within 1 s"),
        ("leave_daemons", "score_files", {}, Outcome.OK, 3.0, None),
        ("poison", "score_unless_poisoned", {"score_s": 1}, Outcome.AGENT_ERROR, 0.0, "not so on a pristine workspace"),
        ("nothing", "score_crash", {}, Outcome.INFRA_ERROR, None, "the same on a pristine workspace"),
        (["sh", "-c", "exit 0"], ["sh", "-c", "echo noise; echo 0.5"], {}, Outcome.OK, 0.5, None),
        (["sh", "-c", "exit 4"], ["sh", "-c", "echo null"], {}, Outcome.AGENT_ERROR, 0.0, "exit code 4"),
        ("nothing", ["sh", "-c", "echo good"], {}, Outcome.INFRA_ERROR, None, "verdict is 'good'"),
        ("nothing", ["true"], {}, Outcome.INFRA_ERROR, None, "ended without a verdict"),
        ("nothing", ["sh", "-c", "echo 1; exit 2"], {}, Outcome.INFRA_ERROR, None, "exit code 2"),
        (["no-such-agent"], "score_one", {}, Outcome.INFRA_ERROR, None, "'no-such-agent' does not exist"),
    ],
)
async def test_the_outcome_table(client, tmp_path, agent, scorer, limits, outcome, reward, message):
    rollout = await run_one(client, tmp_path, run_config(agent, scorer, limits=limits))
    assert (rollout.outcome, rollout.reward) == (outcome, reward), rollout.message
    assert rollout.message is None if message is None else message in rollout.message


@pytest.mark.parametrize("nonsense", ["text", "nan", "infinity", "bool", "object", "list"])
async def test_a_nonsense_reward_is_refused_and_shown(client, tmp_path, nonsense):
    config = run_config("nothing", "score_nonsense")
    rollout = await run_one(client, tmp_path, config, input=QUESTION | {"nonsense": nonsense})
    assert (rollout.outcome, rollout.reward) == (Outcome.INFRA_ERROR, None)
    assert "want a finite number or null" in rollout.message


async def test_a_scorer_command_gets_the_record_on_its_input(client, tmp_path):
    reads = "import json, sys; record = json.load(sys.stdin); print(json.dumps(record), file=sys.stderr);"
    reads += "print(len(record['attempt']['calls']))"
    rollout = await run_one(client, tmp_path, run_config("ask_once", ["python", "-c", reads]))
    record = json.loads((tmp_path / "rollouts" / "r1" / "0" / "scorer_errors.txt").read_text())
    assert rollout.reward == 1.0
    assert record["task"] == {"id": "t", "input": QUESTION, "hidden": {"given": "secret"}}
    assert record["attempt"]["stdout"].strip() == record["attempt"]["calls"][0]["reply"]["content"]


async def test_setup_may_be_a_command_that_sees_the_hidden_task_which_the_agent_does_not(client, tmp_path):
    setup = ["sh", "-c", 'cp "$MANEGE_TASK_FILE" seen.json']
    agent = ["sh", "-c", 'cat seen.json; cat "$MANEGE_TASK_FILE"; ls "$(dirname "$MANEGE_TASK_FILE")"']
    await run_one(client, tmp_path, run_config(agent, setup=setup))
    seen, own = (tmp_path / "rollouts" / "r1" / "0" / "stdout.txt").read_text().split("}}", 1)
    assert "secret" in seen
    assert "secret" not in own
    assert "hidden.json" not in own


async def test_a_failed_setup_is_not_the_agents_fault(client, tmp_path):
    rollout = await run_one(client, tmp_path, run_config(setup="prepare_badly"), max_attempts=2)
    assert (rollout.outcome, rollout.reward, rollout.attempt) == (Outcome.INFRA_ERROR, None, 1)
    assert "no such image for t" in rollout.message


async def test_an_agent_may_post_its_own_reward_where_the_rollout_says_so(client, tmp_path):
    rollout = await run_one(client, tmp_path, run_config("post_reward", "score_crash"), reward_from="agent")
    assert (rollout.outcome, rollout.reward) == (Outcome.OK, 0.25), rollout.message


async def test_a_rollout_of_a_run_without_config_says_so(client, tmp_path):
    await client.put_run("run", {})
    async with controlling(client, tmp_path):
        (rollout,) = await settle(client, spec())
    assert rollout.outcome is Outcome.INFRA_ERROR
    assert "config of run 'run'" in rollout.message


async def test_one_failing_rollout_leaves_the_others_alone(client, tmp_path):
    config = run_config(
        ["sh", "-c", 'test "$QUESTION" != bad'], setup=["sh", "-c", "! grep -q worse $MANEGE_TASK_FILE"]
    )
    await client.put_run("run", config.model_dump(mode="json"))
    specs = [
        spec(f"r{index}", input={"question": question}) for index, question in enumerate(["good", "bad", "worse"] * 4)
    ]
    async with controlling(client, tmp_path):
        ended = await settle(client, *specs)
    assert [rollout.outcome for rollout in ended] == [Outcome.OK, Outcome.AGENT_ERROR, Outcome.INFRA_ERROR] * 4


@pytest.mark.parametrize(
    ("agent", "outcome", "message"),
    [
        ("ask_once", Outcome.INFRA_ERROR, "the engine failed the agent's last model call"),
        ("ask_until_killed", Outcome.INFRA_ERROR, "the engine failed the agent's last model call"),
        ("ask_and_ignore", Outcome.INFRA_ERROR, "the engine failed the agent's last model call"),
        ("raise_error", Outcome.AGENT_ERROR, "crashed before its first model call"),
    ],
)
async def test_an_agent_is_not_blamed_for_an_engine_that_fails(client, engine, tmp_path, agent, outcome, message):
    await engine.close()
    rollout = await run_one(client, tmp_path, run_config(agent, limits={"run_s": 2}))
    assert (rollout.outcome, message in rollout.message) == (outcome, True), rollout.message
    assert ("exit_code" in rollout.evidence, "score" in rollout.evidence["seconds"]) == (True, outcome.counts)


def failing_once():
    failures = [EngineError("out of memory")]

    def reply(_prompt_ids):
        if failures:
            raise failures.pop()
        return list(b"abc")

    return reply


@pytest.mark.parametrize("engine", [failing_once()], indirect=True, ids=["fails once"])
async def test_an_agent_that_fails_after_its_calls_were_answered_again_is_to_blame(client, tmp_path):
    rollout = await run_one(client, tmp_path, run_config("ask_twice_and_fail"))
    assert (rollout.outcome, rollout.reward) == (Outcome.OK, 1.0), rollout.message
    assert [event.data["message"] for event in await client.events("r1", "call.error")] == ["out of memory"]


async def wait_for(path, seconds=20):
    deadline_s = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline_s, path
        await asyncio.sleep(0.01)


HANG = ["sh", "-c", "echo $$ > pid; (setsid sh -c 'echo $$ > daemon; sleep 60' &); sleep 60"]


async def hanging(client, tmp_path, **changes):
    """Start a rollout that does not end, and return when all its processes are there."""
    await client.put_run("run", run_config(HANG).model_dump(mode="json"))
    await client.create_rollouts([spec(**changes)])
    workspace = tmp_path / "workspaces" / "r1.0" / "workspace"
    for name in ("pid", "daemon"):
        await wait_for(workspace / name)
        while not (workspace / name).read_text():
            await asyncio.sleep(0.01)
    assert len(working_in(tmp_path)[workspace]) == 4


async def test_a_cancelled_rollouts_agent_is_dead_within_five_seconds(client, tmp_path):
    async with controlling(client, tmp_path, lease_s=4):
        await hanging(client, tmp_path)
        assert (await client.cancel("r1")).state is RolloutState.CANCELLED
        began_s = time.monotonic()
        while working_in(tmp_path):
            assert time.monotonic() - began_s < 5
            await asyncio.sleep(0.01)


async def test_a_stopped_controller_kills_its_agents_and_another_one_goes_on(client, tmp_path):
    async with controlling(client, tmp_path, lease_s=60):
        await hanging(client, tmp_path)
    assert not working_in(tmp_path)
    assert (await client.get_rollout("r1")).state is RolloutState.QUEUING
    await client.put_run("run", run_config("nothing").model_dump(mode="json"))
    async with controlling(client, tmp_path, name="another"):
        page = await client.terminal(run="run", after=0, wait_s=30)
    (rollout,) = page.rollouts
    assert (rollout.attempt, rollout.outcome, rollout.reward) == (1, Outcome.OK, 1.0)


CONTROLLER = """
import asyncio, sys
from pathlib import Path
from manege.client import Client
from manege.config import ControllerConfig, SandboxConfig
from manege.controller.loop import Controller

async def main(url, key, folder, unsafe):
    async with Client(url, key) as client:
        sandbox = SandboxConfig(unsafe=bool(unsafe))
        await Controller(client, name="c", folder=Path(folder), config=ControllerConfig(), sandbox=sandbox).run()

asyncio.run(main(*sys.argv[1:]))
"""


async def test_a_killed_controllers_agents_die_and_the_next_one_removes_their_workspaces(client, gateway, tmp_path):
    arguments = [gateway.url, OPERATOR_KEY, str(tmp_path), "yes" if UNSAFE.unsafe else ""]
    killed = await asyncio.create_subprocess_exec(sys.executable, "-c", CONTROLLER, *arguments)
    await hanging(client, tmp_path)
    killed.kill()
    await killed.wait()
    while working_in(tmp_path):
        await asyncio.sleep(0.01)
    (left,) = (tmp_path / "workspaces").iterdir()
    async with controlling(client, tmp_path, name="next"):
        while left.exists():
            await asyncio.sleep(0.01)


async def test_no_more_attempts_run_than_there_are_slots(client, tmp_path):
    agent = ["sh", "-c", "echo $(date +%s%N) start; sleep 0.2; echo $(date +%s%N) end"]
    await client.put_run("run", run_config(agent).model_dump(mode="json"))
    specs = [spec(f"r{index}") for index in range(6)]
    async with controlling(client, tmp_path, slots=2):
        await settle(client, *specs)
    outputs = [(tmp_path / "rollouts" / each.id / "0" / "stdout.txt").read_text() for each in specs]
    lines = [line.split() for output in outputs for line in output.splitlines()]
    running = most = 0
    for _, what in sorted(lines):
        running += 1 if what == "start" else -1
        most = max(most, running)
    assert most == 2


async def test_programs_are_checked_before_a_run_begins(client, tmp_path):
    async with controlling(client, tmp_path) as controller:
        await controller.prepare(run_config("ask_once", "score_record", setup="prepare"))
        with pytest.raises(HarnessError, match="agent: command 'no-such-agent' does not exist"):
            await controller.prepare(run_config(["no-such-agent"]))
        with pytest.raises(HarnessError, match=r"scorer.*has no function 'no_such_scorer'"):
            await controller.prepare(run_config(scorer="no_such_scorer"))


async def test_agents_that_cannot_be_isolated_are_refused(client, tmp_path):
    with pytest.raises(SandboxError, match="--unsafe"):
        Controller(client, name="c", folder=tmp_path, config=ControllerConfig(), sandbox=SandboxConfig(mode="off"))


async def test_a_run_that_wants_strict_isolation_is_not_carried_out_without(client, tmp_path):
    """By a controller that was started for less."""
    run = run_config("nothing").model_dump(mode="json") | {"sandbox": {"mode": "strict"}}
    await client.put_run("run", run)
    off = SandboxConfig(mode="off", unsafe=True)
    controller = Controller(client, name="c", folder=tmp_path, config=ControllerConfig(), sandbox=off)
    running = asyncio.create_task(controller.run())
    (rollout,) = await settle(client, spec(max_attempts=1))
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    assert rollout.outcome is Outcome.INFRA_ERROR
    assert "strict" in rollout.message


async def test_a_wrong_key_ends_the_controller_with_its_message(gateway, tmp_path):
    async with Client(gateway.url, "mo-wrong") as stranger:
        controller = Controller(stranger, name="c", folder=tmp_path, config=ControllerConfig(), sandbox=UNSAFE)
        with pytest.raises(UnauthorizedError):
            await controller.run()


RUN_FILE = """
name = "run"
tasks = { train = "tasks.jsonl" }
agent = { run = ["python3", "agent.py", "{name}"], setup = ["sh", "setup.sh"] }
scorer = { run = ["python3", "tools/scorer.py"] }
sandbox = { readable = ["prompt.txt"] }
"""
AGENT = """
import json, sys
from pathlib import Path
import helper, package.part

def look(path):
    try:
        return sorted(entry.name for entry in path.iterdir()) if path.is_dir() else path.read_text()
    except (FileNotFoundError, PermissionError):
        return "denied"

here = Path(__file__).parent
names = ("prompt.txt", "tasks.jsonl", ".env", "run.toml", "link.txt", "runs/run/key")
seen = {name: look(here / name) for name in names}
print(json.dumps(seen | {"argv": sys.argv[1:], "imported": helper.VALUE + package.part.VALUE}))
"""


async def test_programs_beside_the_run_file_work_as_users_write_them(client, tmp_path):
    """The agent may read its own code, and what is named for it, in a project that holds secrets and the run folder."""
    project = tmp_path / "project"
    files = {
        "run.toml": RUN_FILE,
        "agent.py": AGENT,
        "helper.py": "VALUE = 1",
        "package/__init__.py": "",
        "package/part.py": "VALUE = 2",
        "tools/scorer.py": "import judge\nprint(judge.reward())",
        "tools/judge.py": "import json, sys\nreward = lambda: 0.5 if json.load(sys.stdin)['attempt'] else None",
        "setup.sh": "touch prepared",
        "prompt.txt": "be good",
        "tasks.jsonl": "answers",
        ".env": "secret",
        "runs/run/key": "secret",
    }
    for name, text in files.items():
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(text)
    (project / "link.txt").symlink_to(project / ".env")
    arguments = Namespace(run_file=project / "run.toml", overrides=["sandbox.mode=auto"], unsafe=False, quick=False)
    config = read_run(arguments)
    run_folder = project / "runs" / "run"
    await client.put_run("run", config.model_dump(mode="json"))
    controller = Controller(
        client, name="c", folder=run_folder, config=ControllerConfig(keep_workspaces=True), sandbox=config.sandbox
    )
    task = asyncio.create_task(controller.run())
    (rollout,) = await settle(client, spec())
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert (rollout.outcome, rollout.reward, rollout.message) == (Outcome.OK, 0.5, None), rollout.evidence
    seen = json.loads(rollout.evidence["stdout_tail"])
    assert (seen.pop("argv"), seen.pop("imported"), seen.pop("prompt.txt")) == (["{name}"], 3, "be good")
    assert set(seen.values()) == {"denied"}, seen
    assert (run_folder / "rollouts" / "r1" / "0" / "left" / "workspace" / "prepared").exists()


def test_agents_also_work_when_manege_runs_as_an_ordinary_user():
    tests = "set_up_run_and_scored or beside_the_run_file or cancelled_rollouts_agent"
    output = run_as_nobody(__file__, tests)
    assert "3 passed" in output, output
