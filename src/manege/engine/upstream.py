"""Client of an engine that speaks vLLM's token wire: vLLM itself, or `engine.server`.

An answer is asked for whole and comes as one chunk per policy version, since vLLM's streams carry no versions.
`POST /inference/v1/generate` is preferred; a server without it (vLLM needs `--enable-scale-out`) is asked by
`/v1/completions` with token ids. Cancelling the reader closes the connection, and the server then stops sampling. vLLM
must run with `--logprobs-mode processed_logprobs`, or its log-probabilities are not those of softmax(logits /
temperature), and with `VLLM_SERVER_DEV_MODE=1`, or its weights cannot change.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import aiohttp
import orjson

from manege.engine.base import Chunk, EngineInfo, Sampling, Weights
from manege.errors import ContextOverflowError, EngineError
from manege.logs import get_logger, kv
from manege.types import FinishReason, JsonObject, PolicyVersion

__all__ = ["UpstreamEngine"]

_log = get_logger("engine")

_UNKNOWN_LOGPROB = -9999.0
"""What vLLM writes for a log-probability that it does not have."""
_CONNECT_S = 10.0
"""An engine on the same network that does not answer a connection for so long is down."""


class UpstreamEngine:
    """See `engine.base.Engine`."""

    def __init__(self, url: str, *, version: int = 0) -> None:
        """`url`: root of the server, with or without `/v1`. `version`: of its weights, until the server says."""
        self._url = url.rstrip("/").removesuffix("/v1")
        self._session: aiohttp.ClientSession | None = None
        self._model: str | None = None
        self._context_limit = 0
        self._version = PolicyVersion(version)
        self._has_generate = True
        self._num_running = 0
        self._requests: set[asyncio.Task[tuple[int, bytes]]] = set()
        self._closed = False

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> AsyncGenerator[Chunk, None]:
        if self._model is None:
            await self._read_model()
        room = self._context_limit - len(prompt_ids)
        if room < 1:
            raise ContextOverflowError(
                f"the prompt has {len(prompt_ids)} tokens and the context {self._context_limit}; shorten the prompt"
            )
        params = _params(sampling, min(sampling.max_new_tokens, room))
        self._num_running += 1
        try:
            body = await self._ask(list(prompt_ids), params)
        finally:
            self._num_running -= 1
        try:
            chunks = _chunks(body, self._version)
        except (LookupError, TypeError, ValueError) as error:
            raise EngineError(f"{self._url} answered in a shape that is not vLLM's: {error!r}") from error
        for chunk in chunks:
            yield chunk

    async def pause(self) -> None:
        await self._call("POST", "/pause?mode=keep")

    async def resume(self) -> None:
        status, reply = await self._send("POST", "/resume")
        # A server that cannot pause (vLLM without VLLM_SERVER_DEV_MODE) need not resume.
        if status != 404:
            _checked(status, reply, f"{self._url}/resume")

    async def load(self, weights: Weights, version: PolicyVersion) -> None:
        if weights.folder is None:
            raise EngineError(f"weights of kind {weights.kind!r} cannot be sent to {self._url}; publish a folder")
        rpc = {"method": "reload_weights", "kwargs": {"weights_path": weights.folder}}
        await self._call("POST", "/collective_rpc", rpc)
        await self._call("POST", "/reset_prefix_cache")
        await self._call("POST", "/update_weight_version", {"new_version": str(version)})
        self._version = version

    async def info(self) -> EngineInfo:
        await self._read_model()
        paused = await self._call("GET", "/is_paused")
        assert self._model is not None
        return EngineInfo(
            model=self._model,
            context_limit=self._context_limit,
            version=self._version,
            num_running=self._num_running,
            paused=bool(paused.get("is_paused")),
        )

    async def close(self) -> None:
        self._closed = True
        # A closed session would leave them waiting for ever.
        for request in self._requests:
            request.cancel()
        if self._session is not None:
            await self._session.close()

    async def _read_model(self) -> None:
        models = await self._call("GET", "/v1/models")
        status, reply = await self._send("GET", "/weight_info")
        try:
            if status != 404:
                info = _checked(status, reply, f"{self._url}/weight_info")
                self._version = _number(info.get("weight_version"), self._version)
            model = models["data"][0]
            self._context_limit, self._model = int(model["max_model_len"]), str(model["id"])
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise EngineError(f"{self._url}/v1/models answered in a shape that is not vLLM's: {error!r}") from error

    async def _ask(self, prompt_ids: list[int], params: dict[str, Any]) -> JsonObject:
        if self._has_generate:
            body = {"token_ids": prompt_ids, "sampling_params": {**params, "logprobs": 0}}
            status, reply = await self._send("POST", "/inference/v1/generate", body)
            if status not in (403, 404):
                return _checked(status, reply, f"{self._url}/inference/v1/generate")
            self._has_generate = False
            _log.info(kv("the engine has no token wire; using text completions with token ids", url=self._url))
        body = {"model": self._model, "prompt": prompt_ids, **params, "logprobs": 0, "return_token_ids": True}
        return await self._call("POST", "/v1/completions", body)

    async def _call(self, method: str, path: str, body: JsonObject | None = None) -> Any:
        status, reply = await self._send(method, path, body)
        return _checked(status, reply, self._url + path)

    async def _send(self, method: str, path: str, body: JsonObject | None = None) -> tuple[int, bytes]:
        if self._closed:
            raise EngineError(f"the client of the engine at {self._url} is closed; make a new one")
        request = asyncio.create_task(self._exchange(method, path, body), name="engine-request")
        self._requests.add(request)
        try:
            return await request
        except asyncio.CancelledError:
            if self._closed:
                raise EngineError(f"the client of the engine at {self._url} was closed during a request") from None
            raise
        finally:
            self._requests.discard(request)

    async def _exchange(self, method: str, path: str, body: JsonObject | None) -> tuple[int, bytes]:
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S)
            # The gateway bounds its calls; a second limit here would only hide them.
            connector = aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(connector=connector, timeout=timeout)
        data = None if body is None else orjson.dumps(body)
        headers = {"content-type": "application/json"}
        try:
            async with self._session.request(method, self._url + path, data=data, headers=headers) as response:
                return response.status, await response.read()
        except (TimeoutError, aiohttp.ClientError) as error:
            raise EngineError(f"the engine at {self._url} cannot be reached: {error!r}; is it running?") from error


def _checked(status: int, reply: bytes, url: str) -> Any:
    if status >= 300:
        raise EngineError(f"{url} answered {status}: {reply[:500].decode(errors='replace')}")
    try:
        return orjson.loads(reply) if reply else {}
    except orjson.JSONDecodeError as error:
        raise EngineError(f"{url} answered no JSON: {reply[:200]!r}") from error


def _params(sampling: Sampling, max_new_tokens: int) -> dict[str, Any]:
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_tokens": max_new_tokens,
        "stop_token_ids": sorted(sampling.stop_ids),
        "stop": list(sampling.stop_strings),
        "include_stop_str_in_output": True,
        **({} if sampling.seed is None else {"seed": sampling.seed}),
    }


def _chunks(body: JsonObject, version: PolicyVersion) -> list[Chunk]:
    """Raises EngineError when ids or log-probabilities are missing: they are never guessed."""
    choice = body["choices"][0]
    ids, logprobs = choice.get("token_ids"), _logprobs(choice.get("logprobs") or {})
    if ids is None or logprobs is None or len(ids) != len(logprobs):
        raise EngineError(
            f"the engine answered {None if ids is None else len(ids)} token ids and "
            f"{None if logprobs is None else len(logprobs)} log-probabilities; both must be there, one for one"
        )
    if any(logprob is None or logprob <= _UNKNOWN_LOGPROB for logprob in logprobs):
        raise EngineError("the engine does not know the log-probability of a token that it sampled")
    finish = FinishReason(choice["finish_reason"])
    details = (body.get("usage") or {}).get("prompt_tokens_details") or {}
    spans = choice.get("weight_versions") or [{"version": None, "start": 0, "end": len(ids)}]
    chunks = [
        Chunk(
            ids=ids[span["start"] : span["end"]],
            logprobs=logprobs[span["start"] : span["end"]],
            version=_number(span["version"], version),
            num_cached=0 if index else details.get("cached_tokens") or 0,
        )
        for index, span in enumerate(spans)
    ]
    return [*chunks, Chunk(ids=(), logprobs=(), version=chunks[-1].version, finish_reason=finish)]


def _logprobs(logprobs: JsonObject) -> Sequence[float] | None:
    if "content" in logprobs:
        return [entry["logprob"] for entry in logprobs["content"]]
    return logprobs.get("token_logprobs")


def _number(version: Any, default: PolicyVersion) -> PolicyVersion:
    """vLLM's versions are text, `default` before the first."""
    return PolicyVersion(int(version)) if isinstance(version, str) and version.isdecimal() else default
