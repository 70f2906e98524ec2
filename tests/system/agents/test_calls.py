"""Chat calls by the official SDK over a real socket: continuation, tools, sampling contract, errors, disconnects."""

import asyncio
import json

import httpx
import numpy as np
import openai
import pytest

from manege.engine.base import Weights
from manege.engine.scripted import scripted_logprob
from manege.gateway.app import create_app
from manege.gateway.server import GatewayServer
from manege.store.base import Ending
from manege.types import Delivered, FinishReason, Outcome, RolloutId
from tests.conftest import OPERATOR_KEY
from tests.system.agents.asking import BASH, END, ask, calls_of, until, user

pytestmark = pytest.mark.anyio


async def test_multi_turn_conversation_continues_the_sampled_ids(agent, store, parrot):
    messages = []
    for text in ("Hello there", "Sure thing", "Good bye"):
        messages.append(user(f"say {text}"))
        answer = await ask(agent, messages)
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (text, "stop")
        messages.append(answer.choices[0].message.model_dump(exclude_none=True))
    first, second, third = await calls_of(store)
    assert [call.parent for call in (first, second, third)] == [None, first.id, second.id]
    for parent, call in ((first, second), (second, third)):
        known = [*parent.prompt_ids_P, *parent.response_ids_R]
        assert call.prompt_ids_P[: len(known)].tolist() == known
        assert len(call.request["messages"]) == 1
    assert parrot.prompts == [call.prompt_ids_P.tolist() for call in (first, second, third)]
    assert answer.model == "smollm2"
    assert answer.usage.prompt_tokens == len(third.prompt_ids_P)
    assert answer.usage.completion_tokens == len(third.response_ids_R)


async def test_recorded_call_holds_what_the_engine_sampled(agent, store, renderer):
    await ask(agent, [user("say Hi")])
    (call,) = await calls_of(store)
    assert call.response_ids_R.tolist() == [*renderer.encode("H"), *renderer.encode("i"), END]
    expected = np.asarray([scripted_logprob(token) for token in call.response_ids_R.tolist()], np.float32)
    assert np.array_equal(call.logprobs_R, expected)
    assert (call.finish_reason, call.mode, call.temperature) == (FinishReason.STOP, "train", 0.7)
    assert [(span.first_token, span.version) for span in call.spans] == [(0, 0)]
    assert call.reply == {"role": "assistant", "content": "Hi"}


async def test_delivery_is_noted_after_the_answer(agent, store):
    await ask(agent, [user("say Hi")])

    async def noted():
        return [call.delivered for call in await calls_of(store)] == [Delivered.YES]

    await until(noted)


async def test_tool_calls_come_in_openais_shape_and_are_continued(agent, store):
    call_text = '<tool_call>{"name": "bash", "arguments": {"c": "ls"}}</tool_call>'
    messages = [user(f"say Ok. {call_text}")]
    choice = (await ask(agent, messages, tools=[BASH])).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Ok.")
    (tool_call,) = choice.message.tool_calls
    assert (tool_call.function.name, json.loads(tool_call.function.arguments)) == ("bash", {"c": "ls"})
    # The harness spells the arguments in its own way and leaves out the text.
    echo = {"id": tool_call.id, "type": "function", "function": {"name": "bash", "arguments": '{"c":"ls"}'}}
    messages += [
        {"role": "assistant", "content": None, "tool_calls": [echo]},
        {"role": "tool", "tool_call_id": tool_call.id, "content": "say Found it"},
    ]
    answer = await ask(agent, messages, tools=[BASH])
    assert answer.choices[0].message.content == "Found it"
    first, second = await calls_of(store)
    assert second.parent == first.id
    assert second.request["messages"][0]["content"] == "say Found it"
    assert "tools" in first.request
    assert "tools" not in second.request


