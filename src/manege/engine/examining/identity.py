"""Which server it is."""

from dataclasses import dataclass
from typing import Any

from manege.engine.examining.peek import Finding, Peek
from manege.types import EngineWire, JsonObject

__all__ = ["Identity", "identify"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What a server says of itself."""

    kind: str
    """`sglang`, `vllm`, `manege`, or `other`."""
    name: str
    """For people."""
    model: str
    context_limit: int | None
    info: JsonObject
    """SGLang's /model_info and /server_info; empty for others."""

    @property
    def wire(self) -> EngineWire:
        """That it would take token ids on."""
        return "sglang" if self.kind == "sglang" else "vllm"


async def identify(peek: Peek) -> Identity | Finding:
    """Or what is wrong. Raises EngineAwayError."""
    models = await peek.ask("GET", "/v1/models")
    try:
        card: Any = models.data["data"][0]
        model, limit = str(card["id"]), card.get("max_model_len")
    except (LookupError, TypeError, AttributeError):
        return Finding(False, f"{peek.url} is no engine: /v1/models answered {models}")
    if (info := await peek.ask("GET", "/model_info")).get("weight_version") is not None:
        server = await peek.ask("GET", "/server_info")
        both = {**(server.data if isinstance(server.data, dict) else {}), **info.data}
        name, kind = f"SGLang {server.get('version') or 'of unknown version'}", "sglang"
    elif card.get("owned_by") == "manege":
        both, name, kind = {}, "manege engine", "manege"
    elif (version := (await peek.ask("GET", "/version")).get("version")) is not None:
        both, name, kind = {}, f"vLLM {version}", "vllm"
    else:
        both, name, kind = {}, "a server of OpenAI's interface", "other"
    limit = limit if isinstance(limit, int) else None
    return Identity(kind=kind, name=name, model=model, context_limit=limit, info=both)
