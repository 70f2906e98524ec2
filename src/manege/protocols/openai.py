"""What OpenAI's chat completions and completions have in common: fields, their checks, and the shape of errors."""

from collections.abc import Sequence
from typing import Any

from manege.errors import ManegeError
from manege.protocols.base import AskedSampling, InvalidRequest, ModelReply
from manege.types import FinishReason, JsonObject

__all__ = ["completion", "error_body", "read_bool", "read_int", "read_sampling", "refuse_unsupported"]

# Fields that change what is sampled, with the values at which they change nothing.
_OTHERS = {
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "min_p": (None, 0),
    "logit_bias": (None, {}),
}

_UNSUPPORTED = {
    "stream": ((None, False), "streaming comes later, send stream=false"),
    "n": ((None, 1), "send one request per answer"),
    "best_of": ((None, 1), "send one request per answer"),
    "top_logprobs": ((None, 0), "only the sampled token's log-probability is known, send logprobs alone"),
    "response_format": ((None, {"type": "text"}), "there is no constrained decoding, ask for JSON in the prompt"),
    "echo": ((None, False), "leave it out"),
    "suffix": ((None, ""), "leave it out"),
}


def read_sampling(body: JsonObject, *, max_new_tokens: int | None) -> AskedSampling:
    """Raises InvalidRequest for a value of the wrong type or out of range."""
    top_k = read_int(body, "top_k", low=-1)
    return AskedSampling(
        temperature=_number(body, "temperature", low=0, high=2),
        top_p=_number(body, "top_p", low=0, high=1),
        # vLLM's -1 and 0 both mean off.
        top_k=max(top_k, 0) if top_k is not None else None,
        seed=read_int(body, "seed", low=-(2**63)),
        stop=_stop(body.get("stop")),
        max_new_tokens=max_new_tokens,
        others={key: body[key] for key, neutral in _OTHERS.items() if body.get(key) not in neutral},
    )


def refuse_unsupported(body: JsonObject) -> None:
    """Raises InvalidRequest for what would silently not happen."""
    for key, (neutral, advice) in _UNSUPPORTED.items():
        if body.get(key) not in neutral:
            raise InvalidRequest(f"{key} = {body[key]!r} is not supported; {advice}", param=key)


def read_int(body: JsonObject, key: str, *, low: int, high: int | None = None) -> int | None:
    """None when absent or null."""
    value = body.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{key} is {value!r}; want an integer", param=key)
    _check_range(key, value, low, high)
    return value


def read_bool(body: JsonObject, key: str) -> bool | None:
    """None when absent or null."""
    value = body.get(key)
    if value is not None and not isinstance(value, bool):
        raise InvalidRequest(f"{key} is {value!r}; want true or false", param=key)
    return value


def completion(reply: ModelReply, *, prefix: str, kind: str, choice: JsonObject) -> dict[str, Any]:
    """The body around an answer's one choice, with its token counts. `prefix`: of the id."""
    finish_reason = "length" if reply.finish_reason is FinishReason.LENGTH else "stop"
    return {
        "id": f"{prefix}-{reply.id}",
        "object": kind,
        "created": int(reply.created_s),
        "model": reply.model,
        "choices": [{"index": 0, "finish_reason": finish_reason, "logprobs": None, **choice}],
        "usage": {
            "prompt_tokens": reply.num_prompt,
            "completion_tokens": reply.num_sampled,
            "total_tokens": reply.num_prompt + reply.num_sampled,
            "prompt_tokens_details": {"cached_tokens": reply.num_cached},
        },
    }


def error_body(error: ManegeError) -> JsonObject:
    """OpenAI's error object. Its SDKs show `message`, and compare `code`."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    code = None if error.code == kind else error.code
    param = error.param if isinstance(error, InvalidRequest) else None
    return {"error": {"message": str(error), "type": kind, "param": param, "code": code}}


def _number(body: JsonObject, key: str, *, low: float, high: float) -> float | None:
    value = body.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest(f"{key} is {value!r}; want a number", param=key)
    _check_range(key, value, low, high)
    return float(value)


def _check_range(key: str, value: float, low: float, high: float | None) -> None:
    if value < low or (high is not None and value > high):
        wanted = f"at least {low}" if high is None else f"between {low} and {high}"
        raise InvalidRequest(f"{key} is {value}; want {wanted}", param=key)


def _stop(value: Any) -> Sequence[str]:
    found = [value] if isinstance(value, str) else value or []
    if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
        raise InvalidRequest(f"stop is {value!r}; want a string or a list of strings", param="stop")
    return [item for item in found if item]
