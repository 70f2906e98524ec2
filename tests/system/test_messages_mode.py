"""Engines that take messages: what is asked of them, what is read of their answers, and what happens when they fail."""

import asyncio
from contextlib import asynccontextmanager

import httpx
import openai
import pytest

from manege.engine.base import Sampling
from manege.engine.messages import MessagesEngine
from manege.engine.scripted import scripted_logprob
from manege.errors import ContextOverflowError, EngineAwayError, EngineError, ProtocolError
from manege.gateway.forward import MessagesSource
from manege.gateway.pool import Registration
from manege.protocols.base import AskedSampling, InvalidRequest, ModelRequest, ReplyDelta
from manege.types import Delivered, FinishReason, RolloutSpec, Task
from tests.chat_engine import chat_engine, http, raw_server

pytestmark = pytest.mark.anyio

ANSWER = {
    "prompt_token_ids": [1, 2],
    "choices": [
        {
            "message": {"role": "assistant", "content": "hi"},
            "finish_reason": "stop",
            "token_ids": [3, 4],
            "logprobs": {"content": [{"token": "h", "logprob": -0.5}, {"token": "i", "logprob": -0.25}]},
        }
    ],
    "usage": {"prompt_tokens": 2, "completion_tokens": 2},
}


def request(**changes):
    messages = [{"role": "user", "content": "hi"}]
    return ModelRequest(**{"messages": messages, "sampling": AskedSampling(), "raw": {}, **changes})


async def forward(url, asked=None, *, emit=None, **sampling):
    """One call, on an engine of its own."""
    engine = MessagesEngine(f"{url}/v1/", version=5)
    sampling = Sampling(**{"max_new_tokens": 32, **sampling})
    source = MessagesSource(asked or request(), sampling=sampling, emit=emit or (lambda _: None))
    try:
        return await source.run(engine, "m")
    finally:
        await engine.close()


async def test_an_answer_is_kept_with_the_ids_that_the_engine_says():
    async with chat_engine() as (served, url):
        got = await forward(url)
        prompt = served.renderer.render(request().messages, ())
    assert got.prompt_ids.tolist() == prompt
    assert len(got.generation.ids_R) == got.num_sampled == 8
    assert got.generation.logprobs_R.tolist() == [scripted_logprob(token) for token in got.generation.ids_R.tolist()]
    assert got.message == {"role": "assistant", "content": served.renderer.decode(got.generation.ids_R.tolist())}
    assert "".join(got.texts) == got.message["content"]
    assert [(span.first_token, span.version) for span in got.generation.spans] == [(0, 5)]
    assert (got.flaw, got.num_prompt, got.generation.num_cached) == (None, len(prompt), 3)
    assert got.generation.finish_reason is FinishReason.STOP


async def test_the_engine_is_asked_with_the_admitted_sampling_and_nothing_of_its_own():
    asked = request(
        sampling=AskedSampling(temperature=0.2, top_p=0.5, seed=9, others={"min_p": 0.3, "logit_bias": {"7": 5}}),
        raw={"chat_template_kwargs": {"enable_thinking": False}, "min_p": 0.3},
    )
    async with chat_engine() as (served, url):
        await forward(url, asked, temperature=0.7, seed=3, stop_strings=["END"])
        await forward(url, asked)
    body, training = served.bodies
    assert {"logit_bias", "seed"} & training.keys() == set()
    fixed = {"temperature": 0.7, "top_p": 1.0, "top_k": 0, "min_p": 0, "repetition_penalty": 1, "presence_penalty": 0}
    assert body.items() >= (fixed | {"frequency_penalty": 0, "seed": 3, "stop": ["END"], "max_tokens": 32}).items()
    assert body.items() >= {"n": 1, "logprobs": True, "return_token_ids": True, "stream": False, "model": "m"}.items()
    assert "logit_bias" not in body
    assert body["chat_template_kwargs"] == {"enable_thinking": False}


