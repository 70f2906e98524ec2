"""OpenAI's text completions: text or token ids in, text out, with vLLM's `return_token_ids`.

https://platform.openai.com/docs/api-reference/completions/create
"""

from collections.abc import Sequence
from typing import Any

from manege.errors import ManegeError
from manege.protocols import sse
from manege.protocols.base import (
    InvalidRequest,
    ModelReply,
    ModelRequest,
    ReplyDelta,
    ReplyHead,
    ReplyStream,
    TokenLogprob,
)
from manege.protocols.openai import OpenAI, error_body, read_sampling, read_wants_usage
from manege.protocols.openai_reply import finish, head_fields, reply_body, usage
from manege.protocols.values import flag, integer
from manege.types import JsonObject

__all__ = ["Completions"]

_DEFAULT_MAX_TOKENS = 16
"""OpenAI's."""


class Completions(OpenAI):
    """See `protocols.base.WireProtocol`."""

    name = "completions"

    def parse(self, raw: JsonObject) -> ModelRequest:
        num_choices = integer(raw.get("n"), "n", low=1, high=128) or 1
        _refuse_unsupported(raw, num_choices)
        logprobs = integer(raw.get("logprobs"), "logprobs", low=0)
        if (logprobs or 0) > 1:
            raise InvalidRequest("only the sampled token's log-probability is known; send logprobs=1", param="logprobs")
        return ModelRequest(
            prompt=_prompt(raw.get("prompt")),
            sampling=read_sampling(
                raw, max_new_tokens=integer(raw.get("max_tokens"), "max_tokens", low=1) or _DEFAULT_MAX_TOKENS
            ),
            num_choices=num_choices,
            stream=flag(raw.get("stream"), "stream"),
            wants_usage=read_wants_usage(raw),
            wants_logprobs=logprobs is not None,
            wants_token_ids=flag(raw.get("return_token_ids"), "return_token_ids"),
            raw=raw,
        )

    def reply(self, request: ModelRequest, reply: ModelReply) -> JsonObject:
        choices = []
        for index, choice in enumerate(reply.choices):
            shown = {"index": index, "text": choice.message["text"], "logprobs": None, **finish(choice)}
            if request.wants_logprobs:
                shown["logprobs"] = _logprobs(choice.logprobs, 0)
            if choice.response_ids is not None:
                shown["token_ids"] = list(choice.response_ids)
            if reply.head.prompt_ids is not None:
                shown["prompt_token_ids"] = list(reply.head.prompt_ids)
            choices.append(shown)
        return reply_body(reply, id=f"cmpl-{reply.head.id}", kind="text_completion", choices=choices)

    def stream(self, request: ModelRequest, head: ReplyHead) -> ReplyStream:
        return _CompletionStream(request, head)


class _CompletionStream:
    """See `protocols.base.ReplyStream`."""

    media_type = sse.MEDIA_TYPE

    def __init__(self, request: ModelRequest, head: ReplyHead) -> None:
        self._request = request
        self._head = head_fields(head, id=f"cmpl-{head.id}", kind="text_completion")
        self._offsets = [0] * request.num_choices
        """Characters of the tokens whose log-probabilities were sent, per choice."""
        self._prompt_ids = head.prompt_ids

    def start(self) -> bytes:
        if self._prompt_ids is None:
            return b""
        ids = {"prompt_token_ids": list(self._prompt_ids)}
        return b"".join(self._chunk(choice, **ids) for choice in range(self._request.num_choices))

    def heartbeat(self) -> bytes:
        return sse.HEARTBEAT

    def delta(self, choice: int, delta: ReplyDelta) -> bytes:
        fields: dict[str, Any] = {}
        if delta.content:
            fields["text"] = delta.content
        if delta.logprobs:
            fields["logprobs"] = _logprobs(delta.logprobs, self._offsets[choice])
            self._offsets[choice] += sum(len(token.text) for token in delta.logprobs)
        if delta.response_ids:
            fields["token_ids"] = list(delta.response_ids)
        return self._chunk(choice, **fields) if fields else b""

    def finish(self, reply: ModelReply) -> bytes:
        late = reply.head.prompt_ids if self._prompt_ids is None else None
        ids = {} if late is None else {"prompt_token_ids": list(late)}
        chunks = [self._chunk(index, **finish(choice), **ids) for index, choice in enumerate(reply.choices)]
        if self._request.wants_usage:
            chunks.append(sse.event({**self._head, "choices": [], "usage": usage(reply)}))
        return b"".join(chunks) + sse.DONE

    def error(self, error: ManegeError) -> bytes:
        return sse.event(error_body(error))

    def _chunk(self, choice: int, **fields: Any) -> bytes:
        shown = {"index": choice, "text": "", "logprobs": None, "finish_reason": None, **fields}
        return sse.event({**self._head, "choices": [shown]})


def _logprobs(tokens: Sequence[TokenLogprob], offset: int) -> JsonObject:
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.text)
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": None,
        "text_offset": offsets,
    }


def _refuse_unsupported(raw: JsonObject, num_choices: int) -> None:
    if raw.get("echo"):
        raise InvalidRequest("echo is not supported; put the prompt before the answer yourself", param="echo")
    if raw.get("suffix"):
        raise InvalidRequest("suffix is not supported; leave it out", param="suffix")
    if raw.get("best_of") not in (None, 1, num_choices):
        raise InvalidRequest(f"best_of = {raw['best_of']!r} is not supported; ask for n answers", param="best_of")


def _prompt(value: Any) -> str | Sequence[int]:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(type(item) is int and item >= 0 for item in value):
        return value
    raise InvalidRequest("prompt must be one non-empty text or one non-empty list of token ids", param="prompt")
