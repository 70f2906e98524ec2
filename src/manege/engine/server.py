"""Serves any engine on vLLM's token wire, so that `upstream` speaks to ours and to vLLM in the same way.

`POST /inference/v1/generate` and `POST /v1/completions` take token ids and give token ids, log-probabilities and
versions, streamed if `stream` is set; `structured_outputs` with a `json` schema or a Lark `grammar` constrains them.
`/pause`, `/resume`, `/is_paused`, `/collective_rpc` (method `reload_weights`), `/reset_prefix_cache`,
`/update_weight_version` and `/weight_info` change weights; `/metrics` says how busy the engine is. A caller that goes
away ends its generation. There are no keys: bind it where only the gateway and the trainer reach it.

`/pause` takes vLLM's modes: `abort` (vLLM's default) ends running answers with finish reason `abort`, `wait` answers
when they have ended by themselves, `keep` leaves them connected. What is kept goes on from its ids, or with
`clear_cache=false` over the keys and values that it has, which its events then say (`old_cache`; vLLM lacks that).

New weights take effect with their version: `reload_weights` notes the folder, `update_weight_version` loads it. Where
a train engine changes the weights in this process's memory, the version alone says that they are new.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from manege.engine.answers import Form, TextForm, TokenForm, stream, whole
from manege.engine.base import Chunk, Constraint, Engine, Sampling, Weights, collect
from manege.engine.constraints import json_constraint
from manege.engine.under_way import UnderWay
from manege.engine.vllm_metrics import write_metrics
from manege.errors import ProtocolError
from manege.http import ClientGone, Connection, answer, error_handlers, read_object
from manege.types import JsonObject, PolicyVersion

__all__ = ["engine_app"]

T = TypeVar("T")


def engine_app(
    engine: Engine,
    *,
    encode: Callable[[str], Sequence[int]],
    decode: Callable[[Sequence[int]], str],
    shares_weights: bool = False,
) -> Starlette:
    """`encode` and `decode` serve text prompts and the text of `/v1/completions`; `Renderer` has both.
    `shares_weights`: with a train engine in this process."""
    server = _Server(engine, encode, decode, Weights(kind="shared") if shares_weights else None)
    posts = {
        "/inference/v1/generate": server.generate,
        "/v1/completions": server.completions,
        "/pause": server.pause,
        "/resume": server.resume,
        "/collective_rpc": server.collective_rpc,
        "/reset_prefix_cache": server.reset_prefix_cache,
        "/update_weight_version": server.update_weight_version,
    }
    gets = {
        "/health": server.health,
        "/v1/models": server.models,
        "/is_paused": server.is_paused,
        "/weight_info": server.weight_info,
        "/metrics": server.metrics,
    }
    routes = [Route(path, _answering(handler), methods=["POST"]) for path, handler in posts.items()]
    routes += [Route(path, _answering(handler), methods=["GET"]) for path, handler in gets.items()]
    return Starlette(routes=routes, exception_handlers=error_handlers)


class _Server:
    def __init__(
        self,
        engine: Engine,
        encode: Callable[[str], Sequence[int]],
        decode: Callable[[Sequence[int]], str],
        shared: Weights | None,
    ) -> None:
        self._engine = engine
        self._under_way = UnderWay(engine)
        self._encode = encode
        self._decode = decode
        self._shared = self._weights = shared

    async def generate(self, request: Request) -> ASGIApp:
        body = await read_object(request)
        prompt = _field(body, "token_ids", list)
        return await self._answer(request, TokenForm(), prompt, body, body.get("sampling_params") or {})

    async def completions(self, request: Request) -> ASGIApp:
        body = await read_object(request)
        prompt = body.get("prompt")
        prompt = self._encode(prompt) if isinstance(prompt, str) else _field(body, "prompt", list)
        form = TextForm(self._decode, prompt if body.get("return_token_ids") else None)
        return await self._answer(request, form, prompt, body, body)

    async def pause(self, request: Request) -> JsonObject:
        match request.query_params.get("mode", "abort"):
            case "abort":
                await self._under_way.abort()
            case "wait":
                await self._under_way.drain()
            case "keep":
                await self._engine.pause(keep=request.query_params.get("clear_cache", "true").lower() == "false")
            case mode:
                raise ProtocolError(f"mode of /pause is {mode!r}; want abort, wait or keep")
        return {"status": "paused"}

    async def resume(self, request: Request) -> JsonObject:
        await self._under_way.resume()
        return {"status": "resumed"}

    async def is_paused(self, request: Request) -> JsonObject:
        return {"is_paused": self._under_way.is_held or (await self._engine.info()).paused}

    async def collective_rpc(self, request: Request) -> JsonObject:
        body = await read_object(request)
        if body.get("method") != "reload_weights":
            raise ProtocolError(f"method {body.get('method')!r} is not supported; only reload_weights is")
        self._weights = Weights(kind="folder", folder=_field(_field(body, "kwargs", dict), "weights_path", str))
        return {"results": [None]}

    async def reset_prefix_cache(self, request: Request) -> JsonObject:
        # Loading weights drops the cache.
        return {}

    async def update_weight_version(self, request: Request) -> JsonObject:
        body = await read_object(request)
        if self._weights is None:
            raise ProtocolError("no weights to load: POST /collective_rpc with reload_weights first")
        version = _field(body, "new_version", str)
        if not version.isdecimal():
            raise ProtocolError(f"new_version is {version!r}; want a number as text")
        await self._engine.load(self._weights, PolicyVersion(int(version)))
        self._weights = self._shared
        return {"success": True, "new_version": version}

    async def weight_info(self, request: Request) -> JsonObject:
        return {"weight_version": str((await self._engine.info()).version)}

    async def metrics(self, request: Request) -> ASGIApp:
        return PlainTextResponse(write_metrics(await self._engine.info()))

    async def health(self, request: Request) -> JsonObject:
        await self._engine.info()
        return {}

    async def models(self, request: Request) -> JsonObject:
        info = await self._engine.info()
        model = {"id": info.model, "object": "model", "owned_by": "manege", "max_model_len": info.context_limit}
        return {"object": "list", "data": [model]}

    async def _answer(
        self, request: Request, form: Form, prompt_ids: Sequence[int], body: JsonObject, params: JsonObject
    ) -> ASGIApp:
        chunks = self._under_way.generate(prompt_ids, _sampling(params))
        if body.get("stream"):
            has_usage = bool((body.get("stream_options") or {}).get("include_usage"))
            events = stream(form, chunks, num_prompt=len(prompt_ids), has_usage=has_usage)
            return _EventStream(events, chunks)
        async with Connection(request.receive) as connection:
            generation = await connection.run(collect(chunks))
        return answer(whole(form, generation, num_prompt=len(prompt_ids)))


class _EventStream:
    """A response that starts with the first event, so that an engine that fails before it is an error status, and that
    stops the engine as soon as the caller goes away."""

    def __init__(self, events: AsyncIterator[bytes], chunks: AsyncGenerator[Chunk, None]) -> None:
        self._events, self._chunks = events, chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._chunks), Connection(receive) as connection:
            try:
                await connection.run(self._send_all(send))
            except ClientGone:
                pass

    async def _send_all(self, send: Send) -> None:
        has_started = False
        async for event in self._events:
            if not has_started:
                headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                has_started = True
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


def _answering(handler: Callable[[Request], Coroutine[Any, Any, JsonObject | ASGIApp]]) -> Callable[[Request], Any]:
    async def endpoint(request: Request) -> ASGIApp:
        result = await handler(request)
        return result if callable(result) else answer(result)

    return endpoint


def _field(body: JsonObject, key: str, kind: type[T]) -> T:
    value = body.get(key)
    if not isinstance(value, kind):
        raise ProtocolError(f"{key} is {value!r}; want {kind.__name__}")
    return value


def _sampling(params: JsonObject) -> Sampling:
    stop = params.get("stop") or ()
    try:
        return Sampling(
            temperature=float(params.get("temperature", 1.0)),
            top_p=float(params.get("top_p", 1.0)),
            top_k=max(int(params.get("top_k", 0)), 0),
            max_new_tokens=int(params.get("max_tokens") or 16),
            stop_ids=frozenset(params.get("stop_token_ids") or ()),
            stop_strings=[stop] if isinstance(stop, str) else list(stop),
            seed=params.get("seed"),
            constraint=_constraint(params.get("structured_outputs")),
        )
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"the sampling parameters cannot be read: {error}") from error


def _constraint(wanted: Any) -> Constraint | None:
    if wanted is None:
        return None
    match wanted:
        case {"json": dict() as schema}:
            return json_constraint(schema)
        case {"grammar": str() as grammar}:
            return Constraint(grammar=grammar)
    raise ProtocolError(f"structured_outputs is {wanted!r}; want a `json` schema or a Lark `grammar`")
