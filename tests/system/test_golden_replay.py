"""The golden rollouts, sent by OpenAI's client to a real gateway whose model says what the file's model said.

The file's prompt ids are what an engine sees that tokenises all text again at every call; here the gateway continues
the ids that were sampled, so that only what the harness really changed makes a sample of its own.
"""

import asyncio
from collections import Counter
from dataclasses import replace

import httpx
import openai
import pytest

from manege.engine.scripted import ScriptedEngine
from manege.gateway.flights import GRACE_S
from manege.gateway.server import GatewayServer
from manege.harnesses.harness import parse
from manege.trainer.algo.branches import BranchKind, branches
from manege.trainer.algo.forest import build_forest
from manege.trainer.algo.ledger import Fate, Reason
from manege.trainer.algo.samples import build_samples
from manege.types import Delivered, RolloutId, RolloutSpec, RunId, Task
from tests.conftest import gateway_app
from tests.golden_rollouts import NUM_SAMPLES as NUM_SAMPLES_AS_GIVEN
from tests.golden_rollouts import SCENARIOS
from tests.system.agents.asking import calls_of, until
from tests.toy_renderer import ToyRenderer

pytestmark = pytest.mark.anyio

NUM_SAMPLES = {**NUM_SAMPLES_AS_GIVEN, "drift at 2 of 8 turns": 1, "drift at every turn": 1}
RETRIES = ["client retry, 2nd kept", "client retry, 1st kept"]
NOISY_HARNESS = parse(
    "noisy",
    r"""
title = "A harness that begins every system prompt with another word"
home_page = "https://example.org"
version = "1"
protocol = "chat"
streams = false
command = ["noisy"]

[install]

[[filters]]
name = "nonce"
pattern = '^w\d+ (?=w5230 )'
""",
)


@pytest.fixture
def script():
    """What the model still has to say."""
    return []


@pytest.fixture
async def engine(script):
    made = ScriptedEngine(lambda _: script.pop(0))
    yield made
    await made.close()


@pytest.fixture
async def gateway(store, engine):
    harnesses = {"noisy": NOISY_HARNESS}
    app = gateway_app(store, engine, renderer=ToyRenderer(), context_limit=8192, load_harness=harnesses.__getitem__)
    async with GatewayServer(app) as server:
        yield server


@pytest.fixture
def agent_config():
    return {}


@pytest.fixture
async def client(gateway, store, agent_config):
    await store.put_run(RunId("run"), {"agent": agent_config})
    spec = RolloutSpec(id=RolloutId("r1"), run=RunId("run"), task=Task(id="t", input={}))
    await store.create_rollouts([spec])
    await store.claim(controller="c", limit=1, lease_s=60)
    async with openai.AsyncOpenAI(
        base_url=f"{gateway.url}/v1",
        api_key=gateway.services.auth.agent_key("r1", 0),
        http_client=httpx.AsyncClient(trust_env=False),
        max_retries=0,
    ) as opened:
        yield opened


async def ask(client, call):
    """The wire wants the id of a call from a tool's message, which the file leaves out."""
    messages = [{**said, "tool_call_id": "call_1"} if said["role"] == "tool" else said for said in call["messages"]]
    return await client.chat.completions.create(model="toy", messages=messages)


async def ask_and_take(client, call):
    answer = await ask(client, call)
    assert answer.choices[0].message.content == call["response_text"]


async def ask_and_leave(client, engine, call):
    """Leaves before there is an answer, which is sampled all the same."""
    await engine.pause()
    asking = asyncio.create_task(ask(client, call))
    await until(lambda: is_answering(engine))
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    # The gateway must have seen the closed connection before there is something to send.
    await asyncio.sleep(GRACE_S / 10)
    await engine.resume()


async def is_answering(engine):
    return (await engine.info()).num_running == 1


async def replay(client, engine, store, script, calls):
    """As the file says; the client leaves where its answer was lost, and comes back when that has been noticed."""
    script += [call["response_token_ids"] for call in calls]
    for call in calls:
        if call["kept_by_harness"]:
            await ask_and_take(client, call)
        else:
            await ask_and_leave(client, engine, call)
            await until(lambda: has(store, Delivered.NO, 1))
    await until(lambda: has(store, Delivered.YES, sum(call["kept_by_harness"] for call in calls)))
    assert script == []
    return await calls_of(store)


async def has(store, delivered, number):
    return Counter(call.delivered for call in await calls_of(store))[delivered] == number


