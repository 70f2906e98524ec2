"""OpenAI's text completions: text or token ids in, text out, with vLLM's `return_token_ids`.

https://platform.openai.com/docs/api-reference/completions/create
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from manege.errors import ManegeError
from manege.protocols.base import InvalidRequest, ModelReply, ModelRequest
from manege.protocols.openai import completion, error_body, read_bool, read_int, read_sampling, refuse_unsupported
from manege.types import JsonObject

__all__ = ["Completions"]

_DEFAULT_MAX_TOKENS = 16
"""OpenAI's."""


class Completions:
    """See `protocols.base.WireProtocol`."""

    name = "completions"

    def parse(self, raw: JsonObject) -> ModelRequest:
        refuse_unsupported(raw)
        logprobs = read_int(raw, "logprobs", low=0)
        if (logprobs or 0) > 1:
            raise InvalidRequest("only the sampled token's log-probability is known; send logprobs=1", param="logprobs")
        return ModelRequest(
            prompt=_prompt(raw.get("prompt")),
            sampling=read_sampling(raw, max_new_tokens=read_int(raw, "max_tokens", low=1) or _DEFAULT_MAX_TOKENS),
            wants_logprobs=logprobs is not None,
            wants_token_ids=bool(read_bool(raw, "return_token_ids")),
            raw=raw,
        )

    def reply(self, reply: ModelReply) -> JsonObject:
        choice: dict[str, Any] = {"text": reply.message["text"]}
        if reply.logprobs:
            texts = [token.text for token in reply.logprobs]
            choice["logprobs"] = {
                "tokens": texts,
                "token_logprobs": [token.logprob for token in reply.logprobs],
                "top_logprobs": None,
                "text_offset": [0, *accumulate(map(len, texts[:-1]))],
            }
        if reply.response_ids is not None:
            choice |= {"token_ids": reply.response_ids, "prompt_token_ids": reply.prompt_ids}
        return completion(reply, prefix="cmpl", kind="text_completion", choice=choice)

    def error(self, error: ManegeError) -> JsonObject:
        return error_body(error)


def _prompt(value: Any) -> str | Sequence[int]:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(type(item) is int and item >= 0 for item in value):
        return value
    raise InvalidRequest("prompt must be one non-empty text or one non-empty list of token ids", param="prompt")