async def test_edited_history_is_a_new_branch(agent, store):
    await ask(agent, [user("say Hello")])
    history = [user("say Hello"), {"role": "assistant", "content": "Hello, edited"}, user("say Bye")]
    await ask(agent, history)
    first, second = await calls_of(store)
    assert (second.parent, [message["content"] for message in second.request["messages"]]) == (
        None,
        ["say Hello", "Hello, edited", "say Bye"],
    )
    assert first.id != second.id


async def test_parallel_calls_with_the_same_prompt_are_all_kept(agent, store):
    await asyncio.gather(*(ask(agent, [user("say Hi")]) for _ in range(3)))
    assert len(await calls_of(store)) == 3


async def test_conversation_survives_a_restart_of_the_gateway(store, engine, renderer, rollout, sdk):
    rollout_id = await rollout()
    messages = [user("say Hello")]
    for text in ("Bye", "End"):
        app = create_app(
            store=store, engine=engine, renderer=renderer, operator_key=OPERATOR_KEY, model_name="m", context_limit=1024
        )
        async with GatewayServer(app) as server:
            client = sdk(rollout_id, base_url=f"{server.url}/v1", key=server.services.auth.agent_key(rollout_id, 0))
            answer = await ask(client, messages)
            await client.close()
        messages += [{"role": "assistant", "content": answer.choices[0].message.content}, user(f"say {text}")]
    first, second = await calls_of(store)
    assert second.parent == first.id


async def test_logprobs_and_token_ids_where_asked(agent, store):
    answer = await ask(agent, [user("say Hi")], logprobs=True, extra_body={"return_token_ids": True})
    (call,) = await calls_of(store)
    content = answer.choices[0].logprobs.content
    assert [entry.logprob for entry in content] == call.logprobs_R.tolist()
    assert answer.prompt_token_ids == call.prompt_ids_P.tolist()
    assert answer.choices[0].token_ids == call.response_ids_R.tolist()
    plain = await ask(agent, [user("say Hi")])
    assert plain.choices[0].logprobs is None
    assert not hasattr(plain, "prompt_token_ids")


async def test_training_fixes_the_sampling_and_records_what_it_replaced(agent, store):
    options = {"temperature": 0.2, "top_p": 0.5, "seed": 7, "presence_penalty": 1.0, "max_tokens": 3}
    answer = await ask(agent, [user("say Hello")], **options, extra_body={"top_k": 4, "min_p": 0.1})
    (call,) = await calls_of(store)
    assert (answer.choices[0].finish_reason, len(call.response_ids_R)) == ("length", 3)
    assert call.temperature == 0.7
    assert call.overridden == {
        "temperature": 0.2, "top_p": 0.5, "seed": 7, "presence_penalty": 1.0, "top_k": 4, "min_p": 0.1,
    }  # fmt: skip


async def test_validation_keeps_the_clients_own_sampling(sdk, rollout, store):
    agent = sdk(await rollout("v", is_train=False))
    await ask(agent, [user("say Hello")], temperature=0.2, top_p=0.5)
    (call,) = await calls_of(store, "v")
    assert (call.mode, call.temperature, call.overridden) == ("val", 0.2, {})


async def test_evaluation_fixes_its_temperature(sdk, rollout, store):
    agent = sdk(await rollout("v", is_train=False, temperature=0.0))
    await ask(agent, [user("say Hello")], temperature=0.2)
    (call,) = await calls_of(store, "v")
    assert (call.temperature, call.overridden) == (0.0, {"temperature": 0.2})


async def test_stop_string_is_cut_from_the_answer_and_kept_in_the_ids(agent, store, renderer):
    answer = await ask(agent, [user("say one STOP two")], stop=["STOP"])
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("one ", "stop")
    (call,) = await calls_of(store)
    assert renderer.decode(call.response_ids_R.tolist()) == "one STOP"
    history = [user("say one STOP two"), {"role": "assistant", "content": "one "}, user("say on")]
    await ask(agent, history)
    assert (await calls_of(store))[1].parent == call.id


