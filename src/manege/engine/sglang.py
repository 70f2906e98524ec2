"""Client of an SGLang server, over its native HTTP interface: `POST /generate` with `input_ids`, streamed.

Written from the source of SGLang 0.5.23 (pauses in three modes and `/model_info` need 0.5.6 or newer) and tried with a
process that speaks this wire; no GPU has confirmed it yet.

What it relies on, and what the server should be started with:
- The log-probabilities are those of softmax(logits / temperature), before any truncation, and at temperature 1 for
  greedy answers, unless `SGLANG_RETURN_ORIGINAL_LOGPROB` is set in the server's environment: leave it unset.
- `--incremental-streaming-output`: else every event repeats the answer so far, and long answers cost their square.
- `--grammar-backend llguidance`: with the default one, JSON schemas work and other grammars are refused.
- `--enable-deterministic-inference`: else seeds are ignored, which is said once.
- `/health` samples a token, which a paused server never does; so `/model_info` tells whether the server lives.

A pause aborts what is under way (mode `abort`; SGLang looks every second whether all has ended), and each answer goes
on after it with a request for the rest. With `keep` (mode `in_place`) answers stay in the server, and what comes of
them under new weights has an old cache, which SGLang cannot flush then; so prefixes have their version as `extra_key`,
which keeps those of old weights from new requests. The mode `retract` is not used: where an answer is sent in pieces of
several tokens, a piece may have been sampled on both sides of it, and is known as one.

SGLang does not say whether it is paused: `info` says whether it is from here. It keeps a little of its context back, so
the limit is its `max_req_input_len`.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import orjson

from manege.engine.base import Chunk, Constraint, EngineCapabilities, EngineInfo, Sampling, Weights
from manege.engine.http1 import HttpClient
from manege.engine.remote import Put, RemoteAnswers, beginning, read_reply
from manege.engine.sglang_stream import SglangReader
from manege.engine.token_stream import events, version_number
from manege.errors import EngineError, ProtocolError
from manege.logs import get_logger, kv
from manege.types import JsonObject, PolicyVersion

__all__ = ["SglangEngine"]

_PATH = "/generate"
_LARK_BACKEND = "llguidance"

_log = get_logger("engine")


class SglangEngine:
    """See `engine.base.Engine`."""

    capabilities = EngineCapabilities(
        inflight=frozenset({"drain", "abort_continue", "keep"}), weights=frozenset({"folder"})
    )

    def __init__(self, url: str, *, version: int = 0) -> None:
        """`url`: root of the server, with or without `/v1`. `version`: of its weights, until the server says."""
        self._url = url.rstrip("/").removesuffix("/v1")
        self._http = HttpClient(self._url, lost=self.forget, health="/model_info")
        self._answers = RemoteAnswers(self)
        self._model = ""
        self._context_limit = 0
        self._grammar_backend: Any = None
        self._has_seeds = False
        self._warnings: set[str] = set()
        """Given already."""
        self._is_known = False
        """What the server says of itself is what it last said."""
        self._version = PolicyVersion(version)
        self._loaded: Weights | None = None
        """The weights of `_version`, if they came from here."""
        self._keeps = False
        """Paused, and answers under way have kept their places in the server."""
        self._learning = asyncio.Lock()

    def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> AsyncGenerator[Chunk, None]:
        return self._answers.generate(prompt_ids, sampling)

    async def pause(self, *, keep: bool = False) -> None:
        """See Engine. Raises EngineError if the server cannot pause."""
        self._answers.hold()
        try:
            await self._post("/pause_generation", {"mode": "in_place" if keep else "abort"})
        except BaseException:
            self._answers.release()
            raise
        self._keeps = keep

    async def resume(self) -> None:
        try:
            await self._post("/continue_generation", {})
        finally:
            self._keeps = False
            self._answers.release()

    async def load(self, weights: Weights, version: PolicyVersion) -> None:
        if weights.folder is None:
            raise EngineError(f"weights of kind {weights.kind!r} cannot be sent to {self._url}; publish a folder")
        body = {"model_path": weights.folder, "weight_version": str(version), "flush_cache": not self._keeps}
        reply = await self._post("/update_weights_from_disk", body)
        if not reply.get("success"):
            raise EngineError(f"{self._url}/update_weights_from_disk failed: {reply.get('message')}")
        self._version, self._loaded = version, weights

    async def info(self) -> EngineInfo:
        await self._read_server()
        status, reply = await self._http.request("GET", "/v1/loads?include=core")
        loads = _checked(status, reply, f"{self._url}/v1/loads").get("loads") or () if status != 404 else ()
        return EngineInfo(
            model=self._model,
            context_limit=self._context_limit,
            version=self._version,
            num_running=self._answers.num_running,
            num_waiting=sum(int(load.get("num_waiting_reqs") or 0) for load in loads),
            cache_usage=max((float(load.get("token_usage") or 0) for load in loads), default=0.0),
            paused=self._answers.is_held,
        )

    async def close(self) -> None:
        await self._http.close()
        self._answers.release()

    async def learn(self) -> int:
        """See `remote.Wire`."""
        async with self._learning:
            if not self._is_known:
                await self._read_server()
        return self._context_limit

    def forget(self) -> None:
        """See `remote.Wire`."""
        self._is_known = False

    async def read(self, prompt_ids: Sequence[int], sampling: Sampling, put: Put) -> None:
        """See `remote.Wire`."""
        url, first = self._url + _PATH, self._version
        body = {
            "input_ids": prompt_ids,
            "sampling_params": self._params(sampling),
            "return_logprob": True,
            "stream": True,
            "extra_key": f"version {first}",
        }
        reader = SglangReader(
            url,
            is_old_cache=lambda version: version > first,
            can_be_refused=sampling.constraint is not None or bool(sampling.stop_strings),
        )
        status, parts = await self._http.stream(_PATH, orjson.dumps(body))
        async with aclosing(parts):
            if status >= 300:
                raise EngineError(f"{url} answered {status}: {beginning(b''.join([part async for part in parts]))}")
            async for data in events(parts, url):
                if chunk := reader.feed(data, self._version):
                    put(chunk)
            put(reader.finish())

    async def _read_server(self) -> None:
        known = self._version
        model, server = await self._get("/model_info"), await self._get("/server_info")
        try:
            # What was answered before a load that ended meanwhile is old.
            if self._version == known:
                await self._compare_version(model["weight_version"])
            self._context_limit, self._model = int(server["max_req_input_len"]), str(model["model_path"])
            self._grammar_backend = server.get("grammar_backend")
            self._has_seeds = bool(server.get("enable_deterministic_inference"))
            if not server.get("incremental_streaming_output"):
                self._warn("long answers cost their square: start SGLang with --incremental-streaming-output")
            self._is_known = True
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise EngineError(f"{self._url}/server_info answered in a shape that is not SGLang's: {error!r}") from error

    async def _compare_version(self, told: Any) -> None:
        """A server that was restarted has the weights that it starts with, and gets ours again."""
        if self._loaded is not None and version_number(told, PolicyVersion(0)) < self._version:
            _log.warning(kv("the engine was restarted and gets its weights again", version=self._version))
            await self.load(self._loaded, self._version)
        elif (version := version_number(told, self._version)) != self._version:
            # Weights that others gave it are not known here.
            self._version, self._loaded = version, None

    def _params(self, sampling: Sampling) -> JsonObject:
        if sampling.seed is not None and not self._has_seeds:
            self._warn("seeds are ignored: start SGLang with --enable-deterministic-inference")
        return {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "max_new_tokens": sampling.max_new_tokens,
            "stop_token_ids": sorted(sampling.stop_ids),
            "stop": list(sampling.stop_strings),
            "skip_special_tokens": False,
            # Each token in an event of its own, so that it is told with the weights that sampled it.
            "stream_interval": 1,
            **({} if sampling.seed is None else {"sampling_seed": sampling.seed}),
            **({} if sampling.constraint is None else self._structured(sampling.constraint)),
        }

    def _structured(self, constraint: Constraint) -> JsonObject:
        if constraint.json_schema is not None:
            return {"json_schema": constraint.json_schema}
        if self._grammar_backend != _LARK_BACKEND:
            raise ProtocolError(
                f"the form of the answer needs a grammar that the engine's backend {self._grammar_backend!r} does not "
                f"read; start SGLang with --grammar-backend {_LARK_BACKEND}"
            )
        # What is called ebnf there is Lark or EBNF for this backend.
        return {"ebnf": constraint.grammar}

    def _warn(self, text: str) -> None:
        if text not in self._warnings:
            self._warnings.add(text)
            _log.warning(kv(text, url=self._url))

    async def _get(self, path: str) -> Any:
        return _checked(*await self._http.request("GET", path), self._url + path)

    async def _post(self, path: str, body: JsonObject) -> Any:
        return _checked(*await self._http.request("POST", path, orjson.dumps(body)), self._url + path)


def _checked(status: int, reply: bytes, url: str) -> Any:
    if status == 404:
        raise EngineError(f"{url} answered 404; it must be SGLang, 0.5.6 or newer")
    return read_reply(status, reply, url)
