"""`manege controller --runner kubernetes` as its users start it, stop it and lose it."""

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

import pytest

from manege.types import Outcome
from tests.conftest import OPERATOR_KEY
from tests.system.kubernetes.cluster import RESTRICTED
from tests.system.kubernetes.running import ended, jobs, run_config, settle, spec, under_way, waits_for

pytestmark = pytest.mark.anyio

MANEGE = Path(sys.executable).with_name("manege")


@pytest.fixture
def start(gateway, cluster, namespace, tmp_path):
    """A controller as a process, for the test's namespace."""

    @contextlib.asynccontextmanager
    async def start(*arguments, **config):
        key_file = tmp_path / "operator.key"
        key_file.write_text(OPERATOR_KEY)
        process = await asyncio.create_subprocess_exec(
            *(MANEGE, "controller", "--runner", "kubernetes", "--gateway", gateway.url),
            *("--key-file", key_file, "--folder", tmp_path / "controller", *arguments),
            env={**os.environ, "KUBECONFIG": str(cluster.kubeconfig(namespace=namespace, **config))},
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    return start


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "told to stop"])
async def test_a_controller_that_is_gone_and_comes_back_goes_on_with_its_jobs(
    start, client, kube, namespace, kubelet, tmp_path, number
):
    config = run_config(waits_for(tmp_path / "go", "open('answer.txt', 'w').write('done')"))
    await client.put_run("run", config.model_dump(mode="json"))
    async with start() as process:
        await client.create_rollouts([spec("r", max_attempts=2)])
        await under_way(client, kube, namespace, "r")
        process.send_signal(number)
        await process.wait()
    (tmp_path / "go").touch()
    async with start():
        (end,) = await ended(client, "r")
    assert (end.outcome, end.reward, end.attempt) == (Outcome.OK, 1.0, 0)
    assert len(await jobs(kube, namespace)) == 1


async def test_the_cluster_is_the_one_of_the_context_and_the_namespace_the_one_that_was_named(
    start, client, kube, namespace, kubelet, tmp_path
):
    async with start("--context", "mine", "--namespace", namespace, name="mine"):
        (end,) = await settle(client, run_config(), spec())
    assert (end.outcome, end.evidence["cluster"], end.evidence["namespace"]) == (Outcome.OK, "mine", namespace)


@pytest.mark.parametrize(
    ("arguments", "config", "message"),
    [
        (["--context", "nowhere"], {}, "Context 'nowhere' not found"),
        ([], {"token": RESTRICTED}, "403 Forbidden"),
        (["--jobs-per-minute", "0"], {}, "must be more than 0"),
    ],
    ids=["no such context", "no rights", "no jobs"],
)
async def test_a_controller_that_can_do_nothing_says_why(start, arguments, config, message):
    async with start(*arguments, **config) as process:
        assert message in (await process.stderr.read()).decode()
        assert await process.wait() == 2