async def test_prompt_beyond_the_context_is_an_overflow_that_sdks_know(agent, store):
    await ask(agent, [user("say Hi")])
    with pytest.raises(openai.BadRequestError) as caught:
        await ask(agent, [user("word " * 2000)])
    assert (caught.value.code, caught.value.type) == ("context_length_exceeded", "invalid_request_error")
    assert "This model's maximum context length is 1024 tokens. However, " in caught.value.message
    # The rollout goes on.
    await ask(agent, [user("say Hi"), {"role": "assistant", "content": "Hi"}, user("say Bye")])
    first, second = await calls_of(store)
    assert second.parent == first.id


async def test_answer_is_bounded_by_the_room_that_is_left(agent, store):
    answer = await ask(agent, [user("word " * 900 + "say " + "x" * 200)], max_tokens=32000)
    assert answer.choices[0].finish_reason == "length"
    (call,) = await calls_of(store)
    assert len(call.prompt_ids_P) + len(call.response_ids_R) == 1024


@pytest.mark.parametrize("body", [b"[]", b'"x"', b"{", b"\xff\xfe", b"", b'{"temperature": NaN}'])
async def test_nonsense_is_answered_in_openais_shape(gateway, rollout, body):
    headers = {"authorization": f"Bearer {gateway.services.auth.agent_key(await rollout(), 0)}"}
    async with httpx.AsyncClient(base_url=gateway.url, headers=headers, trust_env=False) as http:
        response = await http.post("/v1/chat/completions", content=body)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


async def test_wrong_key_is_refused_in_openais_shape(sdk, rollout):
    client = sdk(await rollout(), key="mk-0-00-r1")
    with pytest.raises(openai.AuthenticationError, match="the key is not valid"):
        await ask(client, [user("say Hi")])


async def test_call_after_the_end_of_its_attempt_is_refused_once(agent, store):
    await store.finish(RolloutId("r1"), 0, Ending(outcome=Outcome.OK, reward=1.0))
    with pytest.raises(openai.ConflictError, match="is over"):
        await ask(agent, [user("say Hi")])
    # The SDK did not try again.
    assert len(await store.events(RolloutId("r1"), event_type="late.call")) == 1


@pytest.mark.parametrize("end", ["finish", "cancel", "delete"])
async def test_conversation_is_dropped_from_memory_when_its_rollout_ends(agent, gateway, end):
    await ask(agent, [user("say Hi")])
    kept = gateway.services.conversations._attempts
    assert list(kept) == ["r1"]
    headers = {"authorization": f"Bearer {OPERATOR_KEY}"}
    one = f"{gateway.url}/api/rollouts/r1"
    async with httpx.AsyncClient(headers=headers, trust_env=False) as http:
        if end == "finish":
            answer = await http.post(f"{one}/attempt/0/finish", json={"outcome": "ok"})
        else:
            answer = await (http.post(f"{one}/cancel") if end == "cancel" else http.delete(one))
    assert answer.is_success
    assert list(kept) == []


async def test_client_that_goes_away_ends_the_generation(engine, agent, store):
    await engine.pause()
    with pytest.raises(openai.APITimeoutError):
        await ask(agent.with_options(timeout=0.3, max_retries=0), [user("say Hi")])

    async def stopped():
        return (await engine.info()).num_running == 0

    await until(stopped, timeout_s=2)
    await engine.resume()
    await ask(agent, [user("say Bye")])
    assert [call.reply["content"] for call in await calls_of(store)] == ["Bye"]


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/chat/completions", {"messages": [user("say Hi")]}), ("/v1/completions", {"prompt": "say Hi\nassistant\n"})],
)
async def test_answer_of_a_client_that_left_at_the_end_is_kept_as_not_delivered(
    store, engine, renderer, rollout, path, body
):
    """Over ASGI, since a socket cannot be closed between the last token and the answer on purpose."""
    rollout_id = await rollout()
    times, left = [], asyncio.Event()

    def clock():
        times.append(0.0)
        if len(times) == 2:  # the second reading follows the last token
            left.set()
        return 0.0

    app = create_app(
        store=store,
        engine=engine,
        renderer=renderer,
        operator_key=OPERATOR_KEY,
        model_name="m",
        context_limit=1024,
        clock=clock,
    )
    messages = [{"type": "http.request", "body": json.dumps(body).encode()}]

    async def receive():
        if messages:
            return messages.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    sent = []

    async def send(message):
        sent.append(message)

    key = app.state.services.auth.agent_key(rollout_id, 0)
    headers = [(b"authorization", f"Bearer {key}".encode())]
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b""}
    await app(scope, receive, send)
    assert sent == []

    async def noted():
        return [call.delivered for call in await calls_of(store)] == [Delivered.NO]

    await until(noted)


