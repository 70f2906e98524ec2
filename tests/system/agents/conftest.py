"""Official clients against a real gateway, socket and tokenizer, over an engine that says what it is told to."""

import re

import anthropic
import httpx
import httpx2
import openai
import pytest
from google import genai

from manege.engine.scripted import ScriptedEngine
from manege.gateway.app import create_app
from manege.gateway.server import GatewayServer
from manege.model.folder import open_folder
from manege.rendering.select import renderer_for
from manege.types import RolloutId, RolloutSpec, RunId, Task
from tests.conftest import OPERATOR_KEY
from tests.system.agents.asking import END


@pytest.fixture(scope="session")
def renderer():
    return renderer_for(open_folder("smollm2"))


class Parrot:
    """Answers `say X` with X, letter by letter, so with ids that no tokenizer gives."""

    def __init__(self, renderer):
        self.renderer = renderer
        self.prompts = []

    def __call__(self, prompt_ids):
        self.prompts.append(list(prompt_ids))
        said = re.findall(r"say (.*?)\n(?:assistant|</tool)", self.renderer.decode(prompt_ids), re.DOTALL)
        return [token for letter in said[-1] for token in self.renderer.encode(letter)] + [END] if said else [END]


@pytest.fixture
def parrot(renderer):
    return Parrot(renderer)


@pytest.fixture
async def engine(parrot, renderer):
    made = ScriptedEngine(parrot, decode=renderer.decode, context_limit=1024, token_delay_s=0.0002)
    yield made
    await made.close()


@pytest.fixture
async def gateway(store, engine, renderer):
    app = create_app(
        store=store,
        engine=engine,
        renderer=renderer,
        operator_key=OPERATOR_KEY,
        model_name="smollm2",
        context_limit=1024,
    )
    async with GatewayServer(app) as server:
        yield server


@pytest.fixture
async def rollout(store):
    """Starts a rollout and gives its id."""

    async def start(name="r1", *, config=None, **changes):
        sampling = {"temperature": 0.7, "max_new_tokens": 400}
        await store.put_run(RunId("run"), {"sampling": sampling, **(config or {})})
        spec = RolloutSpec(**{"id": RolloutId(name), "run": RunId("run"), "task": Task(id="t", input={}), **changes})
        await store.create_rollouts([spec])
        await store.claim(controller="c", limit=1, lease_s=60)
        return spec.id

    return start


@pytest.fixture
async def sdk(gateway):
    """Official clients of OpenAI, closed at the end."""
    opened = []

    def make(rollout_id, *, base_url=None, key=None, **options):
        http_client = httpx.AsyncClient(trust_env=False)
        client = openai.AsyncOpenAI(
            base_url=base_url or f"{gateway.url}/v1",
            api_key=key or gateway.services.auth.agent_key(rollout_id, 0),
            http_client=http_client,
            **options,
        )
        opened.append(client)
        return client

    yield make
    for client in opened:
        await client.close()


@pytest.fixture
async def agent(sdk, rollout):
    return sdk(await rollout())


@pytest.fixture
async def key(gateway, rollout):
    """The key of rollout r1."""
    return gateway.services.auth.agent_key(await rollout(), 0)


@pytest.fixture
async def claude(gateway, key):
    """Anthropic's client."""
    async with anthropic.AsyncAnthropic(
        base_url=gateway.url, api_key=key, http_client=httpx2.AsyncClient(trust_env=False)
    ) as client:
        yield client


@pytest.fixture
def gemini(gateway, key):
    """Google's client; `.aio` is its other half."""
    return genai.Client(api_key=key, http_options={"base_url": gateway.url})


@pytest.fixture
async def http(gateway, key):
    """A plain client."""
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=gateway.url, headers=headers, trust_env=False, timeout=30) as client:
        yield client
