"""One error hierarchy: a class per boundary.

How errors flow: a boundary (a protocol parser, an engine, the store ...) raises its own class; the part that owns the
boundary turns it into an answer in the caller's protocol, into an outcome of a rollout, or lets it reach the command
line, which prints one line. A failed rollout is data, not an exception. Bugs are not caught.

A message says what failed, with which value, and what to do.
"""

__all__ = [
    "BodyTooLargeError",
    "ClusterError",
    "ConfigError",
    "ConflictError",
    "ContextOverflowError",
    "EngineAwayError",
    "EngineError",
    "ForbiddenError",
    "HarnessError",
    "ManegeError",
    "ModelError",
    "NotFoundError",
    "ProtocolError",
    "SandboxError",
    "ServiceError",
    "StoreError",
    "TrainerError",
    "UnauthorizedError",
    "UnavailableError",
    "UnprocessableError",
]


class ManegeError(Exception):
    """The root of all errors that we raise on purpose."""

    status = 500
    """HTTP status that the gateway answers with."""
    code = "internal_error"
    """Stable machine-readable word, part of the HTTP API."""


class ConfigError(ManegeError, ValueError):
    """A run file, an override or a command line that cannot be carried out."""

    status, code = 400, "invalid_config"


class ModelError(ManegeError, ValueError):
    """A model folder that cannot be used: no tokenizer, no chat template, unknown architecture."""

    status, code = 400, "invalid_model"


class ProtocolError(ManegeError, ValueError):
    """A request that its protocol does not allow, or that we do not support."""

    status, code = 400, "invalid_request_error"


class ContextOverflowError(ProtocolError):
    """The prompt and the requested answer do not fit the model's context."""

    code = "context_length_exceeded"

    def __init__(self, message: str, *, num_prompt: int | None = None, context_limit: int | None = None) -> None:
        super().__init__(message)
        self.num_prompt, self.context_limit = num_prompt, context_limit
        """In tokens, where known: protocols say it in their own words."""


class BodyTooLargeError(ProtocolError):
    """A request body beyond `gateway.max_body_mb`."""

    status, code = 413, "request_too_large"


class UnprocessableError(ManegeError, ValueError):
    """A body of our own API with a missing field or an impossible value, for example a reward that is not a number."""

    status, code = 422, "unprocessable"


class UnauthorizedError(ManegeError):
    """A key that is missing or that we never gave."""

    status, code = 401, "invalid_api_key"


class ForbiddenError(ManegeError):
    """A key that is not good for this route or this attempt."""

    status, code = 403, "forbidden"


class NotFoundError(ManegeError, LookupError):
    """A run, rollout or model that does not exist."""

    status, code = 404, "not_found"


class ConflictError(ManegeError):
    """A write that the state does not allow any more, for example to a terminal rollout."""

    status, code = 409, "conflict"


class UnavailableError(ManegeError):
    """Try again later: paused, full or not connected. Answered as 503 with Retry-After."""

    status, code = 503, "unavailable"


class EngineError(ManegeError):
    """The inference engine failed or answered nonsense."""

    status, code = 502, "engine_error"


class EngineAwayError(EngineError):
    """The inference engine cannot be reached, hangs, or broke off: it may be restarting."""

    code = "engine_away"


class StoreError(ManegeError):
    """The database could not be read or written."""

    status, code = 503, "store_error"


class SandboxError(ManegeError):
    """Isolation that was asked for cannot be had on this machine."""

    status, code = 500, "sandbox_error"


class ClusterError(ManegeError):
    """A Kubernetes API that refused a request or cannot be reached."""

    status, code = 502, "cluster_error"


class HarnessError(ManegeError):
    """An agent, setup or scorer program that cannot be started or breaks its contract."""

    status, code = 400, "harness_error"


class ServiceError(ManegeError):
    """A service of a run, which agents reach through the gateway, that does not start or does not answer."""

    status, code = 502, "service_error"


class TrainerError(ManegeError):
    """The training cannot go on: no calls, no rewards, ledgers that do not add up."""

    status, code = 500, "trainer_error"
