"""Questions to a server of which nothing is known yet: whatever it answers is an answer, silence too.

`has` asks with OPTIONS, which acts on nothing: some servers let go of their memory on a mere GET of the wrong path.
"""

import asyncio
import re
from dataclasses import dataclass
from typing import Any, Self

import orjson

from manege.engine.http1 import HttpClient
from manege.errors import EngineAwayError
from manege.types import JsonObject

__all__ = ["ANSWER_S", "Finding", "Peek", "Reply"]

ANSWER_S = 60.0
"""For one answer; a GPU that still compiles takes seconds."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was found out."""

    ok: bool | None
    """None: it could not be told, or need not be."""
    text: str
    option: str = ""
    """Of the server's command line or environment, that would make it ok."""


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer."""

    status: int
    data: Any
    """JSON, or None where there was none."""
    text: str

    def get(self, key: str) -> Any:
        """A member of a JSON object; None where there is none."""
        return self.data.get(key) if isinstance(self.data, dict) else None

    def __str__(self) -> str:
        """Status and why, as far as it says."""
        error = self.get("error")
        said = error.get("message") if isinstance(error, dict) else error or self.get("message") or self.text
        return f"{self.status} ({str(said)[:300].strip()})" if said else str(self.status)


class Peek:
    """`async with Peek(url) as peek`. `url`: root of a server, with or without `/v1`."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        # Alive or not, it is asked one thing after the other, each with its own limit of time.
        self._http = HttpClient(self.url, health="/v1/models")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    async def ask(self, method: str, path: str, body: JsonObject | None = None) -> Reply:
        """Raises EngineAwayError where nothing answers in time."""
        try:
            async with asyncio.timeout(ANSWER_S):
                raw = b"" if body is None else orjson.dumps(body)
                status, text = await self._http.request(method, path, raw)
        except TimeoutError:
            raise EngineAwayError(f"{self.url}{path} gave no answer within {ANSWER_S:g} s") from None
        try:
            data = orjson.loads(text)
        except orjson.JSONDecodeError:
            data = None
        return Reply(status, data, text[:1000].decode(errors="replace"))

    async def has(self, path: str) -> bool:
        """Whether it serves a path at all."""
        return (await self.ask("OPTIONS", path)).status not in (403, 404)

    async def metric(self, name: str) -> float | None:
        """The sum of a Prometheus metric over its labels; None where there is none."""
        try:
            async with asyncio.timeout(ANSWER_S):
                status, text = await self._http.request("GET", "/metrics")
        except TimeoutError:
            return None
        values = re.findall(rf"^{name}(?:{{.*}})? (\S+)", text.decode(errors="replace"), re.MULTILINE)
        return sum(map(float, values)) if status == 200 and values else None
