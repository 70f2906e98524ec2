"""Reads an answer as SGLang's `/generate` streams it: server-sent events in, chunks out; pure, no sockets.

An event has `output_ids` and, in `meta_info`, `output_token_logprobs` as [log-probability, id, text] each. Both are
either all that there is so far or, with the server's `--incremental-streaming-output`, what is new; when a request that
waited is aborted, its last event then repeats its last id. `meta_info.completion_tokens` counts all, and tells these
apart:

    so far   ids     completion_tokens   new
    3        2       5                   both ids
    3        5       5                   the last two
    3        1       3                   none

Nothing is guessed: ids and log-probabilities that do not belong together, a count that disagrees at the end or a stream
without an end is an EngineError.

The version of a token is what its event says (`weight_version`), or else the version that the client knows when the
event arrives. The last event says the versions of all (`weight_versions`); if they disagree, the answer is an error.
"""

from collections.abc import Callable, Sequence
from typing import Any

import orjson

from manege.engine.base import Chunk
from manege.engine.token_stream import check_versions, version_number
from manege.errors import EngineError, ProtocolError
from manege.types import FinishReason, JsonObject, PolicyVersion

__all__ = ["SglangReader"]

_REFUSED = 400


class SglangReader:
    """Reads one answer, event by event."""

    def __init__(self, url: str, *, is_old_cache: Callable[[PolicyVersion], bool], can_be_refused: bool) -> None:
        """`url`: for error messages. `is_old_cache`: whether what these weights sample in this answer stands on keys
        and values of older ones. `can_be_refused`: the caller may have asked for something impossible."""
        self._url = url
        self._is_old_cache = is_old_cache
        self._can_be_refused = can_be_refused
        self._versions: list[PolicyVersion] = []
        """Of each token so far."""
        self._finish: FinishReason | None = None
        self._num_cached = 0

    def feed(self, data: bytes, version: PolicyVersion) -> Chunk | None:
        """What an event adds; None: no tokens. `version`: of tokens of which the event does not say it. Raises
        ProtocolError where the server refuses what the caller asked for."""
        try:
            event = orjson.loads(data)
            if error := event.get("error"):
                raise self._failure(error.get("code"), str(error.get("message")))
            return self._feed(event["output_ids"], event["meta_info"], version)
        except ProtocolError:
            raise
        except orjson.JSONDecodeError as error:
            raise EngineError(f"{self._url} streamed what is no JSON: {_text(data)}") from error
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise EngineError(
                f"{self._url} streamed a shape that is not SGLang's ({error!r}): {_text(data)}"
            ) from error

    def finish(self) -> Chunk:
        """The end of the answer, without tokens; call it after the last event."""
        if self._finish is None:
            raise EngineError(
                f"{self._url} ended its stream after {len(self._versions)} tokens without a finish reason; see its log"
            )
        version = self._versions[-1] if self._versions else PolicyVersion(0)
        return Chunk(ids=(), logprobs=(), version=version, finish_reason=self._finish, num_cached=self._num_cached)

    def _feed(self, ids: Sequence[int], meta: JsonObject, version: PolicyVersion) -> Chunk | None:
        new_ids = self._new_ids(ids, int(meta["completion_tokens"]))
        logprobs = self._new_logprobs(new_ids, meta.get("output_token_logprobs") or ())
        version = version_number(meta.get("weight_version"), version)
        self._versions += [version] * len(new_ids)
        self._num_cached = int(meta.get("cached_tokens") or 0) or self._num_cached
        if reason := meta.get("finish_reason"):
            if reason["type"] == "abort" and (status := reason.get("status_code")):
                raise self._failure(status, str(reason.get("message")))
            self._finish = FinishReason(reason["type"])
            self._check_end(int(meta["completion_tokens"]), meta.get("weight_versions") or ())
        if not new_ids:
            return None
        return Chunk(ids=new_ids, logprobs=logprobs, version=version, old_cache=self._is_old_cache(version))

    def _new_ids(self, ids: Sequence[int], num_all: int) -> Sequence[int]:
        num_known = len(self._versions)
        if num_known + len(ids) == num_all:
            return ids
        if len(ids) >= num_all:
            return ids[num_known:]
        if num_known == num_all:
            return ()
        raise EngineError(
            f"{self._url} streamed {len(ids)} ids of an answer of {num_all} tokens of which {num_known} were known; "
            "some are missing"
        )

    def _new_logprobs(self, new_ids: Sequence[int], entries: Sequence[Any]) -> Sequence[float]:
        if len(entries) != len(new_ids):
            start = len(self._versions)
            entries = entries[start : start + len(new_ids)]
        if [entry[1] for entry in entries] != list(new_ids):
            raise EngineError(
                f"{self._url} streamed {len(new_ids)} token ids and log-probabilities of {len(entries)} others; both "
                "must be there, one for one"
            )
        logprobs = [entry[0] for entry in entries]
        if not all(isinstance(logprob, int | float) for logprob in logprobs):
            raise EngineError(f"{self._url} does not know the log-probability of a token that it sampled")
        return logprobs

    def _check_end(self, num_all: int, spans: Sequence[JsonObject]) -> None:
        if num_all != len(self._versions):
            raise EngineError(f"{self._url} counts {num_all} sampled tokens but streamed {len(self._versions)}")
        check_versions(spans, self._versions, self._url)

    def _failure(self, status: Any, message: str) -> EngineError | ProtocolError:
        if status == _REFUSED and self._can_be_refused:
            return ProtocolError(f"the engine refuses the form of the answer: {message}")
        return EngineError(f"{self._url} failed during an answer ({status}): {message}")


def _text(data: bytes) -> str:
    return data[:200].decode(errors="replace")
