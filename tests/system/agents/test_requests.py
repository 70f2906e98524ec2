"""What arrives: encodings, sizes, nonsense, keys, routes; each answered in the caller's protocol."""

import asyncio
import gzip
import json

import pytest
import zstandard

from tests.conftest import OPERATOR_KEY
from tests.system.agents.asking import calls_of, user

pytestmark = pytest.mark.anyio

BODY = {"messages": [user("say Hi")], "input": "say Hi", "max_tokens": 50, "model": "any"}
GEMINI = {"contents": [{"role": "user", "parts": [{"text": "say Hi"}]}]}
PATHS = {
    "/v1/chat/completions": BODY,
    "/v1/responses": BODY,
    "/v1/messages": BODY,
    "/v1/messages/count_tokens": BODY,
    "/v1/completions": {"prompt": "say Hi\nassistant\n"},
    "/v1beta/models/any:generateContent": GEMINI,
    "/v1beta/models/any:streamGenerateContent": GEMINI,
    "/v1beta/models/any:countTokens": GEMINI,
}
LONG_PATHS = {
    "/v1beta": "/gemini",
    "/v1/messages": "/anthropic",
    "/v1": "/openai",
}


def assert_error_shape(path, status, body):
    """Each protocol's own error object."""
    if "messages" in path:
        assert (body["type"], type(body["error"]["message"])) == ("error", str)
    elif "v1beta" in path:
        assert (body["error"]["code"], type(body["error"]["status"])) == (status, str)
    else:
        assert type(body["error"]["message"]) is type(body["error"]["type"]) is str


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("header", ["authorization", "x-api-key", "x-goog-api-key", "?key="])
async def test_every_route_takes_every_form_of_the_key(http, key, path, header):
    request = http.build_request("POST", path, json=PATHS[path])
    del request.headers["authorization"]
    if header == "?key=":
        request.url = request.url.copy_add_param("key", key)
    else:
        request.headers[header] = f"Bearer {key}" if header == "authorization" else key
    answer = await http.send(request)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("path", PATHS)
async def test_every_route_has_a_long_path(http, store, path):
    prefix = next(prefix for start, prefix in LONG_PATHS.items() if path.startswith(start))
    long_path = f"/proxy/rollout/r1/attempt/0/mode/train{prefix}{path}"
    answer = await http.post(long_path, json=PATHS[path], headers={"authorization": f"Bearer {OPERATOR_KEY}"})
    assert answer.status_code == 200, answer.text
    assert len(await calls_of(store)) == (0 if "count" in path else 1)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("body", "status"),
    [(b"[]", 400), (b'"x"', 400), (b"{", 400), (b"\xff\xfe", 400), (b'{"model": 1e999}', 400), (b"{}", 400)],
)
async def test_nonsense_is_400_in_the_protocols_shape(http, path, body, status):
    answer = await http.post(path, content=body)
    assert answer.status_code == status, answer.text
    assert_error_shape(path, status, answer.json())


@pytest.mark.parametrize("path", PATHS)
async def test_unknown_key_is_401_in_the_protocols_shape(http, path):
    for headers in ({"authorization": "Bearer mk-0-00-r1"}, {"authorization": "Bearer sk-other"}):
        answer = await http.post(path, json=PATHS[path], headers=headers)
        assert answer.status_code == 401
        assert_error_shape(path, 401, answer.json())


async def test_key_that_outlived_its_rollout_is_401(http, store):
    await store.delete_rollout("r1")
    assert (await http.post("/v1/messages", json=BODY)).status_code == 401


async def test_body_that_is_nested_too_deeply_is_400(http):
    deep = b'{"messages":[{"role":"user","content":"Hi"}],"metadata":' + b"[" * 500 + b"]" * 500 + b"}"
    answer = await http.post("/v1/chat/completions", content=deep)
    assert answer.status_code == 400
    assert "nested deeper than" in answer.text


async def test_agents_key_on_an_operators_route_is_403(http):
    assert (await http.get("/proxy/state")).status_code == 403


