"""HTTP of the search service: `GET /healthz` and `POST /search`.

    {"queries": ["who wrote Dracula?"], "top_k": 3}
    {"results": [[{"id": "7", "title": "Dracula", "text": "...", "score": 11.3}, ...]]}

Searching runs in threads, a few queries of a request at a time, so that requests share the cores and the health check
answers meanwhile. What is wrong with a body is said in one line (400, 422); too many queries at once are 503.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from manege.engine.threads import physical_cores
from manege.errors import UnavailableError, UnprocessableError
from manege.http import Connection, answer, error_handlers, read_object
from manege.recipes.search.retrieval.collection import Collection

__all__ = ["search_app"]

MAX_QUERIES = 512
"""Of a request: all searches of a step's rollouts together."""
MAX_QUERY_CHARS = 4_000
"""A long question; words beyond would cost time and find nothing better."""
MAX_TOP_K = 100
MAX_WAITING = 8_192
"""Queries of all requests: some minutes of work on a million passages."""
_TOP_K = 3
_AT_ONCE = 8
"""Queries of a request that a thread takes: enough for a batch of the encoder, few enough to share the cores."""


def search_app(collection: Collection) -> Starlette:
    """The service of one corpus."""
    service = _Service(collection)
    routes = [Route("/healthz", service.health), Route("/search", service.search, methods=["POST"])]
    return Starlette(routes=routes, exception_handlers=error_handlers)


class _Service:
    def __init__(self, collection: Collection) -> None:
        self._collection = collection
        self._threads = ThreadPoolExecutor(physical_cores(), "search")
        self._num_waiting = 0

    async def health(self, _request: Request) -> Response:
        collection = self._collection
        return answer(
            {
                "status": "ok",
                "corpus": collection.name,
                "num_passages": len(collection.passages),
                "kind": collection.kind,
                "fingerprint": collection.fingerprint,
            }
        )

    async def search(self, request: Request) -> Response:
        queries, top_k = _checked(await read_object(request))
        if self._num_waiting + len(queries) > MAX_WAITING:
            raise UnavailableError(f"{self._num_waiting} queries are waiting; try again later, or with fewer")
        self._num_waiting += len(queries)
        try:
            async with Connection(request.receive) as connection:
                return answer({"results": await connection.run(self._results(queries, top_k))})
        finally:
            self._num_waiting -= len(queries)

    async def _results(self, queries: list[str], top_k: int) -> list[list[dict[str, Any]]]:
        loop, some = asyncio.get_running_loop(), range(0, len(queries), _AT_ONCE)
        parts = await asyncio.gather(
            *(loop.run_in_executor(self._threads, self._found, queries[n : n + _AT_ONCE], top_k) for n in some)
        )
        return [ranking for part in parts for ranking in part]

    def _found(self, queries: list[str], top_k: int) -> list[list[dict[str, Any]]]:
        rankings = self._collection.search(queries, top_k)
        return [[asdict(passage) | {"score": score} for passage, score in ranking] for ranking in rankings]


def _checked(body: dict[str, Any]) -> tuple[list[str], int]:
    """Raises UnprocessableError."""
    if unknown := body.keys() - {"queries", "top_k"}:
        raise UnprocessableError(f"{', '.join(sorted(unknown))}: unknown; send queries and top_k")
    queries, top_k = body.get("queries"), body.get("top_k", _TOP_K)
    if not isinstance(queries, list) or not 1 <= len(queries) <= MAX_QUERIES:
        has = f"{len(queries)} long" if isinstance(queries, list) else f"{queries!r:.60}"
        raise UnprocessableError(f"queries is {has}; send a list of 1 to {MAX_QUERIES} strings")
    for number, query in enumerate(queries):
        if not isinstance(query, str):
            raise UnprocessableError(f"queries[{number}] is {query!r:.60}; send a string")
        if len(query) > MAX_QUERY_CHARS:
            raise UnprocessableError(f"queries[{number}] has {len(query)} characters; send at most {MAX_QUERY_CHARS}")
    if not isinstance(top_k, int) or isinstance(top_k, bool) or not 1 <= top_k <= MAX_TOP_K:
        raise UnprocessableError(f"top_k is {top_k!r:.60}; send a number from 1 to {MAX_TOP_K}")
    return queries, top_k
