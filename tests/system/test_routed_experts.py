"""Routed experts of an engine on the token wire, from its last event to the stored call."""

from dataclasses import replace

import httpx
import numpy as np
import openai
import pytest

from manege.client import Client
from manege.engine.base import Chunk, Sampling
from manege.engine.partial import PartialAnswer
from manege.engine.routed_experts import rows_of, text_of
from manege.engine.scripted import ScriptedEngine, hashed_reply
from manege.engine.server import engine_app
from manege.engine.token_stream import AnswerReader
from manege.engine.upstream import UpstreamEngine
from manege.errors import EngineError
from manege.gateway.server import GatewayServer, Server
from manege.types import FinishReason, PolicyVersion, RolloutSpec, Task
from tests.conftest import OPERATOR_KEY, gateway_app

pytestmark = pytest.mark.anyio


def routed(ids):
    """(T - 1, 3, 2): as if layer l sent a token to the experts that its id names."""
    tokens = np.asarray(ids[:-1])[:, None, None]
    return (tokens + np.arange(3)[None, :, None] + np.array([0, 100])).astype(np.uint8)


class Mixture(ScriptedEngine):
    """Tells at the end of an answer where its tokens went, as vLLM does."""

    async def generate(self, prompt_ids, sampling):
        ids = list(prompt_ids)
        async for chunk in super().generate(prompt_ids, sampling):
            ids += chunk.ids
            yield replace(chunk, routed_experts=text_of(routed(ids))) if chunk.finish_reason else chunk


async def test_a_conversation_keeps_the_experts_of_each_token_once(store):
    behind = Mixture(hashed_reply(num_tokens=6, first_id=97, last_id=122))
    async with Server(engine_app(behind, encode=list, decode=str)) as server:
        engine = UpstreamEngine(server.url)
        async with (
            GatewayServer(gateway_app(store, engine)) as gateway,
            Client(gateway.url, OPERATOR_KEY) as client,
        ):
            await client.create_rollouts([RolloutSpec(id="r", run="run", task=Task(id="t", input={}))])
            (claim,) = await client.claim(controller="c", limit=1, lease_s=60)
            messages = []
            async with openai.AsyncOpenAI(
                base_url=f"{gateway.url}/v1", api_key=claim.agent_key, http_client=httpx.AsyncClient()
            ) as agent:
                for text in ("one", "two", "three"):
                    messages.append({"role": "user", "content": text})
                    reply = await agent.chat.completions.create(model="m", messages=messages)
                    messages.append({"role": "assistant", "content": reply.choices[0].message.content})
            calls = (await client.calls(["r"]))["r"]
        await engine.close()
    assert [call.parent for call in calls] == [None, calls[0].id, calls[1].id]
    parts = [rows_of(call.routed_experts) for call in calls]
    last = calls[-1]
    wanted = routed([*last.prompt_ids_P, *last.response_ids_R])
    assert len(parts[0]) == len(calls[0].prompt_ids_P) + len(calls[0].response_ids_R) - 1
    np.testing.assert_array_equal(np.concatenate(parts), wanted)


def test_a_cut_answer_has_the_experts_that_each_token_was_computed_with():
    answer = PartialAnswer([1, 2, 3], Sampling(max_new_tokens=4))

    def ended(reason, *ids, by):
        rows = np.full((3 + len(answer.request()[0]) - 3 + len(ids) - 1, 2, 2), by, np.uint8)
        chunks = answer.add(Chunk(ids=ids, logprobs=[0.0] * len(ids), version=PolicyVersion(by)))
        last = Chunk(ids=(), logprobs=(), version=PolicyVersion(by), finish_reason=reason, routed_experts=text_of(rows))
        return [*chunks, *answer.add(last)]

    assert [chunk.routed_experts for chunk in ended(FinishReason.ABORT, 7, 8, by=1)] == [None]
    answer.end_request(by_pause=True)
    *_, last = ended(FinishReason.LENGTH, 9, 10, by=2)
    assert rows_of(last.routed_experts)[:, 0, 0].tolist() == [1, 1, 1, 1, 2, 2]


def test_vllms_last_event_is_read_and_nonsense_is_refused():
    reader = AnswerReader("http://e", PolicyVersion(1))
    text = text_of(routed([5, 6, 7]))
    event = {"index": 0, "token_ids": [7], "logprobs": {"content": [{"logprob": -1.0}]}, "finish_reason": "length"}
    reader._feed({"choices": [{**event, "routed_experts": text}]}, PolicyVersion(1))
    assert reader.finish().routed_experts == text
    for nonsense in ("not base64!", "AAAA", text_of(np.zeros((3, 2), np.uint8))):
        with pytest.raises(EngineError, match="routed experts"):
            rows_of(nonsense)