@pytest.mark.parametrize(
    ("encoding", "pack"),
    [("gzip", gzip.compress), ("zstd", zstandard.ZstdCompressor().compress), ("identity", bytes)],
)
async def test_bodies_may_be_packed(http, encoding, pack):
    packed = pack(json.dumps(BODY).encode())
    answer = await http.post("/v1/chat/completions", content=packed, headers={"content-encoding": encoding})
    assert answer.json()["choices"][0]["message"]["content"] == "Hi"


@pytest.mark.parametrize(
    ("encoding", "body"),
    [("gzip", b"no gzip"), ("zstd", b"no zstd"), ("br", b"any"), ("gzip", gzip.compress(b"{}")[:-9])],
)
async def test_wrongly_packed_body_is_400(http, encoding, body):
    answer = await http.post("/v1/messages", content=body, headers={"content-encoding": encoding})
    assert answer.status_code == 400, answer.text
    assert_error_shape("/v1/messages", 400, answer.json())


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.ZstdCompressor().compress, bytes])
async def test_body_beyond_the_limit_is_413_however_it_is_packed(http, gateway, pack):
    text = json.dumps({"messages": [user("x" * (65 * 2**20))]}).encode()
    encoding = {gzip.compress: "gzip", bytes: "identity"}.get(pack, "zstd")
    answer = await http.post("/v1/chat/completions", content=pack(text), headers={"content-encoding": encoding})
    assert answer.status_code == 413
    assert "gateway.max_body_mb" in answer.json()["error"]["message"]


async def test_chunked_body(http):
    async def parts():
        for part in json.dumps(BODY).encode().split(b","):
            yield part if part.endswith(b"}") else part + b","

    answer = await http.post("/v1/chat/completions", content=parts())
    assert answer.request.headers["transfer-encoding"] == "chunked"
    assert answer.json()["choices"][0]["message"]["content"] == "Hi"


async def test_expect_continue_is_answered_before_the_body_comes(gateway, key):
    body = json.dumps(BODY).encode()
    reader, writer = await asyncio.open_connection(*gateway.url.removeprefix("http://").split(":"))
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nConnection: close\r\n"
        f"Content-Length: {len(body)}\r\nExpect: 100-continue\r\n\r\n"
    )
    writer.write(head.encode())
    assert (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)).startswith(b"HTTP/1.1 100")
    writer.write(body)
    assert b'"Hi"' in await asyncio.wait_for(reader.read(), 5)
    writer.close()


async def test_websocket_is_answered_426_at_once(http):
    headers = {
        "connection": "Upgrade",
        "upgrade": "websocket",
        "sec-websocket-version": "13",
        "sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ==",
    }
    assert (await http.get("/v1/responses", headers=headers)).status_code == 426


@pytest.mark.parametrize(("method", "path"), [("HEAD", "/api/hello"), ("GET", "/api/v1/models"), ("POST", "/v1/what")])
async def test_unknown_paths_are_404(http, method, path):
    assert (await http.request(method, path)).status_code == 404


async def test_model_lists_in_three_shapes(agent, claude, gemini):
    assert [model.id for model in (await agent.models.list()).data] == ["smollm2"]
    assert [model.id for model in (await claude.models.list()).data] == ["smollm2"]
    assert [model.name async for model in await gemini.aio.models.list()] == ["models/smollm2"]
    assert (await agent.models.retrieve("gpt-9")).id == "gpt-9"
    assert (await claude.models.retrieve("claude-9")).id == "claude-9"
    assert (await gemini.aio.models.get(model="gemini-9")).name == "models/gemini-9"


async def test_unknown_fields_and_headers_are_kept_and_keys_are_not(http, key, store):
    body = {**BODY, "metadata": {"user_id": "u"}, "x_new": [1]}
    await http.post("/v1/messages", json=body, headers={"x-claude-code-session-id": "s1", "anthropic-beta": "b"})
    [call] = await calls_of(store)
    assert (call.request["metadata"], call.request["x_new"], call.protocol) == ({"user_id": "u"}, [1], "anthropic")
    assert (call.headers["x-claude-code-session-id"], call.headers["anthropic-beta"]) == ("s1", "b")
    assert key not in str(call)


async def test_images_are_refused_by_a_model_that_reads_text(http):
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    answer = await http.post("/v1/chat/completions", json={"messages": [user([part])]})
    assert (answer.status_code, "reads text only" in answer.text) == (400, True)