@pytest.mark.parametrize("chunks", [(1,), (1, 3, 2), (8,)], ids=str)
async def test_a_stream_gives_the_same_arrays_as_a_whole_answer_however_it_is_cut(chunks):
    deltas = []
    asked = request(stream=True, wants_logprobs=True, wants_token_ids=True)
    async with chat_engine(chunks=chunks) as (_, url):
        whole, streamed = await forward(url), await forward(url, asked, emit=deltas.append)
    assert streamed.prompt_ids.tolist() == whole.prompt_ids.tolist()
    assert streamed.generation.ids_R.tolist() == whole.generation.ids_R.tolist()
    assert streamed.generation.logprobs_R.tolist() == whole.generation.logprobs_R.tolist()
    assert (streamed.message, streamed.num_sampled) == (whole.message, 8)
    assert "".join(delta.content for delta in deltas) == whole.message["content"]
    assert [token for delta in deltas for token in delta.response_ids] == whole.generation.ids_R.tolist()
    assert [token.text for delta in deltas for token in delta.logprobs] == list(whole.texts)


async def test_a_caller_that_did_not_ask_for_ids_and_log_probabilities_gets_none():
    deltas = []
    async with chat_engine() as (_, url):
        await forward(url, request(stream=True), emit=deltas.append)
    assert deltas
    assert all(delta == ReplyDelta(content=delta.content) for delta in deltas)


def changed(**changes):
    choice = {**ANSWER["choices"][0], **{k: v for k, v in changes.items() if k not in ("prompt_token_ids", "usage")}}
    top = {key: value for key, value in changes.items() if key in ("prompt_token_ids", "usage")}
    return {**ANSWER, "choices": [choice], **top}


def tokens(*logprobs):
    return {"content": [{"token": "t", "logprob": logprob} for logprob in logprobs]}


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (changed(token_ids=None), "no token ids of its answer"),
        (changed(token_ids=None, message={"content": None, "reasoning_content": "hm"}), "no token ids of its answer"),
        (changed(prompt_token_ids=None), "no prompt token ids"),
        (changed(logprobs=None), "2 token ids and 0 log-probabilities"),
        (changed(token_ids=[3]), "1 token ids and 2 log-probabilities"),
        (changed(logprobs=tokens(-0.5, -9999.0)), "does not know the log-probability"),
        (changed(logprobs=tokens(None, -0.5)), "does not know the log-probability"),
        (changed(token_ids=[3, 4.5]), "not integers"),
        (changed(prompt_token_ids=[1, 2**31]), "not integers"),
        (changed(usage={"prompt_tokens": 2, "completion_tokens": 12}), "counted 12 sampled tokens and returned 2"),
    ],
)
async def test_an_answer_whose_ids_cannot_be_trusted_is_answered_without_any(answer, reason):
    async with raw_server(http(answer)) as url:
        got = await forward(url)
    assert reason in got.flaw
    assert got.message["role"] == "assistant"
    assert [len(ids) for ids in (got.prompt_ids, got.generation.ids_R, got.generation.logprobs_R)] == [0, 0, 0]
    assert (got.generation.spans, got.texts) == ([], [])
    assert got.num_sampled >= 2


async def test_a_stream_that_drops_one_entry_is_without_ids_not_shifted():
    def drop(chunk):
        for choice in chunk["choices"]:
            if choice["delta"].get("content") and not dropped:
                dropped.append(choice.pop("logprobs"))
        return chunk

    dropped = []
    async with chat_engine(change=drop) as (_, url):
        got = await forward(url, request(stream=True))
    assert got.flaw == "the engine returned 8 token ids and 7 log-probabilities"
    assert len(got.message["content"]) == got.num_sampled == 8


def sse(*data):
    return b"".join(b"data: " + part + b"\n\n" for part in data)