def check_trained(samples, calls):
    """Each sampled token of these calls is trained exactly once, and nothing else is."""
    sampled = [token for call in calls for token in call["response_token_ids"]]
    trained = [token for sample in samples for token in sample.ids_T[sample.mask_T].tolist()]
    # But for the end of a message, every sampled token of a scenario is another one.
    assert Counter(trained) == Counter(sampled)
    assert sum(sample.num_trained for sample in samples) == len(sampled)


@pytest.mark.parametrize("name", NUM_SAMPLES)
async def test_only_what_the_harness_changed_makes_another_sample(client, engine, store, script, name):
    calls = await replay(client, engine, store, script, SCENARIOS[name])
    samples, _ = build_samples(build_forest(calls))
    assert len(samples) == NUM_SAMPLES[name]
    check_trained(samples, SCENARIOS[name])


def test_every_scenario_is_replayed():
    assert {*NUM_SAMPLES, *RETRIES} == set(SCENARIOS)


@pytest.mark.parametrize("agent_config", [{"harness": "noisy"}])
async def test_nonce_makes_no_other_sample_where_the_harness_names_its_filter(client, engine, store, script):
    scenario = SCENARIOS["system nonce each call"]
    calls = await replay(client, engine, store, script, scenario)
    samples, _ = build_samples(build_forest(calls))
    assert len(samples) == 1
    check_trained(samples, scenario)
    assert [call.edits for call in calls] == [
        [f"nonce: {asked['messages'][0]['content'].split()[0] + ' '!r}"] for asked in scenario
    ]


async def test_every_choice_of_best_of_n_is_a_sample_equal_ones_included(client, store, script):
    """The agent goes on from one of three answers, of which two are the same."""
    script += [[11, 12, 9], [11, 12, 9], [13, 9], [14, 9]]
    asked = [{"role": "user", "content": "w10"}]
    answer = await client.chat.completions.create(model="toy", messages=asked, n=3)
    assert sorted(choice.message.content for choice in answer.choices) == ["w11 w12", "w11 w12", "w13"]
    asked += [{"role": "assistant", "content": "w13"}, {"role": "user", "content": "w20"}]
    await client.chat.completions.create(model="toy", messages=asked)
    await until(lambda: has(store, Delivered.YES, 4))
    forest = build_forest(await calls_of(store))
    samples, ledger = build_samples(forest)
    assert [branch.kind for branch in branches(forest)] == [BranchKind.REPEATED] * 2
    trained = sorted(sample.ids_T[sample.mask_T].tolist() for sample in samples)
    assert trained == [[11, 12, 9], [11, 12, 9], [13, 9, 14, 9]]
    assert ledger.tokens == {Reason.TRAINED: 10}


@pytest.mark.parametrize(
    ("lost", "reason"), [(Delivered.NO, Reason.NOT_DELIVERED), (Delivered.UNKNOWN, Reason.RETRIED)]
)
@pytest.mark.parametrize("name", RETRIES)
async def test_lost_answer_is_dead_and_the_rest_one_sample(client, engine, store, script, name, lost, reason):
    """`UNKNOWN`: as after a crash of the gateway between the answer and the note of its end."""
    calls = await replay(client, engine, store, script, SCENARIOS[name])
    kept = [call for call in SCENARIOS[name] if call["kept_by_harness"]]
    assert len(kept) == len(calls) - 1
    calls = [replace(call, delivered=lost) if call.delivered is Delivered.NO else call for call in calls]
    samples, ledger = build_samples(build_forest(calls))
    assert len(samples) == 1
    check_trained(samples, kept)
    (dead,) = [call for call in SCENARIOS[name] if not call["kept_by_harness"]]
    assert (ledger.tokens[reason], ledger.of(Fate.DEAD)) == (len(dead["response_token_ids"]),) * 2


async def test_request_sent_again_at_once_gets_the_answer_under_way(client, engine, store, script):
    """Nothing is sampled twice, so nothing is dead."""
    scenario = SCENARIOS["client retry, 2nd kept"]
    kept = [call for call in scenario if call["kept_by_harness"]]
    script += [call["response_token_ids"] for call in kept]
    for call in scenario:
        if call["kept_by_harness"]:
            await ask_and_take(client, call)
        else:
            await ask_and_leave(client, engine, call)
    await until(lambda: has(store, Delivered.YES, len(kept)))
    samples, _ = build_samples(build_forest(await calls_of(store)))
    assert len(samples) == 1
    check_trained(samples, kept)
