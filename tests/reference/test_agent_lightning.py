"""Agent Lightning 1.0.2 itself: its controller, an agent of its kind and its HTTP client, against our gateway.

It needs Python 3.12 and an environment of its own, made at first use beside the harnesses.
"""

import asyncio
import json
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from manege.gateway.app import create_app
from manege.gateway.server import GatewayServer, Server
from manege.harnesses.install import root_folder
from tests.chat_engine import ChatEngine
from tests.conftest import OPERATOR_KEY

pytestmark = [pytest.mark.anyio, pytest.mark.full, pytest.mark.timeout(600)]

HERE = Path(__file__).parent
VERSION = "1.0.2"


@pytest.fixture(scope="module")
def reference():
    """The folder with its programs."""
    folder = root_folder().parent / f"agentlightning-{VERSION}"
    if not (folder / "bin" / "agl-controller").exists():
        pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
        found = [shutil.which("python3.12"), *map(str, pyenv.glob("versions/3.12.*/bin/python"))]
        python = next((path for path in found if path), None)
        if python is None:
            pytest.skip("Agent Lightning 1.0.2 needs Python 3.12")
        subprocess.run([python, "-m", "venv", folder], check=True)
        subprocess.run([folder / "bin" / "pip", "install", "-q", f"agentlightning=={VERSION}"], check=True)
    return folder / "bin"


@pytest.fixture
async def gateway(store):
    """Bare, as its server is."""
    app = create_app(
        store=store, engine=None, renderer=None, operator_key=OPERATOR_KEY, model_name="m", context_limit=0
    )
    async with GatewayServer(app) as server:
        yield server


async def test_its_controller_client_and_agent_work_with_our_gateway(reference, gateway, store, tmp_path):
    env = {**os.environ, "PYTHONPATH": str(HERE), "PYTHONDONTWRITEBYTECODE": "1"}
    chat = ChatEngine()
    async with Server(chat.app) as engine:
        controller = await asyncio.create_subprocess_exec(
            reference / "agl-controller",
            "runner_type=local",
            f"agl_server.url={gateway.url}",
            f"agl_server.key={OPERATOR_KEY}",
            "local_runner.poll_interval=0.2",
            env=env,
            cwd=tmp_path,
        )
        try:
            trainer = await asyncio.create_subprocess_exec(
                *(reference / "python", HERE / "agl_trainer.py", gateway.url, OPERATOR_KEY, engine.url),
                env=env,
                stdout=asyncio.subprocess.PIPE,
            )
            told, _ = await asyncio.wait_for(trainer.communicate(), 120)
        finally:
            controller.terminate()
            await controller.wait()
    said = json.loads(told)
    assert list(said["states"].values()) == ["succeeded"] * 3
    calls = await store.calls(list(said["triplets"]))
    for rollout_id, (first, second, reward) in said["triplets"].items():
        assert reward == {"value": 0.5}
        assert [call.parent for call in calls[rollout_id]] == [None, calls[rollout_id][0].id]
        for triplet, call in zip((first, second), calls[rollout_id], strict=True):
            assert triplet["prompt_token_ids"] == call.prompt_ids_P.tolist()
            assert triplet["response_token_ids"] == call.response_ids_R.tolist()
            assert np.allclose(triplet["response_log_probs"], call.logprobs_R)
        known = first["prompt_token_ids"] + first["response_token_ids"]
        assert second["prompt_token_ids"][: len(known)] == known
    assert all(body["return_token_ids"] and body["temperature"] == 1.0 for body in chat.bodies)