FIRST = b'{"choices":[{"delta":{"content":"h"},"token_ids":[3]}]}'
BROKEN = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n" % (len(sse(FIRST)), sse(FIRST))
OVERFLOW = {"error": {"message": "This model's maximum context length is 64 tokens. However, ...", "code": 400}}


@pytest.mark.parametrize(
    ("said", "error", "reason"),
    [
        (http(b"<html>Bad Gateway</html>"), EngineError, "answered no JSON: b'<html>"),
        (http([]), EngineError, "a JSON list, not a completion"),
        (http(b""), EngineError, "answered no JSON"),
        (None, EngineAwayError, "closed the connection before its answer was complete"),
        (b"what?\r\n\r\n", EngineAwayError, "does not speak HTTP"),
        (http({"error": {"message": "out of memory"}}), EngineError, "answered an error: out of memory"),
        (http({"object": "error", "message": "gone"}), EngineError, "answered an error: gone"),
        (http({"hello": 1}), EngineError, "in a shape that is not OpenAI's"),
        (http({"choices": []}), EngineError, "without a finish reason"),
        (http(changed(finish_reason="abort")), EngineError, "aborted the answer"),
        (http(changed(message="text")), EngineError, "in a shape that is not OpenAI's"),
        (http(b"<html>", "502 Bad Gateway"), EngineError, "answered 502: <html>"),
        (http({"detail": "Not Found"}, "404 Not Found"), EngineError, "answered 404"),
        (http({"error": {"message": "bad tools"}}, "400 Bad Request"), ProtocolError, "refused the request: bad tools"),
        (http(OVERFLOW, "400 Bad Request"), ContextOverflowError, "maximum context length is 64 tokens"),
        (http({"error": {"message": "no", "type": "exceed_context_size_error"}}, "400 B"), ContextOverflowError, "no"),
    ],
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_an_engine_in_trouble_is_a_clear_error(said, error, reason, stream):
    async with raw_server(said) as url:
        with pytest.raises(error) as failed:
            await forward(url, request(stream=stream))
    if not stream or error is not EngineError or "HTTP/1.1 200" not in str(said):
        assert reason in str(failed.value)
        assert type(failed.value) is error


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (http(sse(FIRST, b'{"error":{"message":"died"}}')), "answered an error: died"),
        (http(sse(FIRST)), "without a finish reason"),
        (http(sse(FIRST, b"[DONE]")), "without a finish reason"),
        (http(sse(FIRST) + b'data: {"cho'), "ended its stream in the middle of an event"),
        (http(b"<html>"), "ended its stream in the middle of an event: b'<html>"),
        (http(b"<html>\n"), "answered no event stream: b'<html>"),
        (http(sse(FIRST, b"[]")), "a JSON list"),
        (BROKEN, "closed the connection before its answer was complete"),
    ],
)
async def test_a_stream_that_does_not_end_well_is_a_clear_error(said, reason):
    async with raw_server(said) as url:
        with pytest.raises(EngineError) as failed:
            await forward(url, request(stream=True))
    assert reason in str(failed.value)


async def test_what_was_sampled_of_a_broken_stream_is_kept():
    async with raw_server(BROKEN) as url:
        engine = MessagesEngine(url)
        source = MessagesSource(request(stream=True), sampling=Sampling(max_new_tokens=9), emit=lambda _: None)
        with pytest.raises(EngineError):
            await source.run(engine, "m")
        await engine.close()
    partial = source.so_far()
    assert (partial.message["content"], partial.generation.finish_reason) == ("h", FinishReason.ABORT)
    assert partial.flaw == "the engine returned no prompt token ids"


async def test_an_engine_that_cannot_be_reached_is_a_clear_error():
    with pytest.raises(EngineError, match="cannot be reached"):
        await forward("http://127.0.0.1:9")


