"""Reads an answer as vLLM streams it: server-sent events in, chunks out; pure, no sockets.

An event carries one or more tokens of the one choice, one log-probability for each; both token wires are read,
`/inference/v1/generate` (`logprobs.content`) and `/v1/completions` (`logprobs.token_logprobs`). The last events carry
the finish reason, then the usage. Nothing is guessed: ids without log-probabilities, a count that disagrees with the
usage, or an end without both is an EngineError. The usage without a finish reason is how vLLM ends an answer that it
aborts.

The version of a token is what its event says (`weight_version`, ours, with `old_cache`), or else the version that the
client knows when the event arrives; then the cache is old if that is not the version when the answer was asked for.
vLLM tells the versions of all tokens with the last one; if they disagree, the answer is an error.
"""

from collections.abc import AsyncIterator, Sequence
from typing import Any

import orjson

from manege.engine.base import Chunk
from manege.errors import EngineError, ProtocolError
from manege.types import FinishReason, JsonObject, PolicyVersion

__all__ = ["AnswerReader", "check_versions", "events", "version_number"]

_UNKNOWN_LOGPROB = -9999.0
"""What vLLM writes for a log-probability that it does not have."""
_DONE = b"[DONE]"
_OTHER_FIELDS = (b":", b"event:", b"id:", b"retry:")


async def events(parts: AsyncIterator[bytes], url: str) -> AsyncIterator[bytes]:
    """The data of each event to the end of the stream, `[DONE]` left out. A line may be longer than any buffer. Raises
    EngineError for a body that is no stream of events."""
    rest = b""
    async for part in parts:
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                data = line[5:].strip()
                # Read on after it: a connection that is not read to its end cannot be used again.
                if data != _DONE:
                    yield data
            else:
                _check_line(line, url)
    _check_line(rest, url)


def _check_line(line: bytes, url: str) -> None:
    if line.strip() and not line.startswith((b"data:", *_OTHER_FIELDS)):
        raise EngineError(f"{url} answered what is not a stream of events: {_text(line)}")


class AnswerReader:
    """Reads one answer, event by event."""

    def __init__(self, url: str, version: PolicyVersion) -> None:
        """`url`: for error messages. `version`: known when the answer was asked for."""
        self._url = url
        self._first_version = version
        self._versions: list[PolicyVersion] = []
        """Of each token so far."""
        self._finish: FinishReason | None = None
        self._num_cached = 0
        self._routed_experts: str | None = None

    def feed(self, data: bytes, version: PolicyVersion) -> Chunk | None:
        """What an event adds; None: no tokens. `version`: of tokens of which the event does not say it."""
        try:
            return self._feed(orjson.loads(data), version)
        except ProtocolError:
            raise
        except orjson.JSONDecodeError as error:
            raise EngineError(f"{self._url} streamed what is no JSON: {_text(data)}") from error
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise EngineError(f"{self._url} streamed a shape that is not vLLM's ({error!r}): {_text(data)}") from error

    def finish(self) -> Chunk:
        """The end of the answer, without tokens; call it after the last event."""
        if self._finish is None:
            raise EngineError(
                f"{self._url} ended its stream after {len(self._versions)} tokens without a finish reason; see its log"
            )
        version = self._versions[-1] if self._versions else PolicyVersion(0)
        return Chunk(
            ids=(),
            logprobs=(),
            version=version,
            finish_reason=self._finish,
            num_cached=self._num_cached,
            routed_experts=self._routed_experts,
        )

    def _feed(self, event: JsonObject, version: PolicyVersion) -> Chunk | None:
        if error := event.get("error"):
            if isinstance(error, dict) and error.get("code") == 400:
                raise ProtocolError(f"the engine refuses the form of the answer: {error.get('message')}")
            raise EngineError(f"{self._url} failed during an answer: {orjson.dumps(error).decode()[:500]}")
        chunk = self._read_choice(event["choices"][0], version) if event["choices"] else None
        if usage := event.get("usage"):
            self._read_usage(usage)
            if not event["choices"]:
                self._finish = self._finish or FinishReason.ABORT
        return chunk

    def _read_choice(self, choice: JsonObject, version: PolicyVersion) -> Chunk | None:
        ids, logprobs = choice.get("token_ids"), _logprobs(choice.get("logprobs") or {})
        if ids is None or len(ids) != len(logprobs):
            raise EngineError(
                f"{self._url} answered {'no' if ids is None else len(ids)} token ids and {len(logprobs)} "
                "log-probabilities; both must be there, one for one"
            )
        if any(logprob is None or logprob <= _UNKNOWN_LOGPROB for logprob in logprobs):
            raise EngineError(f"{self._url} does not know the log-probability of a token that it sampled")
        if "weight_version" in choice:
            version, old_cache = version_number(choice["weight_version"], version), bool(choice.get("old_cache"))
        else:
            old_cache = version != self._first_version
        self._versions += [version] * len(ids)
        if choice.get("finish_reason"):
            self._finish = FinishReason(choice["finish_reason"])
        self._routed_experts = choice.get("routed_experts") or self._routed_experts
        check_versions(choice.get("weight_versions") or (), self._versions, self._url)
        return Chunk(ids=ids, logprobs=logprobs, version=version, old_cache=old_cache) if ids else None

    def _read_usage(self, usage: JsonObject) -> None:
        details = usage.get("prompt_tokens_details") or {}
        self._num_cached = details.get("cached_tokens") or self._num_cached
        if self._finish and usage["completion_tokens"] != len(self._versions):
            raise EngineError(
                f"{self._url} counts {usage['completion_tokens']} sampled tokens but streamed {len(self._versions)}"
            )


def check_versions(spans: Sequence[JsonObject], versions: Sequence[PolicyVersion], url: str) -> None:
    """Raises EngineError where a server's spans of an answer say other versions of its tokens than its client knew."""
    for span in spans:
        for index in range(span["start"], span["end"]):
            if version_number(span["version"], versions[index]) != versions[index]:
                raise EngineError(
                    f"{url} sampled token {index} with weights {span['version']!r}, but its client knew of "
                    f"{versions[index]}; change weights through the gateway only, or give its engines the new version"
                )


def version_number(version: Any, default: PolicyVersion) -> PolicyVersion:
    """vLLM's versions are text, `default` before the first."""
    return PolicyVersion(int(version)) if isinstance(version, str) and version.isdecimal() else default


def _logprobs(logprobs: JsonObject) -> Sequence[Any]:
    if "content" in logprobs:
        return [entry["logprob"] for entry in logprobs["content"] or ()]
    return logprobs.get("token_logprobs") or ()


def _text(data: bytes) -> str:
    return data[:200].decode(errors="replace")
