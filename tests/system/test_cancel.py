"""What a cancelled rollout's agent still gets: nothing from the moment on, and soon its end."""

import asyncio

import openai
import pytest

from manege.types import Outcome, RolloutState
from tests.system.test_controller import controlling, run_config, spec

pytestmark = pytest.mark.anyio

ASK = """
import json, os, urllib.error, urllib.request
body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "q"}], "max_tokens": 2}).encode()
headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
while True:
    try:
        urllib.request.urlopen(urllib.request.Request(url, body, headers))
        print("answered", flush=True)
    except urllib.error.HTTPError as error:
        print("refused", error.code, flush=True)
"""


async def test_a_cancelled_rollouts_key_is_dead_at_once_and_its_agent_soon(client, gateway, tmp_path):
    await client.put_run("run", run_config(["python", "-c", ASK]).to_json())
    key = gateway.services.auth.agent_key("r1", 0)
    printed = tmp_path / "rollouts" / "r1" / "0" / "stdout.txt"
    async with controlling(client, tmp_path), openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=key) as sdk:
        await client.create_rollouts([spec()])
        while not printed.exists() or "answered" not in printed.read_text():
            await asyncio.sleep(0.01)
        assert (await client.cancel("r1")).state is RolloutState.CANCELLED
        num_calls = len((await client.calls(["r1"]))["r1"])
        with pytest.raises(openai.ConflictError):
            await sdk.chat.completions.create(model="m", messages=[{"role": "user", "content": "q"}], max_tokens=2)
        async with asyncio.timeout(5):
            while (tmp_path / "workspaces" / "r1.0").exists():  # it goes when every process is dead
                await asyncio.sleep(0.01)
    assert len((await client.calls(["r1"]))["r1"]) == num_calls
    answered, _, refused = printed.read_text().partition("refused")
    assert set(answered.split()) == {"answered"}
    assert "answered" not in refused
    ended = await client.get_rollout("r1")
    assert (ended.outcome, ended.reward) == (Outcome.CANCELLED, None)
