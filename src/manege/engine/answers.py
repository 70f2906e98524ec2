"""The answers of the engine's server, in vLLM's shapes, whole or as a stream of events.

`/inference/v1/generate` speaks of ids only, `/v1/completions` adds text; both carry ids, log-probabilities and the
versions that sampled them: spans in a whole answer, as vLLM has them; in a stream one `weight_version` per event, and
`old_cache` where it holds, which vLLM lacks.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Protocol

import orjson

from manege.engine.base import Chunk, Generation
from manege.errors import ManegeError
from manege.types import JsonObject

__all__ = ["Form", "TextForm", "TokenForm", "stream", "whole"]

Decode = Callable[[Sequence[int]], str]


class Form(Protocol):
    """What the two routes say differently; one object per answer."""

    object: str

    def part(self, ids: Sequence[int], logprobs: Sequence[float], *, is_last: bool) -> dict[str, Any]:
        """Fields of the choice for the next ids of the answer."""
        ...


class TokenForm:
    """Of `/inference/v1/generate`."""

    object = "generate"

    def part(self, ids: Sequence[int], logprobs: Sequence[float], *, is_last: bool) -> dict[str, Any]:
        """See Form."""
        content = [
            {"token_id": token, "logprob": logprob, "rank": None, "top_logprobs": []}
            for token, logprob in zip(ids, logprobs, strict=True)
        ]
        return {"logprobs": {"content": content}}


class TextForm:
    """Of `/v1/completions`."""

    object = "text_completion"

    def __init__(self, decode: Decode, prompt_ids: Sequence[int] | None) -> None:
        """`prompt_ids`: to be told with the first part, if they were asked for."""
        self._decode = decode
        self._prompt_ids = prompt_ids
        self._given: list[int] = []
        """The ids whose text was given last: how some tokenizers decode an id depends on the one before it."""
        self._kept: list[int] = []
        """Ids that end inside a character."""

    def part(self, ids: Sequence[int], logprobs: Sequence[float], *, is_last: bool) -> dict[str, Any]:
        """See Form."""
        prompt_ids, self._prompt_ids = self._prompt_ids, None
        return {
            "text": self._text(ids, is_last),
            "prompt_token_ids": prompt_ids,
            "logprobs": {
                "tokens": [f"token_id:{token}" for token in ids],
                "token_logprobs": list(logprobs),
                "top_logprobs": None,
                "text_offset": [],
            },
        }

    def _text(self, ids: Sequence[int], is_last: bool) -> str:
        self._kept += ids
        before = self._decode(self._given) if self._given else ""
        text = self._decode([*self._given, *self._kept])
        if text.endswith("\ufffd") and not is_last:
            return ""
        self._given, self._kept = self._kept, []
        return text[len(before) :]


def whole(form: Form, generation: Generation, *, num_prompt: int) -> JsonObject:
    """A whole answer."""
    starts = [span.first_token for span in generation.spans]
    ends = [*starts[1:], len(generation.ids_R)]
    ids = generation.ids_R.tolist()
    choice = {
        "index": 0,
        "token_ids": ids,
        "finish_reason": generation.finish_reason.value,
        "weight_versions": [
            {"version": str(span.version), "start": start, "end": end}
            for span, start, end in zip(generation.spans, starts, ends, strict=True)
        ],
        **({"routed_experts": generation.routed_experts} if generation.routed_experts else {}),
        **form.part(ids, generation.logprobs_R.tolist(), is_last=True),
    }
    return {"object": form.object, "choices": [choice], "usage": _usage(num_prompt, len(ids), generation.num_cached)}


async def stream(form: Form, chunks: AsyncIterator[Chunk], *, num_prompt: int, has_usage: bool) -> AsyncIterator[bytes]:
    """Server-sent events, one per chunk. An engine that fails after the first ends the stream with an error event."""
    num_sampled = num_cached = 0
    try:
        async for chunk in chunks:
            choice = {
                "index": 0,
                "token_ids": list(chunk.ids),
                "finish_reason": chunk.finish_reason,
                "weight_version": str(chunk.version),
                **({"old_cache": True} if chunk.old_cache else {}),
                **({"routed_experts": chunk.routed_experts} if chunk.routed_experts else {}),
                **form.part(chunk.ids, chunk.logprobs, is_last=chunk.finish_reason is not None),
            }
            num_sampled += len(chunk.ids)
            num_cached += chunk.num_cached
            yield _event({"object": form.object, "choices": [choice]})
        if has_usage:
            usage = _usage(num_prompt, num_sampled, num_cached)
            yield _event({"object": form.object, "choices": [], "usage": usage})
    except ManegeError as error:
        if not num_sampled:
            raise
        yield _event({"error": {"code": error.status, "type": error.code, "message": str(error)}})
    yield b"data: [DONE]\n\n"


def _event(data: JsonObject) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"


def _usage(num_prompt: int, num_sampled: int, num_cached: int) -> JsonObject:
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_sampled,
        "total_tokens": num_prompt + num_sampled,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }
