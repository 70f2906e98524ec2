"""Client of an engine that takes messages: `POST /v1/chat/completions` of vLLM, or of any server that returns its ids.

With `return_token_ids` and `logprobs` the answer tells what was sampled. That is checked and never repaired: where ids
or log-probabilities are missing, unknown or not one for one, the answer stands with none at all and `flaw` says why,
so that it is answered and recorded but never trained.

A refusal of the body (400, 413, 422) is the caller's and comes as ProtocolError or ContextOverflowError with the
engine's words; everything else that is no answer is EngineError.
"""

from array import array
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from manege.engine.http1 import HttpClient
from manege.errors import ContextOverflowError, EngineError, ProtocolError
from manege.types import FinishReason, FloatArray, IntArray, PolicyVersion

__all__ = ["ChatAnswer", "ChatIds", "MessagesEngine", "parse_answer"]

_PATH = "/v1/chat/completions"
_UNKNOWN_LOGPROB = -9999.0
"""What vLLM writes for a log-probability that it does not have."""
_NO_IDS = np.zeros(0, np.int32)
_REFUSALS = (400, 413, 422)
_OVERFLOW_TYPES = ("context_length_exceeded", "exceed_context_size_error")
_OVERFLOW_WORDS = ("context length", "context size", "context window")
"""Engines answer a prompt that is too long with a plain 400; only OpenAI and llama.cpp give it a name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatAnswer:
    """What an engine says about one answer of its own, its message apart."""

    prompt_ids_P: IntArray
    response_ids_R: IntArray
    logprobs_R: FloatArray
    flaw: str | None
    """Why there are no ids; then the arrays are empty."""
    finish_reason: FinishReason
    num_prompt: int
    num_sampled: int
    """Counted by the engine, also where there are no ids."""
    num_cached: int


class MessagesEngine:
    """One engine. `url`: root of the server, with or without `/v1`. `version`: of its weights."""

    def __init__(self, url: str, *, version: int = 0) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.version = PolicyVersion(version)
        self._http = HttpClient(self.url)

    async def ask(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """A whole answer: one chunk. Raises EngineError, ProtocolError, ContextOverflowError."""
        return parse_answer(await self.post(orjson.dumps(body)), self.url)

    async def post(self, body: bytes) -> bytes:
        """The same, not yet read."""
        status, raw = await self._http.request("POST", _PATH, body)
        if status != 200:
            raise _failure(status, raw, self.url)
        return raw

    async def stream(self, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """The chunks of a streamed answer. Raises as `ask`, and EngineError where the stream breaks off or carries an
        error."""
        status, parts = await self._http.stream(_PATH, orjson.dumps(body))
        async with aclosing(parts), aclosing(_events(parts, self.url)) as events:
            if status != 200:
                raise _failure(status, b"".join([part async for part in parts]), self.url)
            async for data in events:
                yield parse_answer(data, self.url)

    async def check(self) -> None:
        """Raises EngineError unless the server answers; any answer that is not a failure of its own will do."""
        status, _ = await self._http.request("GET", "/v1/models")
        if status >= 500:
            raise EngineError(f"{self.url}/v1/models answered {status}")

    async def close(self) -> None:
        """End every call with EngineError."""
        await self._http.close()


class ChatIds:
    """Collects what the chunks of one answer say about its ids; a whole answer is one chunk."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._has_text = False
        self._prompt: Sequence[int] = ()
        self._ids: list[int] = []
        self._tokens: list[Mapping[str, Any]] = []
        self._finish: str | None = None
        self._num_prompt = self._num_sampled = self._num_cached = 0

    def add(self, chunk: Mapping[str, Any]) -> None:
        """Raises EngineError for a chunk that is not OpenAI's."""
        try:
            for choice in chunk["choices"]:
                self._add(choice)
            self._prompt = self._prompt or chunk.get("prompt_token_ids") or ()
            if usage := chunk.get("usage"):
                self._num_prompt, self._num_sampled = int(usage["prompt_tokens"]), int(usage["completion_tokens"])
                self._num_cached = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise EngineError(f"{self._url}{_PATH} answered in a shape that is not OpenAI's: {error!r}") from error

    def answer(self, *, is_complete: bool = True) -> ChatAnswer:
        """What the chunks add up to. Raises EngineError if the answer did not end and should have."""
        if is_complete and self._finish is None:
            raise EngineError(f"{self._url}{_PATH} answered without a finish reason; see the engine's log")
        if is_complete and self._finish == "abort":
            raise EngineError(f"the engine at {self._url} aborted the answer; see its log")
        logprobs_R = self._logprobs()
        flaw = self._flaw(logprobs_R, is_complete)
        prompt_ids_P, response_ids_R = _int32(self._prompt), _int32(self._ids)
        if prompt_ids_P is None or response_ids_R is None:
            flaw = flaw or "the engine returned token ids that are not integers below 2**31"
        if flaw is not None:
            prompt_ids_P, response_ids_R, logprobs_R = _NO_IDS, _NO_IDS, logprobs_R[:0]
        assert prompt_ids_P is not None
        assert response_ids_R is not None
        return ChatAnswer(
            prompt_ids_P=prompt_ids_P,
            response_ids_R=response_ids_R,
            logprobs_R=logprobs_R.astype(np.float32),
            flaw=flaw,
            finish_reason=FinishReason.LENGTH if self._finish == "length" else FinishReason.STOP,
            num_prompt=self._num_prompt or len(self._prompt),
            num_sampled=self._num_sampled or len(self._ids),
            num_cached=self._num_cached,
        )

    def _add(self, choice: Mapping[str, Any]) -> None:
        said = choice.get("message") or choice.get("delta") or {}
        self._has_text = self._has_text or any(value for key, value in said.items() if key != "role")
        self._prompt = self._prompt or choice.get("prompt_token_ids") or ()
        self._ids += choice.get("token_ids") or ()
        self._tokens += (choice.get("logprobs") or {}).get("content") or ()
        self._finish = choice.get("finish_reason") or self._finish

    def texts(self) -> list[str]:
        """Of the sampled tokens, in the engine's spelling."""
        return [token.get("token", "") for token in self._tokens]

    def _logprobs(self) -> npt.NDArray[np.float64]:
        try:
            return np.array([token["logprob"] for token in self._tokens], np.float64)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise EngineError(f"{self._url}{_PATH} answered log-probabilities that are not OpenAI's") from error

    def _flaw(self, logprobs_R: npt.NDArray[np.float64], is_complete: bool) -> str | None:
        if not self._prompt:
            return "the engine returned no prompt token ids"
        if not self._ids and (self._has_text or self._num_sampled):
            return "the engine returned no token ids of its answer"
        if len(self._ids) != len(logprobs_R):
            return f"the engine returned {len(self._ids)} token ids and {len(logprobs_R)} log-probabilities"
        # None, which numpy reads as NaN, is neither above nor below.
        if not ((logprobs_R > _UNKNOWN_LOGPROB) & (logprobs_R < 1)).all():
            return "the engine does not know the log-probability of a token that it sampled"
        if is_complete and self._num_sampled not in (0, len(self._ids)):
            return f"the engine counted {self._num_sampled} sampled tokens and returned {len(self._ids)} token ids"
        return None


async def _events(parts: AsyncGenerator[bytes, None], url: str) -> AsyncGenerator[bytes, None]:
    """The data of server-sent events, up to OpenAI's last one."""
    rest = b""
    async for part in parts:
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            field, _, data = line.strip().partition(b":")
            if field == b"data" and (data := data.strip()) != b"[DONE]":
                yield data
            elif field not in (b"", b"data", b"event", b"id", b"retry"):
                raise EngineError(f"{url}{_PATH} answered no event stream: {line[:200]!r}")
    if rest.strip() not in (b"", b"data: [DONE]"):
        raise EngineError(f"{url}{_PATH} ended its stream in the middle of an event: {rest[:200]!r}")


def parse_answer(raw: bytes, url: str) -> dict[str, Any]:
    """A whole answer or a chunk. Raises EngineError for anything else."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise EngineError(f"{url}{_PATH} answered no JSON: {raw[:200]!r}") from error
    if not isinstance(body, dict):
        raise EngineError(f"{url}{_PATH} answered a JSON {type(body).__name__}, not a completion: {raw[:200]!r}")
    if "error" in body or body.get("object") == "error":
        raise EngineError(f"{url}{_PATH} answered an error: {_reason(raw)}")
    return body


def _failure(status: int, raw: bytes, url: str) -> EngineError | ProtocolError:
    reason = _reason(raw)
    if status not in _REFUSALS:
        return EngineError(f"{url}{_PATH} answered {status}: {reason}")
    is_overflow = any(name in raw.decode(errors="replace") for name in _OVERFLOW_TYPES)
    if is_overflow or any(words in reason.lower() for words in _OVERFLOW_WORDS):
        return ContextOverflowError(reason)
    return ProtocolError(f"the engine refused the request: {reason}")


def _reason(raw: bytes) -> str:
    """The message of an error in OpenAI's or vLLM's shape, or the beginning of whatever came."""
    try:
        body = orjson.loads(raw)
        return str((body.get("error") or body)["message"])
    except (orjson.JSONDecodeError, AttributeError, LookupError, TypeError):
        return raw[:500].decode(errors="replace")


def _int32(values: Sequence[int]) -> IntArray | None:
    try:
        return np.frombuffer(array("i", values), np.int32)
    except (TypeError, OverflowError):
        return None
