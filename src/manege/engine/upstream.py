"""Client of an engine that speaks vLLM's token wire: vLLM itself, or `engine.server`.

Answers are streamed. `POST /inference/v1/generate` is preferred, since vLLM says there which weights sampled what; a
server without it (vLLM needs `--enable-scale-out`) is asked by `/v1/completions` with token ids. Closing the iterator
closes the connection, and the server then stops sampling. vLLM must run with `--logprobs-mode processed_logprobs`, or
its log-probabilities are not those of softmax(logits / temperature), and with `VLLM_SERVER_DEV_MODE=1`, or its weights
cannot change.

A server that was restarted has the weights that it starts with: when a connection was lost, it is asked for its version
before the next call, and given the last weights again if it has older ones.

A pause ends the answers under way (mode `abort`); each goes on after it with a request for the rest (`partial`). With
`keep` they stay in the server (mode `keep`), and what comes of them under new weights has an old cache. While some are
kept, vLLM cannot reset its cache of prefixes and does not say so
(https://docs.vllm.ai/en/stable/training/async_rl/ has the modes). So prefixes have the version as their salt, which
keeps those of old weights from new requests, and nothing is asked of a server during a pause of ours.

A server that shares its GPUs with a trainer (`sleeps`) gives them up while it is paused: it keeps its weights in the
machine's memory and drops its cache, loads new weights with no more than these on the GPU, and is awake at `resume`.
No GPU has confirmed it yet.

New weights are a folder that vLLM reads, or (`fetches`) are fetched from the trainer's memory by its weight-transfer
endpoints and our transfer engine inside it (`vllm_worker`).
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any
from uuid import uuid4

import orjson

from manege.engine.base import Chunk, Constraint, EngineCapabilities, EngineInfo, Sampling, Weights
from manege.engine.http1 import HttpClient
from manege.engine.remote import Put, RemoteAnswers, beginning, read_reply
from manege.engine.token_stream import AnswerReader, events, version_number
from manege.engine.vllm_metrics import num_waiting_and_usage
from manege.errors import EngineError, ProtocolError
from manege.logs import get_logger, kv
from manege.types import JsonObject, PolicyVersion

__all__ = ["UpstreamEngine"]

_log = get_logger("engine")


class UpstreamEngine:
    """See `engine.base.Engine`."""

    capabilities = EngineCapabilities(
        inflight=frozenset({"drain", "abort_continue", "keep"}), weights=frozenset({"folder"})
    )

    def __init__(self, url: str, *, version: int = 0, sleeps: bool = False, fetches: bool = False) -> None:
        """`url`: root of the server, with or without `/v1`. `version`: of its weights, until the server says. `sleeps`:
        it leaves its GPU to others while it is paused, unless answers are kept. `fetches`: it has our transfer engine
        (`vllm_worker`)."""
        if fetches:
            self.capabilities = replace(self.capabilities, weights=self.capabilities.weights | {"transfer"})
        self._url = url.rstrip("/").removesuffix("/v1")
        self._http = HttpClient(self._url, lost=self.forget)
        self._answers = RemoteAnswers(self)
        self._model = ""
        self._is_known = False
        """Model, context limit and version are what the server last said."""
        self._context_limit = 0
        self._version = PolicyVersion(version)
        self._loaded: Weights | None = None
        """The weights of `_version`, if they came from here."""
        self._learning = asyncio.Lock()
        self._has_generate = True
        self._sleeps = sleeps
        self._asleep: tuple[str, ...] = ()
        """What of it is not on the GPU now, by vLLM's names."""

    def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> AsyncGenerator[Chunk, None]:
        return self._answers.generate(prompt_ids, sampling)

    async def pause(self, *, keep: bool = False) -> None:
        """See Engine. Raises EngineError if the server cannot pause."""
        self._answers.hold()
        path = "/pause?mode=keep&clear_cache=false" if keep else "/pause?mode=abort&clear_cache=true"
        try:
            status, reply = await self._send("POST", path)
            if status == 404:
                raise EngineError(f"{self._url} has no /pause; start vLLM with VLLM_SERVER_DEV_MODE=1")
            read_reply(status, reply, self._url + path)
            if self._sleeps and not keep:
                await self._call("POST", "/sleep?level=1&mode=abort")
                self._asleep = ("weights", "kv_cache")
        except BaseException:
            self._answers.release()
            raise

    async def resume(self) -> None:
        try:
            await self._wake(*self._asleep)
            status, reply = await self._send("POST", "/resume")
        finally:
            self._answers.release()
        # A server that cannot pause need not resume.
        if status != 404:
            read_reply(status, reply, f"{self._url}/resume")

    async def load(self, weights: Weights, version: PolicyVersion) -> None:
        source = weights.address if weights.kind == "transfer" else weights.folder
        if source is None or weights.kind not in self.capabilities.weights:
            raise EngineError(f"weights of kind {weights.kind!r} cannot be sent to {self._url}; publish a folder")
        # The cache's room is of use only to answers.
        await self._wake("weights")
        if weights.kind == "transfer":
            await self._fetch(source, version)
        else:
            rpc = {"method": "reload_weights", "kwargs": {"weights_path": source}}
            await self._call("POST", "/collective_rpc", rpc)
            await self._call("POST", "/reset_prefix_cache")
            await self._call("POST", "/update_weight_version", {"new_version": str(version)})
        self._version, self._loaded = version, weights

    async def info(self) -> EngineInfo:
        await self._read_model()
        # vLLM tells whether it is paused only with VLLM_SERVER_DEV_MODE.
        status, reply = await self._send("GET", "/is_paused")
        paused = status != 404 and read_reply(status, reply, f"{self._url}/is_paused").get("is_paused")
        status, metrics = await self._send("GET", "/metrics")
        num_waiting, cache_usage = num_waiting_and_usage(metrics.decode() if status == 200 else "")
        return EngineInfo(
            model=self._model,
            context_limit=self._context_limit,
            version=self._version,
            num_running=self._answers.num_running,
            num_waiting=num_waiting,
            cache_usage=cache_usage,
            paused=bool(paused),
        )

    async def close(self) -> None:
        await self._http.close()
        self._answers.release()

    async def _fetch(self, address: str, version: PolicyVersion) -> None:
        """Have the server's workers fetch the weights. Nothing has changed when the trainer refuses them at first."""
        init = {"address": address, "name": uuid4().hex}
        await self._call("POST", "/init_weight_transfer_engine", {"init_info": init})
        try:
            await self._call("POST", "/start_weight_update")
            await self._call("POST", "/update_weights", {"update_info": {}})
            await self._call("POST", "/reset_prefix_cache")
            await self._call("POST", "/finish_weight_update", {"weight_version": str(version)})
        except EngineError:
            # Some layers may be new: under a version that is older than any it gets the last weights again.
            self.forget()
            with suppress(EngineError):
                await self._call("POST", "/update_weight_version", {"new_version": "0"})
            raise

    async def learn(self) -> int:
        """See `remote.Wire`."""
        async with self._learning:
            if not self._is_known:
                await self._read_model()
        return self._context_limit

    def forget(self) -> None:
        """See `remote.Wire`. It may have been restarted, or have got new weights from elsewhere."""
        self._is_known = False

    async def _read_model(self) -> None:
        models, known = await self._call("GET", "/v1/models"), self._version
        status, reply = await self._send("GET", "/weight_info")
        try:
            # What was answered before a load that ended meanwhile is old.
            if status != 404 and self._version == known:
                told = read_reply(status, reply, f"{self._url}/weight_info").get("weight_version")
                if self._loaded is not None and version_number(told, PolicyVersion(0)) < self._version:
                    _log.warning(kv("the engine was restarted and gets its weights again", version=self._version))
                    await self.load(self._loaded, self._version)
                elif (version := version_number(told, self._version)) != self._version:
                    # Weights that others gave it are not known here.
                    self._version, self._loaded = version, None
            model = models["data"][0]
            self._context_limit, self._model = int(model["max_model_len"]), str(model["id"])
            self._is_known = True
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise EngineError(f"{self._url}/v1/models answered in a shape that is not vLLM's: {error!r}") from error

    async def read(self, prompt_ids: Sequence[int], sampling: Sampling, put: Put) -> None:
        """See `remote.Wire`."""
        params = _params(sampling)
        if self._has_generate:
            body = {"token_ids": prompt_ids, "sampling_params": {**params, "logprobs": 0}}
            if await self._stream("/inference/v1/generate", body, put):
                return
            self._has_generate = False
            _log.info(kv("the engine has no token wire; using text completions with token ids", url=self._url))
        body = {"model": self._model, "prompt": prompt_ids, **params, "logprobs": 0, "return_token_ids": True}
        if not await self._stream("/v1/completions", body, put):
            raise EngineError(f"{self._url} serves neither /inference/v1/generate nor /v1/completions")

    async def _stream(self, path: str, body: JsonObject, put: Put) -> bool:
        """Read an answer; False: the server does not serve the path."""
        url = self._url + path
        stream = {"stream": True, "stream_options": {"include_usage": True}, "cache_salt": f"version {self._version}"}
        body = {**body, **stream}
        reader = AnswerReader(url, self._version)
        status, parts = await self._http.stream(path, orjson.dumps(body))
        async with aclosing(parts):
            if status >= 300:
                text = b"".join([part async for part in parts])
                if status in (403, 404):
                    return False
                if status == 400 and "structured_outputs" in body.get("sampling_params", body):
                    raise ProtocolError(f"the engine refuses the form of the answer: {beginning(text)}")
                raise EngineError(f"{url} answered {status}: {beginning(text)}")
            async for data in events(parts, url):
                if chunk := reader.feed(data, self._version):
                    put(chunk)
            put(reader.finish())
        return True

    async def _wake(self, *names: str) -> None:
        if names := tuple(name for name in names if name in self._asleep):
            await self._call("POST", "/wake_up?" + "&".join(f"tags={name}" for name in names))
            self._asleep = tuple(name for name in self._asleep if name not in names)

    async def _call(self, method: str, path: str, body: JsonObject | None = None) -> Any:
        status, reply = await self._send(method, path, body)
        return read_reply(status, reply, self._url + path)

    async def _send(self, method: str, path: str, body: JsonObject | None = None) -> tuple[int, bytes]:
        return await self._http.request(method, path, b"" if body is None else orjson.dumps(body))


def _params(sampling: Sampling) -> dict[str, Any]:
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        # Else vLLM takes those of the model's generation_config.json.
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "max_tokens": sampling.max_new_tokens,
        "stop_token_ids": sorted(sampling.stop_ids),
        # The model's own end is one of our stop ids, or none; a grammar ends with it.
        "ignore_eos": sampling.constraint is None,
        "stop": list(sampling.stop_strings),
        "include_stop_str_in_output": True,
        **({} if sampling.seed is None else {"seed": sampling.seed}),
        **({} if sampling.constraint is None else {"structured_outputs": _structured(sampling.constraint)}),
    }


def _structured(constraint: Constraint) -> JsonObject:
    """JSON schemas as such, since every backend of vLLM takes them."""
    if constraint.json_schema is not None:
        return {"json": orjson.loads(constraint.json_schema)}
    return {"grammar": constraint.grammar}
