"""Bodies in, answers and errors out, for our own API. One error object everywhere:

    {"error": {"code": "conflict", "message": "...", "status": 409}}

A body that is not the JSON that a route expects is 400, a field with an impossible value is 422; neither is ever 500.
"""

import json
from typing import Any, TypeVar

import orjson
from pydantic import TypeAdapter, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from manege.errors import ManegeError, ProtocolError, UnprocessableError

__all__ = ["MAX_BODY_BYTES", "answer", "error_handlers", "read_body", "read_json", "read_object", "validated"]

MAX_BODY_BYTES = 64 * 1024 * 1024
"""A batch of rollouts with large tasks, or a prompt of a million tokens as text, fits."""

RETRY_AFTER_S = 5

T = TypeVar("T")


async def read_body(request: Request, limit_bytes: int = MAX_BODY_BYTES) -> bytes:
    """The whole body. Raises ProtocolError when it is larger than the limit."""
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit_bytes:
            raise ProtocolError(f"the body is larger than {limit_bytes} bytes; send less")
        chunks.append(chunk)
    return b"".join(chunks)


async def read_json(request: Request, limit_bytes: int = MAX_BODY_BYTES) -> Any:
    """A JSON body; an empty one is {}. Raises ProtocolError (400), UnprocessableError (422) for NaN and Infinity."""
    raw = await read_body(request, limit_bytes)
    if not raw:
        return {}
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        _refuse_constants(raw)
        raise ProtocolError(f"the body is not JSON: {error}") from error


async def read_object(request: Request, limit_bytes: int = MAX_BODY_BYTES) -> dict[str, Any]:
    """A JSON body that is an object. Raises ProtocolError, UnprocessableError."""
    body = await read_json(request, limit_bytes)
    if not isinstance(body, dict):
        raise ProtocolError(f"the body must be a JSON object, not {type(body).__name__}")
    return body


def validated(adapter: TypeAdapter[T], value: Any) -> T:
    """Check a parsed body or query. Raises UnprocessableError that names each wrong field."""
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        wrong = [f"{'.'.join(map(str, item['loc'])) or 'value'}: {item['msg']}" for item in error.errors()]
        raise UnprocessableError("; ".join(wrong)) from error


def answer(value: Any, status: int = 200) -> Response:
    """JSON of plain values and dataclasses."""
    return Response(orjson.dumps(value), status, media_type="application/json")


def _refuse_constants(raw: bytes) -> None:
    def refuse(name: str) -> None:
        raise UnprocessableError(f"{name} is not a JSON number; send a finite one or null")

    try:
        json.loads(raw, parse_constant=refuse)
    except UnprocessableError:
        raise
    except ValueError:
        pass


def _error(code: str, message: str, status: int) -> Response:
    response = answer({"error": {"code": code, "message": message, "status": status}}, status)
    if status == 503:
        response.headers["retry-after"] = str(RETRY_AFTER_S)
    return response


async def _ours(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ManegeError)
    return _error(error.code, str(error), error.status)


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = "not_found" if error.status_code == 404 else "invalid_request_error"
    return _error(code, f"{request.method} {request.url.path}: {error.detail}", error.status_code)


async def _bug(_request: Request, _error_: Exception) -> Response:
    return _error("internal_error", "the gateway failed on this request; its log says why", 500)


error_handlers: dict[Any, Any] = {ManegeError: _ours, HTTPException: _no_route, Exception: _bug}
