"""A store whose file system is full: refused in the caller's protocol, nothing half written, well again with space."""

import shutil
import subprocess

import httpx
import openai
import pytest

from manege.store.sql import SqlStore
from manege.types import RolloutSpec, RolloutState, Task
from tests.conftest import OPERATOR_KEY

pytestmark = pytest.mark.anyio


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 4 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"a file system of its own needs root: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.fixture
async def store(small_disk):
    opened = await SqlStore.open(small_disk / "store.db")
    yield opened
    await opened.close()


def fill(path):
    with path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


async def test_a_full_disk_is_503_to_agent_and_client_and_heals(small_disk, store, client, gateway):
    def spec(name):
        return RolloutSpec(id=name, run="run", task=Task(id="t", input={"text": "x" * 100_000}))

    await client.create_rollouts([spec("r")])
    (claim,) = await client.claim(controller="c", limit=1, lease_s=60)
    options = {"base_url": f"{gateway.url}/v1", "api_key": claim.agent_key, "max_retries": 0}
    messages = [{"role": "user", "content": "hi"}]
    async with openai.AsyncOpenAI(**options, http_client=httpx.AsyncClient(trust_env=False)) as agent:
        filler = small_disk / "filler"
        with pytest.raises(OSError, match="No space left"):
            fill(filler)
        assert shutil.disk_usage(small_disk).free == 0

        with pytest.raises(openai.InternalServerError, match="the disk is full; free some space") as caught:
            await agent.chat.completions.create(model="any", messages=messages, max_tokens=4)
        assert (caught.value.status_code, caught.value.type, caught.value.code) == (503, "server_error", "store_error")
        assert int(caught.value.response.headers["retry-after"]) > 0
        async with httpx.AsyncClient(base_url=gateway.url, trust_env=False) as http:
            headers = {"authorization": f"Bearer {OPERATOR_KEY}"}
            refused = await http.post("/api/rollouts", json=[{"input": 1, "rollout_id": "new"}], headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "store_error")

        # What was acknowledged can still be read, and what was not is not there.
        assert (await client.get_rollout("r")).state is RolloutState.RUNNING
        assert [rollout.spec.id for rollout in (await store.list_rollouts()).rollouts] == ["r"]
        assert (await client.calls(["r"]))["r"] == []

        filler.unlink()
        await agent.chat.completions.create(model="any", messages=messages)
        assert len((await client.calls(["r"]))["r"]) == 1
        await client.create_rollouts([spec("new")])
