"""The OpenAPI 3.1 description of the gateway, made from its route table: `/openapi.json`, and `/docs` for people.

A route of our own API is described by its handler's docstring and by what the handler declared (`declare.py`); the
agents' routes by `agent_bodies.py`. It is made from `app.routes` itself, so no route can be missing. Needs no key.
"""

import http
import inspect
import re
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import TypeAdapter
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import BaseRoute, Route

from manege import __version__
from manege.gateway.agent_bodies import AGENT_BODIES
from manege.gateway.declare import Declared, answers, declared
from manege.gateway.docs_page import docs_page
from manege.gateway.lightning import ROLLOUT_ID_PATTERN
from manege.http import answer
from manege.types import JsonObject

__all__ = ["describe", "description_routes"]

KEYS: Mapping[str, JsonObject] = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    "x-goog-api-key": {"type": "apiKey", "in": "header", "name": "x-goog-api-key"},
    "key": {"type": "apiKey", "in": "query", "name": "key"},
}
"""Four ways to send the same key; which one each SDK takes is its own affair."""
KEY_NEEDED = {"operator": "Needs the operator key.", "agent": "Needs the key of the attempt, or the operator's."}
ERRORS = {
    400: "The body is not the JSON that the route expects.",
    401: "No key was given, or one that was never given out.",
    403: "The key is not good for this route, or for this attempt.",
    404: "No such run, rollout, attempt, model or action.",
    409: "The state does not allow it any more; trying again does not help.",
    413: "The body is too large.",
    422: "A field or a parameter has an impossible value; the message names it.",
    502: "The engine or a service failed, or answered nonsense.",
    503: "Try again, after the seconds of Retry-After.",
}
PATH_PARAMETERS: Mapping[str, JsonObject] = {
    "rollout_id": {"type": "string", "pattern": ROLLOUT_ID_PATTERN},
    "attempt": {"type": "integer", "minimum": 0},
    "mode": {"enum": ["train", "val"]},
    "action": {"type": "string", "pattern": "^.+:(generateContent|streamGenerateContent|countTokens)$"},
}
"""Others are any text."""


def description_routes() -> list[Route]:
    """They need no key."""
    handlers = _Description()
    return [
        Route("/openapi.json", handlers.as_json, methods=["GET"]),
        Route("/docs", handlers.as_page, methods=["GET"]),
    ]


class _Description:
    """Of one application, made when it is first asked for."""

    def __init__(self) -> None:
        self._made: JsonObject | None = None

    async def as_json(self, request: Request) -> Response:
        """This description, as OpenAPI 3.1."""
        return answer(self._of(request))

    @answers(200, "text/html")
    async def as_page(self, request: Request) -> Response:
        """This description, as a page to read."""
        return HTMLResponse(docs_page(self._of(request)))

    def _of(self, request: Request) -> JsonObject:
        self._made = self._made or describe(request.app.routes)
        return self._made


def describe(routes: Iterable[BaseRoute]) -> JsonObject:
    """The OpenAPI document of these routes; each must be a `Route` whose endpoint has a docstring."""
    paths: dict[str, dict[str, Any]] = {}
    # Named types that bodies share.
    schemas: dict[str, Any] = {"Error": _error("code", "message", "status"), "ProtocolError": _error("message")}
    for route in routes:
        assert isinstance(route, Route), f"{route!r} cannot be described"
        for method in sorted((route.methods or set()) - {"HEAD"}):
            paths.setdefault(route.path_format, {})[method.lower()] = _operation(route, method, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "manege gateway", "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": dict(KEYS)},
    }


def _operation(route: Route, method: str, schemas: dict[str, Any]) -> JsonObject:
    said = declared(route.endpoint)
    summary = " ".join((inspect.getdoc(route.endpoint) or "").split())
    body = None if said.body is None else _schema(said.body, schemas)
    agents_path = re.search(r"/v1(?:beta)?(/.+)", route.path_format)
    if agents_path is not None:
        said = Declared(key="agent") if said == Declared() else said
        summary, body = AGENT_BODIES[agents_path[1]] if method == "POST" else (summary, None)
    operation: dict[str, Any] = {
        "operationId": "_".join([method.lower(), *re.findall(r"\w+", route.path_format)]),
        "summary": summary,
        "parameters": [*_path_parameters(route), *_query_parameters(said, schemas)],
        "responses": _responses(said, _errors(route, method, said, body), is_agents=agents_path is not None),
    }
    if body is not None:
        is_required = "required" in body or body.get("type") == "array"
        operation["requestBody"] = {"required": is_required, "content": {"application/json": {"schema": body}}}
    if said.key is not None:
        security = [{name: []} for name in KEYS]
        operation |= {"description": KEY_NEEDED[said.key], "security": security, "x-key": said.key}
    return operation


def _errors(route: Route, method: str, said: Declared, body: JsonObject | None) -> set[int]:
    """The statuses of `ERRORS` that an operation can answer."""
    if said.key is None:
        return set()
    can = {401, 403, 503}
    if route.param_convertors or body is not None or said.key == "agent":
        can |= {404, 409}
    if method == "DELETE":
        can.add(404)
    if body is not None:
        can |= {400, 413}
    if said.body is not None or said.query is not None:
        can.add(422)
    return can if method == "GET" else can | {502}


def _responses(said: Declared, errors: set[int], *, is_agents: bool) -> JsonObject:
    success: dict[str, Any] = {"description": http.HTTPStatus(said.status).phrase}
    if said.status != 204:
        success["content"] = {said.media_type: {}}
    if is_agents and 502 in errors:
        success["content"] = {"application/json": {}, "text/event-stream": {}}
    schema = {"$ref": f"#/components/schemas/{'ProtocolError' if is_agents else 'Error'}"}
    content = {"application/json": {"schema": schema}}
    failures = {str(status): {"description": ERRORS[status], "content": content} for status in sorted(errors)}
    return {str(said.status): success, **failures}


def _path_parameters(route: Route) -> list[JsonObject]:
    return [
        {"name": name, "in": "path", "required": True, "schema": PATH_PARAMETERS.get(name, {"type": "string"})}
        for name in route.param_convertors
    ]


def _query_parameters(said: Declared, schemas: dict[str, Any]) -> list[JsonObject]:
    if said.query is None:
        return []
    fields = _schema(TypeAdapter(said.query), schemas)["properties"]
    return [{"name": name, "in": "query", "schema": _without_null(field)} for name, field in fields.items()]


def _without_null(schema: JsonObject) -> JsonObject:
    """A parameter that is None in our code is simply not sent."""
    kept = {key: value for key, value in schema.items() if key != "default" or value is not None}
    options = [option for option in kept.pop("anyOf", []) if option != {"type": "null"}]
    assert len(options) <= 1, f"a query parameter of several types: {schema}"
    return {**kept, **(options[0] if options else {})}


def _schema(adapter: TypeAdapter[Any], schemas: dict[str, Any]) -> dict[str, Any]:
    made = adapter.json_schema(ref_template="#/components/schemas/{model}")
    for name, shared in made.pop("$defs", {}).items():
        assert schemas.setdefault(name, shared) == shared, f"two types are called {name}"
    return made


def _error(*fields: str) -> JsonObject:
    kinds = {name: {"type": "integer" if name == "status" else "string"} for name in fields}
    error = {"type": "object", "required": list(fields), "properties": kinds}
    return {"type": "object", "required": ["error"], "properties": {"error": error}}