async def test_a_limit_on_the_answer_beyond_the_context_is_cut_to_the_room_that_is_left():
    async with chat_engine(num_tokens=2000, context_limit=64) as (served, url):
        got = await forward(url, max_new_tokens=1000)
        assert len(got.prompt_ids) + len(got.generation.ids_R) == 64
        assert ["max_tokens" in body for body in served.bodies] == [True, False]
        long = request(messages=[{"role": "user", "content": "hi" * 200}])
        with pytest.raises(ContextOverflowError):
            await forward(url, long)


async def test_a_text_completion_is_refused():
    with pytest.raises(InvalidRequest, match="engine that takes token ids"):
        await forward("http://127.0.0.1:9", request(prompt="hi"))


async def test_the_engine_stops_when_nobody_waits_any_more():
    async with chat_engine(num_tokens=1000, token_delay_s=0.05) as (served, url):
        asking = asyncio.create_task(forward(url, request(stream=True), max_new_tokens=1000))
        async with asyncio.timeout(2):
            while not served.num_running:
                await asyncio.sleep(0.01)
        asking.cancel()
        async with asyncio.timeout(2):
            while served.num_running:
                await asyncio.sleep(0.01)


async def test_a_connection_that_the_engine_closed_meanwhile_costs_no_call():
    async with raw_server(http(ANSWER), None, http({"again": 1})) as url:
        engine = MessagesEngine(url)
        assert [await engine.ask({}) for _ in range(2)] == [ANSWER, {"again": 1}]
        await engine.close()


@pytest.mark.parametrize(
    "said",
    [
        b"HTTP/1.1 200 OK\r\n\r\n{}",
        b"HTTP/1.1 100 Continue\r\n\r\n" + http({}),
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\n{\r\n1\r\n}\r\n0\r\n\r\n",
        b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\n{}",
    ],
    ids=["until closed", "continue", "chunked", "HTTP/1.0"],
)
async def test_bodies_of_every_framing_are_read(said):
    async with raw_server(said) as url:
        engine = MessagesEngine(url)
        assert [await engine.ask({}) for _ in range(3)] == [{}] * 3
        await engine.close()


async def test_calls_that_wait_when_the_client_is_closed_fail_at_once():
    async with chat_engine(token_delay_s=5) as (_, url):
        engine = MessagesEngine(url)
        asking = asyncio.create_task(engine.ask({"messages": [{"role": "user", "content": "hi"}], "stream": False}))
        await asyncio.sleep(0.2)
        await engine.close()
        with pytest.raises(EngineError, match="closed"):
            await asking
        with pytest.raises(EngineError, match="is closed"):
            await engine.ask({})


@pytest.fixture
async def agent(client, gateway):
    """The official SDK with the key of a rollout under way."""
    await client.create_rollouts([RolloutSpec(id="r", run="run", task=Task(id="t", input={}))])
    (claim,) = await client.claim(controller="c", limit=1, lease_s=60)
    async with openai.AsyncOpenAI(
        base_url=f"{gateway.url}/v1", api_key=claim.agent_key, max_retries=0, http_client=httpx.AsyncClient()
    ) as opened:
        yield opened


@asynccontextmanager
async def registered(gateway, **options):
    """An engine that takes messages, registered with the gateway."""
    async with chat_engine(**options) as (served, url):
        await gateway.services.engine.register([Registration(model="m", endpoint=url, version=7)])
        yield served
        await gateway.services.engine.clear()


async def ask(agent, messages, *, stream=False, **options):
    """The text of an answer."""
    if not stream:
        answer = await agent.chat.completions.create(model="any", messages=messages, **options)
        return answer.choices[0].message.content
    text = ""
    async for chunk in await agent.chat.completions.create(model="any", messages=messages, stream=True, **options):
        for choice in chunk.choices:
            text += choice.delta.content or ""
    return text


