"""HTTP as the gateway and the engine's server share it: bodies in, answers and errors out, callers that go away.

One error object everywhere but in the answers to agents, which speak their protocols:

    {"error": {"code": "conflict", "message": "...", "status": 409}}

A body that is not the JSON that a route expects is 400, a field with an impossible value is 422; neither is ever 500.
"""

import asyncio
import zlib
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Self, TypeVar

import orjson
import zstandard
from pydantic import TypeAdapter, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive

from manege.errors import BodyTooLargeError, ManegeError, ProtocolError, UnprocessableError

__all__ = [
    "HOP_HEADERS",
    "MAX_BODY_BYTES",
    "RETRY_AFTER_S",
    "ClientGone",
    "Connection",
    "answer",
    "error_handlers",
    "read_json",
    "read_object",
    "read_raw",
    "validated",
]

MAX_BODY_BYTES = 64 * 1024 * 1024
"""A batch of rollouts with large tasks, or a prompt of a million tokens as text, fits."""
MAX_DEPTH = 100
"""Levels of lists and objects in a body; no client comes near. What is read becomes a part of other things, and JSON
writers and pydantic stop at about 250."""
_WRITER_DEPTH = 254
RETRY_AFTER_S = 5
"""After a 503."""
# fmt: off
HOP_HEADERS = frozenset((
    b"connection", b"expect", b"host", b"keep-alive", b"proxy-authenticate", b"proxy-connection", b"te", b"trailer",
    b"transfer-encoding", b"upgrade",
))
# fmt: on
"""Headers about one connection, https://www.rfc-editor.org/rfc/rfc9110#section-7.6.1, and what each side makes anew."""

T = TypeVar("T")


async def read_raw(request: Request, limit_bytes: int = MAX_BODY_BYTES) -> bytes:
    """The body as it came. Raises BodyTooLargeError."""
    raw = bytearray()
    async for part in request.stream():
        raw += part
        _check_size(len(raw), limit_bytes)
    return bytes(raw)


async def read_body(request: Request, limit_bytes: int = MAX_BODY_BYTES) -> bytes:
    """The body, unpacked if it is gzip or zstd; both forms are limited. Raises ProtocolError, BodyTooLargeError."""
    encoding = request.headers.get("content-encoding", "identity").lower()
    if encoding not in _UNPACKERS:
        raise ProtocolError(f"content-encoding {encoding!r} is not supported; send gzip, zstd or plain")
    raw = await read_raw(request, limit_bytes)
    try:
        return _UNPACKERS[encoding](raw, limit_bytes)
    except (zlib.error, zstandard.ZstdError, EOFError) as error:
        raise ProtocolError(f"the body is not valid {encoding}: {error}") from error


def _unpack_gzip(raw: bytes, limit_bytes: int) -> bytes:
    unpacker = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
    body = unpacker.decompress(raw, limit_bytes + 1)
    _check_size(len(body), limit_bytes)
    if not unpacker.eof:
        raise EOFError("it ends too early")
    return body


def _unpack_zstd(raw: bytes, limit_bytes: int) -> bytes:
    with zstandard.ZstdDecompressor().stream_reader(raw) as reader:
        body = reader.read(limit_bytes + 1)
    _check_size(len(body), limit_bytes)
    return body


def _check_size(num_bytes: int, limit_bytes: int) -> None:
    if num_bytes > limit_bytes:
        raise BodyTooLargeError(f"the body is larger than {limit_bytes} bytes (gateway.max_body_mb); send less")


_UNPACKERS: dict[str, Callable[[bytes, int], bytes]] = {
    "identity": lambda raw, _: raw,
    "gzip": _unpack_gzip,
    "x-gzip": _unpack_gzip,
    "zstd": _unpack_zstd,
}


async def read_json(request: Request, limit_bytes: int = MAX_BODY_BYTES) -> Any:
    """A JSON body; an empty one is {}. Raises ProtocolError, BodyTooLargeError."""
    raw = await read_body(request, limit_bytes)
    try:
        body = orjson.loads(raw) if raw else {}
    except orjson.JSONDecodeError as error:
        raise ProtocolError(f"the body is not valid JSON: {error}") from error
    _check_depth(body)
    return body


def _check_depth(body: Any) -> None:
    """Written inside so many lists, only MAX_DEPTH levels are left; faster than a walk of ours."""
    for _ in range(_WRITER_DEPTH - MAX_DEPTH):
        body = [body]
    try:
        orjson.dumps(body)
    except orjson.JSONEncodeError as error:
        raise ProtocolError(f"the body is nested deeper than {MAX_DEPTH} levels; send it flatter") from error


async def read_object(request: Request, limit_bytes: int = MAX_BODY_BYTES) -> dict[str, Any]:
    """A JSON body that is an object. Raises ProtocolError."""
    body = await read_json(request, limit_bytes)
    if not isinstance(body, dict):
        raise ProtocolError(f"the body is a JSON {type(body).__name__}; send an object")
    return body


def validated(adapter: TypeAdapter[T], value: Any) -> T:
    """Check a parsed body or query. Raises UnprocessableError that names each wrong field."""
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        wrong = [f"{'.'.join(map(str, item['loc'])) or 'value'}: {item['msg']}" for item in error.errors()]
        raise UnprocessableError("; ".join(wrong)) from error


def answer(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """JSON of plain values and dataclasses."""
    headers = dict(headers or {}) | ({"retry-after": str(RETRY_AFTER_S)} if status == 503 else {})
    return Response(orjson.dumps(value), status, headers, "application/json")


class ClientGone(Exception):
    """The caller closed its connection before it was answered."""


class Connection:
    """Whether the caller is still there while its answer is made: `async with Connection(receive)`, after the body was
    read. ASGI tells of a disconnect only to who calls `receive`, so one task waits there until the answer is sent."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive

    async def __aenter__(self) -> Self:
        self._watch = asyncio.create_task(self._until_gone(), name="connection-watch")
        return self

    async def __aexit__(self, *_: object) -> None:
        await _cancel(self._watch)

    @property
    def gone(self) -> bool:
        """Means something until the answer is sent; a complete answer also ends the watch."""
        return self._watch.done()

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Do `work`, but cancel it and raise ClientGone as soon as the caller goes away."""
        task = asyncio.create_task(work, name="connection-work")
        try:
            await asyncio.wait({task, self._watch}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ClientGone
            return task.result()
        finally:
            await _cancel(task)

    async def _until_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass


async def _cancel(task: asyncio.Task[Any]) -> None:
    if not task.done():
        task.cancel()
        await asyncio.wait({task})


def _error(code: str, message: str, status: int) -> Response:
    return answer({"error": {"code": code, "message": message, "status": status}}, status)


async def _ours(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ManegeError)
    return _error(error.code, str(error), error.status)


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = "not_found" if error.status_code == 404 else "invalid_request_error"
    return _error(code, f"{request.method} {request.url.path}: {error.detail}", error.status_code)


async def _gone(_request: Request, _gone_: Exception) -> Response:
    return Response(status_code=499)


async def _bug(_request: Request, _error_: Exception) -> Response:
    return _error("internal_error", "the server failed on this request; its log says why", 500)


error_handlers: dict[Any, Any] = {
    ManegeError: _ours,
    HTTPException: _no_route,
    ClientGone: _gone,
    ClientDisconnect: _gone,
    Exception: _bug,
}
