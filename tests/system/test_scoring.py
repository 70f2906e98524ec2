"""Scorers in their own sandbox: what they see, what they may do, what of their answers counts; a real controller."""

import asyncio
import contextlib
import socket

import pytest

from manege.config import ControllerConfig, SandboxConfig, parse_config
from manege.controller.loop import Controller
from manege.types import Outcome
from tests.system.test_controller import QUESTION, UNSAFE, controlling, run_config, run_one, settle, spec

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(UNSAFE.unsafe, reason="agents cannot be isolated on this machine"),
]


def sh(script):
    return ["sh", "-c", script]


def py(script):
    return ["python", "-c", script]


async def scored(client, tmp_path, agent, scorer, *, max_attempts=1, input=QUESTION, **changes):
    """Settings of the section `scorer` are among the changes."""
    more = {name: changes.pop(name) for name in ("files", "restore", "readable", "network") if name in changes}
    config = run_config(agent, scorer, **changes)
    tree = config.model_dump(mode="json")
    tree["scorer"] |= more
    return await run_one(client, tmp_path, parse_config(tree), max_attempts=max_attempts, input=input)


async def test_a_scorer_sees_the_workspace_and_nothing_else_of_the_agent(client, tmp_path):
    agent = sh('echo mine > file; echo planted > "$HOME/file"; echo planted > "$TMPDIR/file"')
    scorer = sh(
        'cd "$MANEGE_WORKSPACE" && test "$(cat file)" = mine && ! grep -rs planted "$HOME" "$TMPDIR" '
        f"&& ! ls {tmp_path}/rollouts && ! test -r {tmp_path}/store.db "
        '&& ! ls "$MANEGE_WORKSPACE/.." | grep task && echo 1'
    )
    rollout = await scored(client, tmp_path, agent, scorer)
    assert (rollout.outcome, rollout.reward) == (Outcome.OK, 1.0), rollout.message


async def test_what_a_scorer_writes_is_stored_nowhere(client, tmp_path):
    config = run_config(sh("echo mine > file"), sh('cd "$MANEGE_WORKSPACE" && rm file && echo new > other && echo 1'))
    await client.put_run("run", config.model_dump(mode="json"))
    async with controlling(client, tmp_path, keep_workspaces=True):
        (rollout,) = await settle(client, spec())
    assert rollout.reward == 1.0, rollout.message
    left = tmp_path / "rollouts" / "r1" / "0" / "left"
    assert [path.name for path in (left / "workspace").iterdir()] == ["file"]
    assert not (left / "scorer").exists()


async def test_hidden_files_are_there_for_the_scorer_alone(client, tmp_path):
    agent = sh("ls -R . > seen; mkdir tests; echo mine > tests/hidden.txt")
    scorer = sh(
        'cd "$MANEGE_WORKSPACE" && ! grep hidden seen && '
        'test "$(cat tests/hidden.txt)" = "secret: What is the pin?" && echo 1'
    )
    rollout = await scored(client, tmp_path, agent, scorer, files={"tests/hidden.txt": "{given}: {question}"})
    assert rollout.reward == 1.0, rollout.message


async def test_what_the_setup_made_is_restored_where_the_run_says_so(client, tmp_path):
    setup = sh("mkdir tests lib; echo test > tests/a; echo test > tests/b; echo lib > lib/c")
    agent = sh(
        "echo bad > tests/a; rm tests/b; echo bad > tests/conftest; echo good > lib/c; "
        "mkdir tests/more; ln -s / tests/more/root"
    )
    scorer = sh(
        'cd "$MANEGE_WORKSPACE" && '
        'test "$(echo $(ls tests lib) $(cat tests/a tests/b lib/c))" = "lib: c tests: a b test test good" && echo 1'
    )
    rollout = await scored(client, tmp_path, agent, scorer, setup=setup, restore=["tests/**"])
    assert rollout.reward == 1.0, rollout.message


@pytest.mark.parametrize("network", [False, True])
async def test_a_scorer_has_no_network_unless_the_run_gives_it(client, tmp_path, network):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connect = f"import socket; socket.create_connection(('127.0.0.1', {listener.getsockname()[1]}), 5); print(1)"
        rollout = await scored(client, tmp_path, "nothing", py(connect), network=network)
    assert rollout.reward == (1.0 if network else None), rollout.message


