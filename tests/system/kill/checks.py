"""What must be true of a training after its end, whatever was killed in it."""

import asyncio
import json
import socket
from urllib.parse import quote, unquote

from manege.cli.parts import FolderLock
from manege.store.reading import StoreReader
from manege.types import Outcome, RolloutState
from tests.system.kill.processes import until


def check(site, *, blamed=0):
    """`blamed`: rollouts whose agent or scorer was killed; all others must have ended as if nothing had happened."""
    until(lambda: not site.left_over(), "no process is left", timeout_s=5)
    for port in (site.port, site.engine_port):
        socket.create_server(("127.0.0.1", port)).close()
    assert list((site.agents / "workspaces").iterdir()) == []
    for folder in {site.run, site.data, site.agents}:
        with FolderLock(folder):
            pass
    assert not list((site.run / "checkpoints").glob(".*"))
    asyncio.run(_check_store(site, blamed))


async def _check_store(site, blamed):
    reader = await StoreReader.open(site.store)
    try:
        counts = await reader.count_rollouts()
        assert not counts[RolloutState.QUEUING] + counts[RolloutState.RUNNING], counts
        rollouts = (await reader.terminal(run="staged", after=0, limit=1000)).rollouts
        await _check_acknowledged(site, reader)
        _check_ends(site, rollouts, blamed)
        _check_groups(site, rollouts)
        calls = await reader.calls([rollout.spec.id for rollout in rollouts])
        _check_versions(site, [call for found in calls.values() for call in found])
    finally:
        await reader.close()


async def _check_acknowledged(site, reader):
    """What agents said that they had been answered, in whatever attempt, is there once."""
    num_acknowledged = 0
    for path in (site.agents / "rollouts").glob("*/*/stdout.txt"):
        rollout_id, attempt = unquote(path.parent.parent.name), int(path.parent.name)
        lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        calls = await reader.attempt_call_ids(rollout_id, attempt)
        notes = [event.data["text"] for event in await reader.events(rollout_id, event_type="note")]
        for line in lines:
            num_acknowledged += 1
            if "call" in line:
                assert calls.count(line["call"].removeprefix("chatcmpl-")) == 1, (path, line)
            else:
                assert notes.count(line["event"]) == 1, (path, line)
    assert num_acknowledged >= 4


def _check_ends(site, rollouts, blamed):
    """Every reward of a scorer whose attempt counted is there, and nobody is blamed for what others did."""
    unclean = []
    for rollout in rollouts:
        key = (rollout.spec.id, rollout.attempt)
        if rollout.outcome is Outcome.OK:
            [said] = (_logs(site, rollout) / "scorer.txt").read_text().splitlines()
            assert json.loads(said) == {"reward": rollout.reward}, rollout
        if rollout.outcome is not Outcome.OK or rollout.evidence["exit_code"] != 0:
            unclean.append((key, rollout.outcome, rollout.message, rollout.evidence))
    assert len(unclean) == blamed, unclean


def _logs(site, rollout):
    return site.agents / "rollouts" / quote(rollout.spec.id, safe="").replace(".", "%2E") / str(rollout.attempt)


def _check_groups(site, rollouts):
    """Each step once; each group once, and every group that ended."""
    steps = site.rows()
    assert [row["step"] for row in steps] == list(range(1, len(steps) + 1))
    trained = [group for row in steps for group in row["groups"]]
    assert sorted(trained) == sorted({rollout.spec.group for rollout in rollouts})


def _check_versions(site, calls):
    """They only grow: a call that began after another one had ended was not sampled by older weights."""
    published = [row["policy_version"] for row in site.rows()]
    assert published == sorted(set(published)), published
    assert all(call.spans for call in calls)
    for call in calls:
        versions = [span.version for span in call.spans]
        assert versions == sorted(set(versions)), call
        before = [other.spans[-1].version for other in calls if other.ended_s < call.created_s]
        assert max(before, default=0) <= versions[0], (call, before)
