"""Fixtures shared by tests: a store in a file, and a real gateway on a real socket with the scripted engine."""

import os
from pathlib import Path

import pytest

from manege.client import Client
from manege.engine.scripted import ScriptedEngine, hashed_reply
from manege.engine.threads import calm_threads
from manege.gateway.app import create_app
from manege.gateway.server import GatewayServer
from manege.model.folder import open_folder
from manege.rendering.select import renderer_for
from manege.sandbox.launcher import Launcher
from manege.store.sql import SqlStore
from tests import postgres

# Before any test imports torch: threads that spin make a shared machine ten times slower.
calm_threads()

TINY_MODEL = Path(__file__).parent / "tiny" / "model"
OPERATOR_KEY = "mo-test-operator"


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture(scope="session")
def postgres_server():
    """The URL of a PostgreSQL server."""
    if given := os.environ.get("MANEGE_TEST_POSTGRES"):
        yield given
    elif postgres.program("initdb") is None:
        pytest.skip("PostgreSQL is not installed here (Debian: apt-get install postgresql)")
    else:
        with postgres.server() as server:
            yield server.url


@pytest.fixture
def postgres_url(postgres_server):
    """Of an empty database."""
    with postgres.schema(postgres_server) as url:
        yield url


@pytest.fixture(scope="session")
def vllm_url(tmp_path_factory):
    """A vLLM server of the tiny model; a test has to give it the weights that it needs, and a version of its own."""
    # It imports torch.
    from tests.vllm.serving import ROOMY, served

    with served(TINY_MODEL, tmp_path_factory.mktemp("vllm"), weights="transfer", **ROOMY) as url:
        yield url


@pytest.fixture
async def launcher():
    opened = Launcher()
    yield opened
    await opened.close()


@pytest.fixture
async def store(tmp_path):
    opened = await SqlStore.open(tmp_path / "store.db")
    yield opened
    await opened.close()


@pytest.fixture
async def engine(request):
    """A test may say what it replies."""
    made = ScriptedEngine(getattr(request, "param", hashed_reply(num_tokens=4, first_id=97, last_id=122)))
    yield made
    await made.close()


def gateway_app(store, engine, **options):
    """Over the tiny model's renderer, unless the options say otherwise."""
    renderer = renderer_for(open_folder(str(TINY_MODEL)))
    tiny = {"renderer": renderer, "model_name": "tiny", "context_limit": 2048}
    return create_app(store=store, engine=engine, **{**tiny, "operator_key": OPERATOR_KEY, **options})


@pytest.fixture
async def gateway(store, engine):
    async with GatewayServer(gateway_app(store, engine)) as server:
        yield server


@pytest.fixture
async def client(gateway):
    async with Client(gateway.url, OPERATOR_KEY) as opened:
        yield opened
