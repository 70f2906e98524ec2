"""Two attempts, the address of the first one's agent, and a gateway that can be killed."""

import httpx
import pytest

from manege.engine.scripted import ScriptedEngine
from manege.engine.server import engine_app
from manege.gateway.server import Server
from manege.model.folder import open_folder
from manege.rendering.select import renderer_for
from tests.conftest import OPERATOR_KEY, TINY_MODEL
from tests.system.handed.agents import WAYS, WORDS, claimed, sandbox
from tests.system.kill.processes import Part
from tests.system.kill.site import free_port


@pytest.fixture
async def engine(request):
    """A test may say how long it takes for a token."""
    ids = renderer_for(open_folder(str(TINY_MODEL))).encode(WORDS)
    delay_s = getattr(request, "param", 0)
    made = ScriptedEngine(lambda _: ids if delay_s else ids[:5], token_delay_s=delay_s)
    yield made
    await made.close()


@pytest.fixture
async def claims(client):
    return await claimed(client, "r1", "r2")


@pytest.fixture(params=WAYS)
async def url(request, client, claims):
    """Of the agent of r1."""
    async with sandbox(client, claims[0], request.param) as found:
        yield found


@pytest.fixture
async def http(url):
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=30) as opened:
        yield opened


@pytest.fixture
async def engine_url(engine):
    async with Server(engine_app(engine, encode=list, decode=str)) as server:
        yield server.url


@pytest.fixture
def process(tmp_path, engine_url):
    """A gateway that can be killed, and its address."""
    port, folder = free_port(), tmp_path / "gateway"
    words = ["gateway", "--model", TINY_MODEL, "--engine", engine_url, "--port", port, "--folder", folder]
    part = Part([*words, "--operator-key", OPERATOR_KEY], tmp_path / "log.txt", ready="gateway http")
    try:
        part.start()
        part.wait_until_ready()
        yield part, f"http://127.0.0.1:{port}"
    finally:
        part.end()
