"""The same answers by the clients that are not asynchronous, which most harnesses use."""

import anthropic
import anyio.to_thread
import openai
import pytest
from google import genai

from tests.system.agents.asking import calls_of, user

pytestmark = pytest.mark.anyio


def by_openai(url, key):
    with openai.OpenAI(base_url=f"{url}/v1", api_key=key) as client:
        asked = {"model": "m", "messages": [user("say Hi")]}
        stream = client.chat.completions.create(**asked, stream=True)
        yield client.chat.completions.create(**asked).choices[0].message.content
        yield "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        yield client.responses.create(model="m", input="say Hi").output_text
        with client.responses.stream(model="m", input="say Hi") as response:
            yield response.until_done().get_final_response().output_text
        yield client.completions.create(model="m", prompt="say Hi\nassistant\n").choices[0].text


def by_anthropic(url, key):
    for how in ({"api_key": key}, {"auth_token": key, "api_key": None}):
        with anthropic.Anthropic(base_url=url, **how) as client:
            asked = {"model": "m", "max_tokens": 20, "messages": [user("say Hi")]}
            yield client.messages.create(**asked).content[0].text
            with client.messages.stream(**asked) as stream:
                yield stream.get_final_text()
            assert client.messages.count_tokens(model="m", messages=[user("say Hi")]).input_tokens > 5


def by_google(url, key):
    client = genai.Client(api_key=key, http_options={"base_url": url})
    asked = {"model": "m", "contents": "say Hi"}
    yield client.models.generate_content(**asked).text
    yield "".join(chunk.text or "" for chunk in client.models.generate_content_stream(**asked))
    assert client.models.count_tokens(**asked).total_tokens > 5


@pytest.mark.parametrize("ask", [by_openai, by_anthropic, by_google])
async def test_answers_are_the_same(gateway, key, store, ask):
    texts = await anyio.to_thread.run_sync(lambda: list(ask(gateway.url, key)))
    assert set(texts) == {"Hi"}
    assert len(await calls_of(store)) == len(texts)
