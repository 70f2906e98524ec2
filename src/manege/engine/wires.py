"""The client of an engine elsewhere that takes token ids, by the wire that it speaks."""

from manege.engine.proof import ProvenEngine
from manege.engine.sglang import SglangEngine
from manege.engine.upstream import UpstreamEngine
from manege.types import EngineWire

__all__ = ["token_engine"]

_CLIENTS: dict[EngineWire, type[UpstreamEngine] | type[SglangEngine]] = {"vllm": UpstreamEngine, "sglang": SglangEngine}


def token_engine(
    url: str, wire: EngineWire, *, version: int = 0, sleeps: bool = False, fetches: bool = False
) -> ProvenEngine:
    """`url`: root of the server, with or without `/v1`. `version`: of its weights, until the server says. `sleeps` and
    `fetches`: see UpstreamEngine; only vLLM's can."""
    if sleeps or fetches:
        return ProvenEngine(UpstreamEngine(url, version=version, sleeps=sleeps, fetches=fetches), url)
    return ProvenEngine(_CLIENTS[wire](url, version=version), url)
