"""What OpenAI's protocols have in common: fields and their checks, sampling, the shapes of errors and model lists."""

from collections.abc import Sequence
from typing import Any

from manege.errors import ManegeError
from manege.protocols.base import AskedSampling, InvalidRequest, ServedModel, TokenLogprob
from manege.protocols.values import flag, integer, number, shown, text, texts, wrong
from manege.types import JsonObject

__all__ = [
    "OpenAI",
    "error_body",
    "read_max_tool_calls",
    "read_object",
    "read_sampling",
    "read_text",
    "read_wants_usage",
    "shown_logprob",
]

# Fields that change what is sampled, with the values at which they change nothing.
_OTHERS = {
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "min_p": (None, 0),
    "logit_bias": (None, {}),
}


class OpenAI:
    """The part of `protocols.base.WireProtocol` that chat completions, completions and Responses share."""

    def error(self, error: ManegeError) -> JsonObject:
        return error_body(error)

    def token_count(self, num_prompt: int) -> JsonObject:
        return {"object": "response.input_tokens", "input_tokens": num_prompt}

    def models(self, models: Sequence[ServedModel]) -> JsonObject:
        return {"object": "list", "data": [self.model(model) for model in models]}

    def model(self, model: ServedModel) -> JsonObject:
        return {
            "id": model.id,
            "object": "model",
            "created": int(model.created_s),
            "owned_by": "manege",
            # vLLM's name for it.
            "max_model_len": model.context_limit,
        }


def error_body(error: ManegeError) -> JsonObject:
    """OpenAI's error object. Its SDKs show `message`, and compare `code`."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    code = None if error.code == kind else error.code
    param = error.param if isinstance(error, InvalidRequest) else None
    return {"error": {"message": str(error), "type": kind, "param": param, "code": code}}


def shown_logprob(token: TokenLogprob) -> JsonObject:
    """A token of `logprobs`, in chat completions and Responses."""
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.text.encode()), "top_logprobs": []}


def read_sampling(body: JsonObject, *, max_new_tokens: int | None) -> AskedSampling:
    """Raises InvalidRequest for a value of the wrong type or out of range."""
    stop = body.get("stop")
    top_k = integer(body.get("top_k"), "top_k", low=-1)
    return AskedSampling(
        temperature=number(body.get("temperature"), "temperature", low=0, high=2),
        top_p=number(body.get("top_p"), "top_p", low=0, high=1),
        # vLLM's -1 and 0 both mean off.
        top_k=max(top_k, 0) if top_k is not None else None,
        seed=integer(body.get("seed"), "seed", low=-(2**63)),
        stop=texts([stop] if isinstance(stop, str) else stop, "stop"),
        max_new_tokens=max_new_tokens,
        others={key: body[key] for key, neutral in _OTHERS.items() if body.get(key) not in neutral},
    )


def read_text(body: JsonObject, key: str, where: str) -> str:
    """A field that must be a string; `where` is what it is part of."""
    return text(body.get(key), f"{where}.{key}")


def read_object(value: Any, where: str) -> JsonObject:
    """`value`, which must be a JSON object."""
    if not isinstance(value, dict):
        raise wrong(where, f"is {shown(value)}; want an object")
    return value


def read_max_tool_calls(body: JsonObject) -> int | None:
    """1 where the caller wants no parallel calls, else None."""
    asked = body.get("parallel_tool_calls")
    return None if asked is None or flag(asked, "parallel_tool_calls") else 1


def read_wants_usage(body: JsonObject) -> bool:
    """Whether the answer tells its token counts: always if it is whole, on demand if it is streamed."""
    options = body.get("stream_options")
    wants = options is not None and flag(
        read_object(options, "stream_options").get("include_usage"), "stream_options.include_usage"
    )
    return wants or not body.get("stream")