@pytest.mark.parametrize("is_named", [False, True])
async def test_a_scorer_reads_what_the_run_names_for_it(client, tmp_path, is_named):
    data = tmp_path / "data"
    data.write_text("judge's")
    read = sh(f'test "$(cat {data})" = "judge\'s" && echo 1')
    rollout = await scored(client, tmp_path / "run", "nothing", read, readable=[str(data)] if is_named else [])
    assert rollout.reward == (1.0 if is_named else None), rollout.message


@pytest.mark.parametrize(
    "breaks",
    [
        "echo NaN",
        "echo good",
        "true",
        "sleep 60",
        "exit 3",
        "kill -9 $$",
        'echo \'{"reward": "1"}\'',
        "head -c 40000000 /dev/zero",
    ],
    ids=["NaN", "text", "nothing", "hang", "crash", "killed", "number in quotes", "flood"],
)
async def test_a_scorer_that_breaks_on_this_workspace_alone_gives_nothing(client, tmp_path, breaks):
    scorer = sh(f'if test -e "$MANEGE_WORKSPACE/bad"; then {breaks}; else echo 1; fi')
    rollout = await scored(client, tmp_path, sh("touch bad"), scorer, limits={"score_s": 2})
    assert (rollout.outcome, rollout.reward) == (Outcome.AGENT_ERROR, 0.0), rollout.message
    assert "not so on a pristine workspace" in rollout.message


async def test_only_the_scoring_is_tried_again_when_the_scorer_fails_everywhere(client, tmp_path):
    """The agent's one run is counted by its model calls; the scorer succeeds when it is asked for the third time."""
    allowed = tmp_path / "count"
    allowed.write_text("")
    scorer = py(
        f"import pathlib, sys; count = pathlib.Path({str(allowed)!r}); tries = len(count.read_text()); "
        "count.write_text('x' * (tries + 1)); print(1 if tries >= 2 else 'broken')"
    )
    config = run_config("ask_once", scorer, controller={"retry_s": 0})
    await client.put_run("run", config.model_dump(mode="json"))
    # Outside of any sandbox, since the scorer remembers something here.
    off = SandboxConfig(mode="off", unsafe=True)
    controller = Controller(client, name="c", folder=tmp_path / "run", config=ControllerConfig(), sandbox=off)
    task = asyncio.create_task(controller.run())
    (rollout,) = await settle(client, spec(max_attempts=3))
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert (rollout.outcome, rollout.reward, rollout.attempt) == (Outcome.OK, 1.0, 0), rollout.message
    assert (len(allowed.read_text()), rollout.evidence["num_calls"]) == (3, 1)


async def test_a_scorer_that_never_works_ends_the_rollout_without_another_run_of_the_agent(client, tmp_path):
    config = run_config("ask_once", "score_crash", controller={"retry_s": 0})
    rollout = await run_one(client, tmp_path, config, max_attempts=3)
    assert (rollout.outcome, rollout.reward, rollout.attempt) == (Outcome.INFRA_ERROR, None, 0)
    assert "the same on a pristine workspace" in rollout.message


JUDGE = """
import os, subprocess, sys
done = subprocess.run([sys.executable, "-c", AGENTS], cwd=os.environ["MANEGE_WORKSPACE"], check=False)
os.write(int(sys.argv[1]), b"0.25")
"""


@pytest.mark.parametrize(
    "agents",
    [
        "print(1)",
        "import os; os.write(3, b'1')",
        "import os, time; print(1, flush=True); os.fork() or time.sleep(60)",
        "open(f'/proc/{__import__(\"os\").getppid()}/fd/3', 'w').write('1')",
        "import os; os.system('echo 1 >&3'); os._exit(0)",
    ],
    ids=["printed", "written", "printed for ever", "opened through proc", "by a shell"],
)
async def test_programs_that_a_scorer_starts_cannot_answer_in_its_place(client, tmp_path, agents):
    judge = ["python", "-c", JUDGE.replace("AGENTS", repr(agents)), "{verdict}"]
    rollout = await scored(client, tmp_path, "nothing", judge)
    assert (rollout.outcome, rollout.reward) == (Outcome.OK, 0.25), rollout.message


async def test_a_scorer_may_say_more_than_a_number(client, tmp_path):
    says = "import json, sys; record = json.load(sys.stdin); call, = record['attempt']['calls']; "
    says += "print(json.dumps({'reward': 0.5, 'calls': {call['id']: 2}, 'message': 'half of it'}))"
    rollout = await scored(client, tmp_path, "ask_once", py(says))
    assert (rollout.reward, rollout.message) == (0.5, "half of it")
    (earned,) = await client.events("r1", "call_reward")
    assert earned.data["value"] == 2.0