async def recorded(client, num_calls):
    """The calls, once all are known to be delivered."""
    async with asyncio.timeout(5):
        while True:
            calls = (await client.calls(["r"]))["r"]
            if len(calls) == num_calls and all(call.delivered is Delivered.YES for call in calls):
                return calls
            await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    "turns",
    [[{}] * 3, [{"stream": True}] * 3, [{}, {"stream": True}, {}, {"extra_body": {"return_token_ids": True}}, {}]],
    ids=["whole", "streamed", "mixed"],
)
async def test_a_conversation_is_recorded_with_the_engines_ids_each_call_with_its_parent(agent, client, gateway, turns):
    messages, spoken = [], []
    async with registered(gateway) as served:
        for number, options in enumerate(turns):
            messages.append({"role": "user", "content": f"say {number}"})
            messages.append({"role": "assistant", "content": await ask(agent, messages, temperature=0.3, **options)})
            spoken.append(messages[-1]["content"])
        calls = await recorded(client, len(turns))
        prompts = [served.renderer.render(body["messages"], ()) for body in served.bodies]
    assert [call.prompt_ids_P.tolist() for call in calls] == prompts
    assert [served.renderer.decode(call.response_ids_R.tolist()) for call in calls] == spoken
    assert [call.parent for call in calls] == [None, *[call.id for call in calls[:-1]]]
    assert [call.request["messages"] for call in calls] == [[messages[2 * n]] for n in range(len(turns))]
    assert {(call.temperature, call.overridden["temperature"]) for call in calls} == {(1.0, 0.3)}
    assert {span.version for call in calls for span in call.spans} == {7}
    assert gateway.services.counters.values["manege_prompt_tokens_total"] == sum(map(len, prompts))


async def test_parents_are_found_again_after_the_index_was_lost(agent, client, gateway):
    messages = [{"role": "user", "content": "one"}]
    async with registered(gateway):
        for text in ("two", "three"):
            messages.append({"role": "assistant", "content": await ask(agent, messages)})
            messages.append({"role": "user", "content": text})
            gateway.services.prefixes.forget("r")
        first, second = await recorded(client, 2)
    assert second.parent == first.id


async def test_an_answer_shows_what_was_asked_for_and_no_more(agent, gateway):
    messages = [{"role": "user", "content": "hi"}]
    async with registered(gateway):
        plain = await agent.chat.completions.create(model="any", messages=messages)
        shown = await agent.chat.completions.create(
            model="any", messages=messages, logprobs=True, extra_body={"return_token_ids": True}
        )
    assert plain.choices[0].logprobs is None
    assert {"token_ids", "prompt_token_ids"} & {*plain.model_dump(), *plain.choices[0].model_dump()} == set()
    assert plain.model == shown.model == gateway.services.model_name
    assert plain.usage.completion_tokens == len(shown.choices[0].token_ids) == len(shown.choices[0].logprobs.content)
    assert len(shown.prompt_token_ids) == plain.usage.prompt_tokens


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_call_without_ids_is_answered_recorded_and_loud(agent, client, gateway, stream):
    def without(body):
        return {**body, "choices": [{**choice, "token_ids": None} for choice in body["choices"]]}

    async with registered(gateway, change=without):
        assert len(await ask(agent, [{"role": "user", "content": "hi"}], stream=stream)) == 8
        (call,) = await recorded(client, 1)
    assert (len(call.prompt_ids_P), len(call.response_ids_R), len(call.reply["content"])) == (0, 0, 8)
    assert gateway.services.counters.values["manege_calls_without_ids_total"] == 1
    (event,) = await gateway.services.store.events("r", event_type="call.without_ids")
    assert event.data["message"] == "the engine returned no token ids of its answer"


async def test_a_prompt_that_is_too_long_is_refused_in_the_words_that_harnesses_know(agent, gateway):
    async with registered(gateway, context_limit=32):
        with pytest.raises(openai.BadRequestError, match="maximum context length"):
            await ask(agent, [{"role": "user", "content": "hi" * 100}])


