"""From what the engine sampled to the answer that the agent reads and the call that is stored; pure."""

import secrets
from collections.abc import Callable, Sequence
from typing import Any

from manege.engine.base import Chunk, Collector
from manege.engine.routed_experts import without_first
from manege.gateway.admission import Admitted
from manege.gateway.auth import AgentIdentity
from manege.gateway.sources import Answer
from manege.protocols.base import Choice, ModelRequest, ReplyDelta, TokenLogprob
from manege.rendering.base import ParsedReply, Renderer
from manege.types import Call, CallId, Delivered, JsonObject

__all__ = ["Capture", "choice_of", "new_call", "new_call_id"]

_KEYS = {"authorization", "proxy-authorization", "x-api-key", "x-goog-api-key", "cookie"}
_COMMON = {"host", "content-length", "content-type", "content-encoding", "transfer-encoding", "connection", "expect"}
_UNRECORDED = frozenset(_KEYS | _COMMON | {"accept", "accept-encoding", "accept-language"})
"""Keys, and what every HTTP client sends."""
_MESSAGES = {
    "responses": ("input", "instructions"),
    "anthropic": ("system",),
    "gemini": ("contents", "systemInstruction", "system_instruction"),
}
"""Fields of a body that are kept as canonical messages instead, beside `messages`."""


class Capture:
    """One answer while it is sampled: chunks in, deltas out; keeps every id, whatever the parser makes of it."""

    def __init__(self, request: ModelRequest, prompt_ids: Sequence[int], renderer: Renderer) -> None:
        self.collector = Collector()
        self._request, self._renderer = request, renderer
        stop = request.sampling.stop
        if request.prompt is None:
            tools = request.tools if request.tool_choice != "none" else ()
            self._parser = renderer.live_parser(prompt_ids=prompt_ids, tools=tools, stop=stop)
        else:
            self._parser = renderer.live_text(stop=stop)
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._tool_calls: list[JsonObject] = []

    def add(self, chunk: Chunk) -> ReplyDelta | None:
        """What the chunk adds to the answer; None: nothing that can be sent yet."""
        self.collector.add(chunk)
        return self._delta(self._parser.feed(chunk.ids), chunk)

    def finish(self) -> ReplyDelta | None:
        """The rest."""
        return self._delta(self._parser.finish(), None)

    @property
    def stopped_by(self) -> str | None:
        """The caller's stop string that ended the answer."""
        return self._parser.stopped_by

    def message(self) -> JsonObject:
        """The canonical message, or `{"text": ...}` of a text completion."""
        content = "".join(self._content)
        if self._request.prompt is not None:
            return {"text": content}
        return assistant_message(content, "".join(self._reasoning), self._tool_calls)

    def _delta(self, parsed: ParsedReply, chunk: Chunk | None) -> ReplyDelta | None:
        limit = self._request.max_tool_calls
        room = None if limit is None else max(limit - len(self._tool_calls), 0)
        # Our ids come back in the next request and help to recognise the conversation.
        tool_calls = [
            {
                "id": f"call_{secrets.token_hex(12)}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in parsed.tool_calls[:room]
        ]
        self._content.append(parsed.content)
        self._reasoning.append(parsed.reasoning or "")
        self._tool_calls += tool_calls
        wants_logprobs, wants_ids = self._request.wants_logprobs, self._request.wants_token_ids
        shown = chunk if chunk is not None and (wants_logprobs or wants_ids) else None
        if not (parsed.content or parsed.reasoning or tool_calls or (shown and shown.ids)):
            return None
        return ReplyDelta(
            reasoning=parsed.reasoning or "",
            content=parsed.content,
            tool_calls=tool_calls,
            logprobs=_logprobs(shown.ids, shown.logprobs, self._renderer) if shown and wants_logprobs else (),
            response_ids=list(shown.ids) if shown and wants_ids else (),
        )


def assistant_message(content: str, reasoning: str | None, tool_calls: Sequence[JsonObject]) -> JsonObject:
    """A canonical assistant message."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if tool_calls:
        message["tool_calls"] = list(tool_calls)
    return message


def new_call_id() -> CallId:
    """Letters and digits, unique."""
    return CallId(secrets.token_hex(12))


def new_call(
    call_id: CallId,
    request: ModelRequest,
    answer: Answer,
    *,
    identity: AgentIdentity,
    protocol: str,
    admitted: Admitted,
    thread: str,
    edits: Sequence[str],
    headers: Callable[[], Sequence[tuple[str, str]]],
    delivered: Delivered,
    created_s: float,
    ended_s: float,
) -> Call:
    """The call as it is stored, its messages and tools canonical; a continued call keeps only what its parent lacks."""
    body, prompt, generation = dict(request.raw), answer.prompt, answer.generation
    if request.prompt is None:
        for name in ("tools", *_MESSAGES.get(protocol, ())):
            body.pop(name, None)
        body["messages"] = list(prompt.new_messages)
        if request.tools and prompt.parent is None:
            body["tools"] = list(request.tools)
    return Call(
        id=call_id,
        rollout_id=identity.rollout_id,
        attempt=identity.attempt,
        parent=prompt.parent,
        protocol=protocol,
        mode=identity.mode,
        prompt_ids_P=prompt.ids,
        response_ids_R=generation.ids_R,
        logprobs_R=generation.logprobs_R,
        spans=generation.spans,
        temperature=admitted.sampling.temperature,
        finish_reason=generation.finish_reason,
        delivered=delivered,
        request=body,
        reply=answer.message,
        overridden=admitted.overridden,
        thread=thread,
        headers={name: value for name, value in headers() if name not in _UNRECORDED},
        edits=[*edits, *request.notes],
        constrained=request.is_constrained,
        # The parent's last token was sampled, but not computed.
        routed_experts=without_first(generation.routed_experts, prompt.num_shared - 1),
        flaw=answer.flaw,
        created_s=created_s,
        ended_s=ended_s,
    )


def choice_of(request: ModelRequest, answer: Answer, renderer: Renderer | None) -> Choice:
    """An answer as the wire shows it; where the engine said the text of its tokens, no renderer is needed."""
    generation = answer.generation
    ids = generation.ids_R.tolist()
    logprobs: Sequence[TokenLogprob] = ()
    if request.wants_logprobs and answer.texts is not None:
        pairs = zip(answer.texts, generation.logprobs_R.tolist(), strict=True)
        logprobs = [TokenLogprob(text=text, logprob=logprob) for text, logprob in pairs]
    elif request.wants_logprobs and renderer is not None:
        logprobs = _logprobs(ids, generation.logprobs_R.tolist(), renderer)
    return Choice(
        message=answer.message,
        finish_reason=generation.finish_reason,
        stop_sequence=answer.stopped_by,
        num_sampled=answer.num_sampled,
        logprobs=logprobs,
        response_ids=ids if request.wants_token_ids else None,
    )


def _logprobs(ids: Sequence[int], logprobs: Sequence[float], renderer: Renderer) -> list[TokenLogprob]:
    return [
        TokenLogprob(text=renderer.decode([token]), logprob=logprob)
        for token, logprob in zip(ids, logprobs, strict=True)
    ]