async def test_pause_holds_a_call_and_answers_it_after(agent, gateway, store):
    gate, pauses = gateway.services.gate, gateway.services.pauses
    await pauses.pause(5)
    asking = asyncio.create_task(ask(agent, [user("say Hi")]))
    await asyncio.sleep(0.2)
    assert (asking.done(), gate.num_held) == (False, 1)
    await pauses.publish(Weights(kind="shared"))
    await pauses.resume()
    assert (await asking).choices[0].message.content == "Hi"
    (call,) = await calls_of(store)
    assert [(span.first_token, span.version) for span in call.spans] == [(0, 1)]


async def test_call_that_a_pause_did_not_wait_for_goes_on_under_the_new_version(agent, gateway, engine, store):
    asking = asyncio.create_task(ask(agent, [user("say " + "x" * 390)]))

    async def sampling():
        return (await engine.info()).stats["sampled"] > 5

    await until(sampling)
    await gateway.services.pauses.pause(0.001)
    await gateway.services.pauses.publish(Weights(kind="shared"))
    await gateway.services.pauses.resume()
    assert (await asking).choices[0].message.content == "x" * 390
    (call,) = await calls_of(store)
    assert [span.version for span in call.spans] == [0, 1]
    assert 5 < call.spans[1].first_token < 391


async def test_engine_failure_is_answered_as_502_and_noted(agent, engine, store):
    await engine.close()
    with pytest.raises(openai.InternalServerError, match="engine is closed") as caught:
        await ask(agent.with_options(max_retries=0), [user("say Hi")])
    assert (caught.value.status_code, caught.value.code) == (502, "engine_error")
    (event,) = await store.events(RolloutId("r1"), event_type="call.error")
    assert "engine is closed" in event.data["message"]
    assert await calls_of(store) == []


async def test_completions_of_text_and_of_token_ids(agent, store, renderer):
    prompt = "say Hi\nassistant\n"
    for given in (prompt, renderer.encode(prompt)):
        answer = await agent.completions.create(model="any", prompt=given, logprobs=1)
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("Hi", "stop")
        assert len(answer.choices[0].logprobs.token_logprobs) == 3
    calls = await calls_of(store)
    assert {call.protocol for call in calls} == {"completions"}
    assert calls[0].prompt_ids_P.tolist() == calls[1].prompt_ids_P.tolist() == renderer.encode(prompt)


async def test_token_id_beyond_the_vocabulary_is_refused(agent, renderer):
    with pytest.raises(openai.BadRequestError, match=f"below {renderer.vocab_size}"):
        await agent.completions.create(model="any", prompt=[renderer.vocab_size])


async def test_models_names_the_model_and_its_context(agent):
    (model,) = (await agent.models.list()).data
    assert (model.id, model.max_model_len) == ("smollm2", 1024)


async def test_agent_lightnings_long_path(sdk, rollout, gateway, store):
    rollout_id = await rollout()
    base_url = f"{gateway.url}/proxy/rollout/{rollout_id}/attempt/0/mode/train/openai/v1"
    await ask(sdk(rollout_id, base_url=base_url), [user("say Hi")])
    await ask(sdk(rollout_id, base_url=base_url, key=OPERATOR_KEY), [user("say Hi")])
    assert len(await calls_of(store)) == 2
    with pytest.raises(openai.PermissionDeniedError, match="mode train"):
        await ask(sdk(rollout_id, base_url=base_url.replace("train", "val")), [user("say Hi")])
