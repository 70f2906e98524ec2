"""From what the engine sampled to the answer that the agent reads and the call that is stored; pure."""

import secrets
from collections.abc import Sequence
from typing import Any

from manege.engine.base import Generation
from manege.gateway.admission import Admitted
from manege.gateway.auth import AgentIdentity
from manege.gateway.continuation import Prompt
from manege.protocols.base import ModelReply, ModelRequest, TokenLogprob
from manege.rendering.base import ParsedReply, Renderer
from manege.types import Call, CallId, Delivered, FinishReason, JsonObject

__all__ = ["answer_message", "new_call", "reply_to"]


def answer_message(request: ModelRequest, prompt: Prompt, generation: Generation, renderer: Renderer) -> JsonObject:
    """The assistant message (chat) or `{"text": ...}` (text completion); stop strings are cut off."""
    ids = generation.ids_R.tolist()
    stop = request.sampling.stop if generation.finish_reason is FinishReason.STOP else ()
    if request.prompt is not None:
        return {"text": _until(renderer.decode(ids), stop)}
    tools = request.tools if request.max_tool_calls != 0 else ()
    parsed = renderer.parse(ids, prompt_ids=prompt.ids.tolist(), tools=tools)
    message: dict[str, Any] = {"role": "assistant", "content": _until(parsed.content, stop)}
    if parsed.reasoning:
        message["reasoning_content"] = parsed.reasoning
    if parsed.tool_calls:
        message["tool_calls"] = _tool_calls(parsed, request.max_tool_calls)
    return message


def new_call(
    request: ModelRequest,
    prompt: Prompt,
    generation: Generation,
    message: JsonObject,
    *,
    identity: AgentIdentity,
    protocol: str,
    admitted: Admitted,
    created_s: float,
    ended_s: float,
) -> Call:
    """The call as it is stored, its messages and tools canonical; a continued call keeps only what its parent lacks."""
    body = dict(request.raw)
    if request.prompt is None:
        body["messages"] = list(prompt.new_messages)
        body["tools"] = list(request.tools)
        if prompt.parent is not None or not request.tools:
            del body["tools"]
    return Call(
        id=CallId(secrets.token_hex(12)),
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
        delivered=Delivered.UNKNOWN,
        request=body,
        reply=message,
        overridden=admitted.overridden,
        created_s=created_s,
        ended_s=ended_s,
    )


def reply_to(request: ModelRequest, call: Call, *, model: str, num_cached: int, renderer: Renderer) -> ModelReply:
    """The answer for the wire."""
    logprobs: Sequence[TokenLogprob] = ()
    if request.wants_logprobs:
        pairs = zip(call.response_ids_R.tolist(), call.logprobs_R.tolist(), strict=True)
        logprobs = [TokenLogprob(text=renderer.decode([token]), logprob=logprob) for token, logprob in pairs]
    return ModelReply(
        id=call.id,
        created_s=call.created_s,
        model=model,
        message=call.reply,
        finish_reason=call.finish_reason,
        num_prompt=len(call.prompt_ids_P),
        num_sampled=len(call.response_ids_R),
        num_cached=num_cached,
        logprobs=logprobs,
        prompt_ids=call.prompt_ids_P.tolist() if request.wants_token_ids else None,
        response_ids=call.response_ids_R.tolist() if request.wants_token_ids else None,
    )


def _until(text: str, stop: Sequence[str]) -> str:
    positions = [position for position in map(text.find, stop) if position >= 0]
    return text[: min(positions)] if positions else text


def _tool_calls(parsed: ParsedReply, limit: int | None) -> list[JsonObject]:
    # Our ids come back in the next request and help to recognise the conversation.
    return [
        {
            "id": f"call_{secrets.token_hex(12)}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in parsed.tool_calls[:limit]
    ]
