"""What a handler says of itself, so that the OpenAPI description is what the code does.

`takes` and `asks` read and check the body or the query and pass it on, so that a handler cannot take what it does not
declare; `answers` names a success other than 200 with JSON. What was declared is kept on the handler, survives
`functools.wraps`, and is read by `openapi.py`.
"""

import functools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, get_origin

from pydantic import BaseModel, TypeAdapter
from starlette.requests import Request
from starlette.responses import Response

from manege.http import MAX_BODY_BYTES, read_json, read_object, validated

__all__ = ["Declared", "answers", "asks", "declare", "declared", "takes"]

_NAME = "declared_of_handler"

Handler = TypeVar("Handler", bound=Callable[..., Any])
Owner = TypeVar("Owner")
Value = TypeVar("Value")
Query = TypeVar("Query", bound=BaseModel)
Rest = ParamSpec("Rest")

Reads = Callable[
    [Callable[Concatenate[Owner, Request, Value, Rest], Awaitable[Response]]],
    Callable[Concatenate[Owner, Request, Rest], Awaitable[Response]],
]
"""Of a method that is called with the request, the value and the rest, makes one that is called without the value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """What a client must know of one handler, beside its docstring."""

    key: Literal["operator", "agent"] | None = None
    """Which key it needs; the operator's opens an agent's routes, too."""
    body: TypeAdapter[Any] | None = None
    query: type[BaseModel] | None = None
    status: int = 200
    """Of its success; 204 has no body."""
    media_type: str = "application/json"
    """Of its success."""


def declared(endpoint: object) -> Declared:
    """What was declared of a handler; nothing, unless it was."""
    return getattr(endpoint, _NAME, Declared())


def declare(handler: Handler, **changes: Any) -> Handler:
    """The handler itself, with these fields of `Declared`."""
    setattr(handler, _NAME, replace(declared(handler), **changes))
    return handler


def answers(status: int, media_type: str = "application/json") -> Callable[[Handler], Handler]:
    """What the decorated handler answers when all is well."""
    return lambda handler: declare(handler, status=status, media_type=media_type)


def takes(kind: type[Value], limit_bytes: int = MAX_BODY_BYTES) -> Reads[Owner, Value, Rest]:
    """The decorated method gets the request's body as a `kind`. One that is not JSON, or no object where `kind` is a
    model, is 400; a wrong field is 422."""
    adapter = TypeAdapter(kind)
    read = read_object if isinstance(kind, type) and issubclass(kind, BaseModel) else read_json

    def decorate(
        method: Callable[Concatenate[Owner, Request, Value, Rest], Awaitable[Response]],
    ) -> Callable[Concatenate[Owner, Request, Rest], Awaitable[Response]]:
        @functools.wraps(method)
        async def reading(owner: Owner, request: Request, *args: Rest.args, **kwargs: Rest.kwargs) -> Response:
            body = validated(adapter, await read(request, limit_bytes))
            return await method(owner, request, body, *args, **kwargs)

        return declare(reading, body=adapter)

    return decorate


def asks(kind: type[Query]) -> Reads[Owner, Query, Rest]:
    """The decorated method gets the request's query as a `kind`; parameters that `kind` lacks are ignored. A field that
    is a list takes a parameter that is given several times. A wrong value is 422."""
    adapter = TypeAdapter(kind)
    repeated = {name for name, field in kind.model_fields.items() if get_origin(field.annotation) is list}

    def decorate(
        method: Callable[Concatenate[Owner, Request, Query, Rest], Awaitable[Response]],
    ) -> Callable[Concatenate[Owner, Request, Rest], Awaitable[Response]]:
        @functools.wraps(method)
        async def asking(owner: Owner, request: Request, *args: Rest.args, **kwargs: Rest.kwargs) -> Response:
            params = request.query_params
            given = {name: params.getlist(name) if name in repeated else params[name] for name in params}
            return await method(owner, request, validated(adapter, given), *args, **kwargs)

        return declare(asking, query=kind)

    return decorate
