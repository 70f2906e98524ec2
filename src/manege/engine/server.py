"""Serves any engine on vLLM's token wire, so that `upstream` speaks to ours and to vLLM in the same way.

`POST /inference/v1/generate` and `POST /v1/completions` take token ids and give token ids, log-probabilities and
version spans; `/pause`, `/resume`, `/is_paused`, `/collective_rpc` (method `reload_weights`), `/reset_prefix_cache`,
`/update_weight_version` and `/weight_info` change weights. A caller that goes away ends its generation. There are no
keys: bind it where only the gateway and the trainer reach it.

New weights take effect with their version: `reload_weights` notes the folder, `update_weight_version` loads it.
"""

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from manege.engine.base import Engine, Generation, Sampling, Weights, collect
from manege.errors import ProtocolError
from manege.http import Connection, answer, error_handlers, read_object
from manege.types import JsonObject, PolicyVersion

__all__ = ["engine_app"]

T = TypeVar("T")


def engine_app(
    engine: Engine, *, encode: Callable[[str], Sequence[int]], decode: Callable[[Sequence[int]], str]
) -> Starlette:
    """`encode` and `decode` serve text prompts and the text of `/v1/completions`; `Renderer` has both."""
    server = _Server(engine, encode, decode)
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
    }
    routes = [Route(path, _answering(handler), methods=["POST"]) for path, handler in posts.items()]
    routes += [Route(path, _answering(handler), methods=["GET"]) for path, handler in gets.items()]
    return Starlette(routes=routes, exception_handlers=error_handlers)


class _Server:
    def __init__(
        self, engine: Engine, encode: Callable[[str], Sequence[int]], decode: Callable[[Sequence[int]], str]
    ) -> None:
        self._engine = engine
        self._encode = encode
        self._decode = decode
        self._weights: Weights | None = None

    async def generate(self, request: Request) -> JsonObject:
        body = await read_object(request)
        prompt = _field(body, "token_ids", list)
        generation = await self._run(request, prompt, body.get("sampling_params") or {})
        content = [
            {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
            for token, logprob in zip(generation.ids_R.tolist(), generation.logprobs_R.tolist(), strict=True)
        ]
        choice = {**_choice(generation), "logprobs": {"content": content}}
        return {"request_id": body.get("request_id"), "choices": [choice], "usage": _usage(prompt, generation)}

    async def completions(self, request: Request) -> JsonObject:
        body = await read_object(request)
        prompt = body.get("prompt")
        prompt = self._encode(prompt) if isinstance(prompt, str) else _field(body, "prompt", list)
        generation = await self._run(request, prompt, body)
        ids = generation.ids_R.tolist()
        logprobs = {
            "tokens": [f"token_id:{token}" for token in ids],
            "token_logprobs": generation.logprobs_R.tolist(),
            "top_logprobs": None,
            "text_offset": [],
        }
        choice = {**_choice(generation), "text": self._decode(ids), "logprobs": logprobs, "prompt_token_ids": prompt}
        return {"object": "text_completion", "choices": [choice], "usage": _usage(prompt, generation)}

    async def pause(self, request: Request) -> JsonObject:
        if request.query_params.get("mode", "abort") != "keep":
            raise ProtocolError("only /pause?mode=keep is supported: running answers keep their place")
        await self._engine.pause()
        return {"status": "paused"}

    async def resume(self, request: Request) -> JsonObject:
        await self._engine.resume()
        return {"status": "resumed"}

    async def is_paused(self, request: Request) -> JsonObject:
        return {"is_paused": (await self._engine.info()).paused}

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
        self._weights = None
        return {"success": True, "new_version": version}

    async def weight_info(self, request: Request) -> JsonObject:
        return {"weight_version": str((await self._engine.info()).version)}

    async def health(self, request: Request) -> JsonObject:
        await self._engine.info()
        return {}

    async def models(self, request: Request) -> JsonObject:
        info = await self._engine.info()
        model = {"id": info.model, "object": "model", "owned_by": "manege", "max_model_len": info.context_limit}
        return {"object": "list", "data": [model]}

    async def _run(self, request: Request, prompt_ids: Sequence[int], params: JsonObject) -> Generation:
        sampling = _sampling(params)
        async with Connection(request.receive) as connection:
            return await connection.run(collect(self._engine.generate(prompt_ids, sampling)))


def _answering(handler: Callable[[Request], Coroutine[Any, Any, JsonObject]]) -> Callable[[Request], Any]:
    async def endpoint(request: Request) -> Response:
        return answer(await handler(request))

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
        )
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"the sampling parameters cannot be read: {error}") from error


def _choice(generation: Generation) -> dict[str, Any]:
    starts = [span.first_token for span in generation.spans]
    ends = [*starts[1:], len(generation.ids_R)]
    return {
        "index": 0,
        "token_ids": generation.ids_R.tolist(),
        "finish_reason": generation.finish_reason.value,
        "weight_versions": [
            {"version": str(span.version), "start": start, "end": end}
            for span, start, end in zip(generation.spans, starts, ends, strict=True)
        ],
    }


def _usage(prompt_ids: Sequence[int], generation: Generation) -> JsonObject:
    return {
        "prompt_tokens": len(prompt_ids),
        "completion_tokens": len(generation.ids_R),
        "total_tokens": len(prompt_ids) + len(generation.ids_R),
        "prompt_tokens_details": {"cached_tokens": generation.num_cached},
    }
