"""What OpenAI's protocols have in common: fields and their checks, sampling, the shapes of errors and model lists."""

from collections.abc import Sequence
from typing import Any

from manege.errors import ManegeError
from manege.protocols.base import AskedSampling, InvalidRequest, ServedModel, TokenLogprob
from manege.types import JsonObject

__all__ = [
    "OpenAI",
    "error_body",
    "read_bool",
    "read_int",
    "read_list",
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

_MAX_INTEGER = 2**63 - 1


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
    top_k = read_int(body, "top_k", low=-1)
    return AskedSampling(
        temperature=_number(body, "temperature", low=0, high=2),
        top_p=_number(body, "top_p", low=0, high=1),
        # vLLM's -1 and 0 both mean off.
        top_k=max(top_k, 0) if top_k is not None else None,
        seed=read_int(body, "seed", low=-_MAX_INTEGER),
        stop=_stop(body.get("stop")),
        max_new_tokens=max_new_tokens,
        others={key: body[key] for key, neutral in _OTHERS.items() if body.get(key) not in neutral},
    )


def read_int(body: JsonObject, key: str, *, low: int, high: int = _MAX_INTEGER) -> int | None:
    """None when absent or null."""
    value = body.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{key} is {value!r}; want an integer", param=key)
    _check_range(key, value, low, high)
    return value


def read_bool(body: JsonObject, key: str, default: bool = False) -> bool:
    """`default` when absent or null."""
    value = body.get(key)
    if value is not None and not isinstance(value, bool):
        raise InvalidRequest(f"{key} is {value!r}; want true or false", param=key)
    return default if value is None else value


def read_text(body: JsonObject, key: str, where: str = "") -> str:
    """A field that must be a string; `where` is what it is part of."""
    value = body.get(key)
    if not isinstance(value, str):
        path = f"{where}.{key}" if where else key
        raise InvalidRequest(f"{path} is {value!r}; want a string", param=path)
    return value


def read_list(body: JsonObject, key: str) -> Sequence[Any]:
    """Empty when absent or null."""
    value = body.get(key)
    if value is not None and not isinstance(value, list):
        raise InvalidRequest(f"{key} is a {type(value).__name__}; want a list", param=key)
    return value or []


def read_object(value: Any, where: str) -> JsonObject:
    """`value`, which must be a JSON object."""
    if not isinstance(value, dict):
        raise InvalidRequest(f"{where} is {value!r}; want an object", param=where)
    return value


def read_wants_usage(body: JsonObject) -> bool:
    """Whether the answer tells its token counts: always if it is whole, on demand if it is streamed."""
    options = body.get("stream_options")
    wants = options is not None and read_bool(read_object(options, "stream_options"), "include_usage")
    return wants or not body.get("stream")


def _number(body: JsonObject, key: str, *, low: float, high: float) -> float | None:
    value = body.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest(f"{key} is {value!r}; want a number", param=key)
    _check_range(key, value, low, high)
    return float(value)


def _check_range(key: str, value: float, low: float, high: float) -> None:
    # Written so that NaN fails.
    if not low <= value <= high:
        wanted = f"at least {low}" if high == _MAX_INTEGER and value < low else f"between {low} and {high}"
        raise InvalidRequest(f"{key} is {value}; want {wanted}", param=key)


def _stop(value: Any) -> Sequence[str]:
    found = [value] if isinstance(value, str) else value or []
    if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
        raise InvalidRequest(f"stop is {value!r}; want a string or a list of strings", param="stop")
    return [item for item in found if item]