async def test_a_failing_engine_is_a_502_and_an_event(agent, gateway):
    async with raw_server(http(b"<html>")) as url:
        await gateway.services.engine.register([Registration(model="m", endpoint=url)])
        with pytest.raises(openai.InternalServerError, match="answered no JSON"):
            await ask(agent, [{"role": "user", "content": "hi"}])
        (event,) = await gateway.services.store.events("r", event_type="call.error")
        assert event.data["status"] == 502
        await gateway.services.engine.clear()


async def test_a_client_that_goes_away_ends_the_call_at_the_engine(agent, client, gateway):
    async with registered(gateway, num_tokens=200, token_delay_s=0.05) as served:
        for stream in (False, True):
            asking = asyncio.create_task(ask(agent, [{"role": "user", "content": "hi"}], stream=stream))
            async with asyncio.timeout(2):
                while not served.num_running:
                    await asyncio.sleep(0.01)
            asking.cancel()
            async with asyncio.timeout(2.5):
                while served.num_running:
                    await asyncio.sleep(0.01)
        async with asyncio.timeout(2):
            while len(await client.events("r", "call.lost")) < 2:
                await asyncio.sleep(0.01)
    assert all(call.delivered is Delivered.NO for call in (await client.calls(["r"]))["r"])


HI = {"role": "user", "content": "Hi"}


@pytest.fixture
async def plain(agent, gateway):
    """A client without manners of its own."""
    headers = {"authorization": f"Bearer {agent.api_key}"}
    async with httpx.AsyncClient(base_url=gateway.url, headers=headers, trust_env=False) as opened:
        yield opened


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages", "/v1beta/models/m:ACTION"])
async def test_every_protocol_works_over_an_engine_that_has_chat_completions_only(plain, client, gateway, path, stream):
    body = {"input": "Hi", "messages": [HI], "max_tokens": 20, "stream": stream}
    if "ACTION" in path:
        path = path.replace("ACTION", "streamGenerateContent" if stream else "generateContent")
        body = {"contents": [{"role": "user", "parts": [{"text": "Hi"}]}]}
    async with registered(gateway) as engine:
        answer = await plain.post(path, json=body)
        assert answer.status_code == 200, answer.text
        [call] = await recorded(client, 1)
    assert len(call.response_ids_R) == len(call.logprobs_R) == 8
    assert call.reply["content"] == engine.said(call.response_ids_R.tolist())["content"]
    if not stream:
        assert call.reply["content"] in answer.text
    assert engine.bodies[0]["messages"] == [HI]


async def test_what_the_engine_was_forced_to_say_is_marked(plain, client, gateway):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    async with registered(gateway) as engine:
        asked = {"messages": [HI], "tools": [tool], "tool_choice": "required"}
        await plain.post("/v1/chat/completions", json=asked)
        await plain.post("/v1/chat/completions", json={**asked, "tool_choice": "auto"})
        forced, free = await recorded(client, 2)
    assert (forced.constrained, free.constrained) == (True, False)
    assert engine.bodies[0]["tool_choice"] == "required"


async def test_images_pass_to_engines_that_take_messages(plain, gateway):
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    content = [{"type": "image", "source": source}, {"type": "text", "text": "What is it?"}]
    async with registered(gateway) as engine:
        await plain.post("/v1/messages", json={"messages": [{"role": "user", "content": content}], "max_tokens": 9})
    image, text = engine.bodies[0]["messages"][0]["content"]
    assert image == {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    assert text == {"type": "text", "text": "What is it?"}


async def test_a_request_sent_again_takes_over_the_answer_under_way(plain, client, gateway):
    async with registered(gateway, token_delay_s=0.1) as engine:
        with pytest.raises(httpx.TimeoutException):
            await plain.post("/v1/chat/completions", json={"messages": [HI]}, timeout=0.3)
        answer = await plain.post("/v1/chat/completions", json={"messages": [HI]})
        assert answer.status_code == 200
        assert len(await recorded(client, 1)) == len(engine.bodies) == 1
