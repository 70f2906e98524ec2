"""Stored rollouts scored anew by `manege eval --rescore`, as a user types it, after a run of the real controller."""

import asyncio
import json
import sys

import pytest

from manege.cli.parts import FolderLock
from manege.client import Client
from manege.gateway.server import GatewayServer
from manege.store.sql import SqlStore
from manege.types import Outcome, RolloutState
from tests.conftest import OPERATOR_KEY, gateway_app
from tests.system.test_controller import UNSAFE, controlling, run_config, settle, spec

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(UNSAFE.unsafe, reason="agents cannot be isolated on this machine"),
]

AGENT = ["sh", "-c", 'echo "said $QUESTION"; echo "$QUESTION" > answer']
READS_WORKSPACE = ["sh", "-c", 'if test "$(cat "$MANEGE_WORKSPACE/answer")" = good; then echo 1; else echo 0; fi']
READS_OUTPUT = [
    "python",
    "-c",
    "import json, sys; print(float('said good' in json.load(sys.stdin)['attempt']['stdout']))",
]


async def collect(engine, folder, agent, scorer, questions, *, keep=True, **changes):
    """Rollouts, one per question, in a run folder that is then left."""
    folder.mkdir()
    store = await SqlStore.open(folder / "manege.db")
    try:
        async with GatewayServer(gateway_app(store, engine)) as gateway, Client(gateway.url, OPERATOR_KEY) as client:
            config = run_config(agent, scorer, **changes)
            await client.put_run("run", config.model_dump(mode="json"))
            async with controlling(client, folder, keep_workspaces=keep):
                specs = [spec(f"r{number}", input={"question": text}) for number, text in enumerate(questions)]
                return await settle(client, *specs)
    finally:
        await store.close()


async def manege(*arguments):
    """Exit code, lines of JSON, other output."""
    command = [sys.executable, "-c", "import sys; from manege.cli import main; sys.exit(main())", *map(str, arguments)]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
    stdout, stderr = await process.communicate()
    return process.returncode, stdout.decode(), stderr.decode()


async def rescored(folder, scorer=None, *more):
    overrides = [] if scorer is None else [f"scorer.run={json.dumps(scorer)}"]
    code, stdout, stderr = await manege("eval", "--rescore", folder, "--json", *more, *overrides)
    assert code == 0, stderr
    return {row["rollout"]: row for row in map(json.loads, stdout.splitlines())}, stderr


async def stored(folder):
    store = await SqlStore.open(folder / "manege.db")
    try:
        rollouts = (await store.list_rollouts(run="run")).rollouts
        return {each.spec.id: (each, await store.events(each.spec.id, event_type="rescored")) for each in rollouts}
    finally:
        await store.close()


async def test_kept_workspaces_are_scored_anew_and_the_verdict_before_stays_visible(engine, tmp_path):
    folder = tmp_path / "run"
    before = await collect(engine, folder, AGENT, ["sh", "-c", "echo 0"], ["good", "bad", "good"])
    assert [each.reward for each in before] == [0.0, 0.0, 0.0]
    rows, said = await rescored(folder, READS_WORKSPACE)
    assert {name: row["after"]["reward"] for name, row in rows.items()} == {"r0": 1.0, "r1": 0.0, "r2": 1.0}
    assert "3 of 3 rollouts scored, 2 changed; mean reward 0.000 before, 0.667 now" in said
    after = await stored(folder)
    assert {name: rollout.reward for name, (rollout, _) in after.items()} == {"r0": 1.0, "r1": 0.0, "r2": 1.0}
    (note,) = after["r0"][1]
    assert (note.data["before"]["reward"], note.data["after"]["reward"]) == (0.0, 1.0)
    again, _ = await rescored(folder)
    assert {row["after"]["reward"] for row in again.values()} == {0.0}
    _, shown, _ = await manege("show", folder, "r0")
    assert "before: ok 0.0, ok 1.0" in " ".join(shown.split())
    left = folder / "rollouts" / "r0" / "0" / "left" / "workspace"
    assert ([path.name for path in left.iterdir()], list((folder / "workspaces").iterdir())) == (["answer"], [])


async def test_without_workspaces_only_answers_are_scored_and_the_rest_is_said(engine, tmp_path):
    folder = tmp_path / "run"
    await collect(engine, folder, AGENT, ["sh", "-c", "echo 0"], ["good", "bad"], keep=False)
    rows, said = await rescored(folder, READS_OUTPUT)
    assert {row["after"]["reward"] for row in rows.values()} == {0.0}
    assert "0 of 2 rollouts scored" in said
    assert "2 skipped: its workspace was not kept" in said
    rows, _ = await rescored(folder, READS_OUTPUT, "--answers")
    assert {name: row["after"]["reward"] for name, row in rows.items()} == {"r0": 1.0, "r1": 0.0}


async def test_a_broken_scorer_costs_nothing_once_it_is_repaired(engine, tmp_path):
    folder = tmp_path / "run"
    before = await collect(engine, folder, AGENT, ["sh", "-c", "exit 1"], ["good", "bad"])
    assert {each.outcome for each in before} == {Outcome.INFRA_ERROR}
    rows, said = await rescored(folder)
    assert {row["after"]["outcome"] for row in rows.values()} == {"infra_error"}
    assert "the same on a pristine workspace" in said
    await rescored(folder, READS_WORKSPACE)
    after = {name: rollout for name, (rollout, _) in (await stored(folder)).items()}
    assert {name: (each.state, each.outcome, each.reward) for name, each in after.items()} == {
        "r0": (RolloutState.SUCCEEDED, Outcome.OK, 1.0),
        "r1": (RolloutState.SUCCEEDED, Outcome.OK, 0.0),
    }


async def test_an_attempt_without_an_end_of_its_agent_stays_as_it_is(engine, tmp_path):
    folder = tmp_path / "run"
    await collect(engine, folder, AGENT, READS_WORKSPACE, ["good"], setup=["sh", "-c", "exit 1"])
    rows, said = await rescored(folder)
    assert rows["r0"]["after"] == rows["r0"]["before"]
    assert "no agent came to its end: the setup failed with exit code 1" in said


async def test_a_run_in_use_is_left_alone(engine, tmp_path):
    folder = tmp_path / "run"
    await collect(engine, folder, AGENT, ["sh", "-c", "echo 0"], ["good"])
    with FolderLock(folder):
        code, _, stderr = await manege("eval", "--rescore", folder, f"scorer.run={json.dumps(READS_WORKSPACE)}")
    assert (code, "in use by another manege process" in stderr) == (2, True), stderr
    assert (await stored(folder))["r0"][0].reward == 0.0
