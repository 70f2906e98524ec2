"""`manege doctor --engine` on servers of every kind: what each can do, the mode that follows, and no harm done."""

import asyncio
import sys
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route

from manege.engine.base import Sampling, Weights
from manege.engine.examining.examine import Verdict, examine
from manege.engine.local import LocalEngine
from manege.engine.scripted import ScriptedEngine, hashed_reply
from manege.engine.wires import token_engine
from manege.gateway.server import Server
from manege.model.folder import open_folder
from manege.types import PolicyVersion
from tests.chat_engine import chat_engine, raw_server
from tests.conftest import TINY_MODEL
from tests.sglang_wire import SglangServer
from tests.system.test_engine_proof import FOLDER, Untempered, engine_of, token_wire

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def over(make_app, kind=LocalEngine):
    async with engine_of(kind) as engine, Server(make_app(engine)) as server:
        yield engine, server.url


def sglang(engine, **options):
    options = {"incremental": True, **options}
    return SglangServer(engine, decode=FOLDER.tokenizer.decode, context_limit=256, **options)


async def doctor(url, *words):
    """Exit code and lines."""
    process = await asyncio.create_subprocess_exec(
        *(Path(sys.executable).with_name("manege"), "doctor", "--engine", url, *words),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    out, _ = await process.communicate()
    return process.returncode, [line.replace(url, "URL") for line in out.decode().splitlines()]


async def examined(url, folder=None):
    """Texts that are ok, texts that are missing, and the verdict."""
    *findings, verdict = [found async for found in examine(url, folder)]
    assert isinstance(verdict, Verdict)
    return [each.text for each in findings if each.ok], [each.text for each in findings if each.ok is False], verdict


async def test_an_engine_of_ours_is_told_in_lines_that_end_with_its_mode():
    async with over(token_wire) as (_, url):
        code, lines = await doctor(url, "--model", str(TINY_MODEL))
    assert lines[0] == f"ok       manege engine at URL, model {TINY_MODEL}"
    assert lines[1:8] == [
        "ok       256 tokens of context",
        "ok       token ids in, token ids and log-probabilities out (8 sampled)",
        "ok       log-probabilities at temperature 0.6: those of softmax(logits / T)",
        "ok       its tokens are those of the model folder",
        "ok       the version of its weights: '0'",
        "ok       pause and resume (tried for a moment, with everything kept)",
        "ok       new weights from a folder, by /collective_rpc (not tried)",
    ]
    assert (code, lines[-1]) == (0, 'ok       mode tokens: gateway.engine_url = "URL"')


async def test_sglang_is_told_by_its_own_routes_and_keeps_its_memory():
    async with engine_of(LocalEngine) as engine:
        server = sglang(engine)
        async with Server(server.app) as serving:
            code, lines = await doctor(f"{serving.url}/v1")
        assert server.has_memory
        assert (server.pause_mode, server.weight_version, server.num_running) == (None, "default", 0)
        assert not (await engine.info()).paused
    assert lines[0].startswith("ok       SGLang 0.5.23 at")
    assert code == 0
    assert lines[-1].startswith("ok       mode tokens: gateway.engine_url")
    assert lines[-1].endswith(', engine_wire = "sglang"')


async def test_settings_that_a_server_lacks_are_named():
    async with over(lambda engine: sglang(engine, incremental=False, grammar_backend="xgrammar").app) as (_, url):
        _, lines = await doctor(url)
    assert lines[-2:] == ["add      --incremental-streaming-output", "add      --grammar-backend llguidance"]


@pytest.mark.parametrize("make_app", [token_wire, lambda engine: sglang(engine).app], ids=["vllm", "sglang"])
async def test_untempered_log_probabilities_leave_no_mode(make_app):
    async with over(make_app, Untempered) as (_, url):
        code, lines = await doctor(url)
    assert code == 1
    assert "missing  log-probabilities at temperature 0.6: not those of softmax(logits / T)" in lines
    assert any(line.startswith("missing  no mode of ours") for line in lines)


async def test_a_server_that_runs_requests_is_not_paused():
    paths = []

    def noting(app):
        async def noted(scope, receive, send):
            paths.append(scope["path"])
            await app(scope, receive, send)

        return noted

    engine = ScriptedEngine(hashed_reply(num_tokens=5_000, first_id=97, last_id=122), token_delay_s=0.005)
    async with Server(noting(token_wire(engine))) as server:
        client = token_engine(server.url, "vllm")
        async with aclosing(client.generate([5], Sampling(max_new_tokens=5_000))) as chunks:
            await anext(chunks)
            code, lines = await doctor(server.url)
        assert "unknown  pause: a route for it; not tried, since 1 requests run" in lines
        assert code == 0
        assert "/v1/models" in paths
        assert {"/pause", "/resume"} & set(paths) == {"/pause"}  # by OPTIONS only
        assert not (await engine.info()).paused
        await client.close()
    await engine.close()


async def test_weights_that_cannot_change_leave_evaluation():
    def app(engine):
        made = token_wire(engine)
        made.router.routes[:] = [
            route for route in made.router.routes if route.path not in ("/collective_rpc", "/pause", "/is_paused")
        ]
        return made

    async with over(app) as (_, url):
        _, missing, verdict = await examined(url)
    assert (verdict.mode, verdict.can_train) == ("tokens", False)
    assert verdict.options == ["VLLM_SERVER_DEV_MODE=1 in its environment"]
    assert "for evaluation only" in str(verdict)
    assert (
        missing
        == [
            "pause: it has no such route",
            "new weights from a folder, by /collective_rpc: it has no such route",
            "no chat endpoint: it has no /v1/chat/completions",
        ][:2]
    )


async def test_weights_stay_as_they_are():
    async with over(token_wire) as (engine, url):
        await engine.load(Weights(kind="folder", folder=str(TINY_MODEL)), PolicyVersion(3))
        ok, _, _ = await examined(url)
        assert "the version of its weights: '3'" in ok
        assert (await engine.info()).version == 3


async def test_another_tokenizer_is_found_out():
    async with over(token_wire) as (_, url):
        _, missing, verdict = await examined(url, open_folder("smollm2"))
    assert "its tokens are NOT those of the model folder" in missing
    assert verdict.mode is None


async def test_a_chat_server_that_tells_its_ids_takes_messages():
    async with chat_engine() as (_, url):
        ok, missing, verdict = await examined(url)
    assert "chat answers, whole and streamed, carry token ids and log-probabilities" in ok
    assert "tools in chat are taken" in ok
    assert (len(missing), verdict.mode) == (1, "messages")


def without_ids(body):
    for choice in body["choices"]:
        choice.pop("token_ids", None)
    return body


async def test_a_chat_server_that_tells_no_ids_is_none_for_us():
    async with chat_engine(change=without_ids) as (_, url):
        code, lines = await doctor(url)
    assert code == 1
    assert any("returned no token ids of its answer" in line for line in lines)


async def hello(_request):
    return JSONResponse({"hello": "world"})


async def text(_request):
    return PlainTextResponse("<html>")


@pytest.mark.parametrize("route", [hello, text])
async def test_a_server_that_is_no_engine_is_said_to_be_none(route):
    routes = [Route("/{path:path}", route, methods=["GET", "POST", "OPTIONS"])]
    async with Server(Starlette(routes=routes)) as server:
        code, lines = await doctor(server.url)
    assert code == 1
    assert lines[0].startswith("missing  URL is no engine: /v1/models answered 200")


async def test_garbage_and_nothing_are_no_engines():
    async with raw_server(b"garbage\r\n\r\n") as url:
        code, lines = await doctor(url)
        assert (code, "does not speak HTTP" in lines[0]) == (1, True)
    code, lines = await doctor("http://127.0.0.1:9")
    assert (code, "cannot be reached" in lines[0]) == (1, True)
    assert lines[1] == "missing  no mode of ours: nothing that it samples can be learnt from"


async def test_a_paused_server_is_left_paused():
    async with over(token_wire) as (engine, url):
        await engine.pause()
        code, lines = await doctor(url)
        assert (await engine.info()).paused
    assert code == 1
    assert "missing  it is paused, and is left so: nothing can be sampled before POST /resume" in lines
