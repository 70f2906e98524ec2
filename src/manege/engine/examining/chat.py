"""What a server's chat answers are good for: whether they carry what was sampled, streamed too, and know tools."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any

from manege.engine.examining.identity import Identity
from manege.engine.examining.peek import ANSWER_S, Finding, Peek
from manege.engine.messages import ChatIds, MessagesEngine
from manege.engine.proof import TEMPERATURE
from manege.errors import ManegeError

__all__ = ["examine_chat"]

_NUM_TOP = 5
_MIN_DIFFERENCE = 0.5
_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


async def examine_chat(peek: Peek, server: Identity) -> AsyncIterator[Finding]:
    """Unless there is only one, the first two findings decide about mode `messages`."""
    if not await peek.has("/v1/chat/completions"):
        yield Finding(False, "no chat endpoint: it has no /v1/chat/completions")
        return
    engine = MessagesEngine(peek.url)
    body = {
        "model": server.model,
        "messages": [{"role": "user", "content": "What is the weather like in Rome?"}],
        "max_tokens": 8,
        "logprobs": True,
        "return_token_ids": True,
    }
    try:
        yield await _ids(engine, body)
        yield await _tempered(engine, body)
        yield await _tools(engine, body, server)
    finally:
        await engine.close()


async def _ids(engine: MessagesEngine, body: Mapping[str, Any]) -> Finding:
    flaws: list[str] = []
    for how in ("whole", "streamed"):
        ids = ChatIds(engine.url)
        try:
            async with asyncio.timeout(ANSWER_S):
                if how == "whole":
                    ids.add(await engine.ask({**body, "stream": False}))
                else:
                    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
                    async with aclosing(engine.stream(streamed)) as chunks:
                        async for chunk in chunks:
                            ids.add(chunk)
                flaw = ids.answer().flaw
        except (TimeoutError, ManegeError) as error:
            flaw = str(error) or "no answer in time"
        if flaw is not None:
            flaws.append(f"{how}: {flaw}")
    if not flaws:
        return Finding(True, "chat answers, whole and streamed, carry token ids and log-probabilities")
    return Finding(False, f"chat answers cannot be trained on: {'; '.join(flaws)}")


async def _tempered(engine: MessagesEngine, body: Mapping[str, Any]) -> Finding:
    """As in `proof`, of the likeliest first tokens, which one answer tells."""
    try:
        async with asyncio.timeout(ANSWER_S):
            plain, tempered = [await _top(engine, body, temperature) for temperature in (1.0, TEMPERATURE)]
    except (TimeoutError, ManegeError) as error:
        return Finding(None, f"chat at temperature {TEMPERATURE}: {error or 'no answer in time'}")
    both = sorted(plain.keys() & tempered.keys(), key=plain.__getitem__)
    if not both or (difference := plain[both[-1]] - plain[both[0]]) < _MIN_DIFFERENCE:
        return Finding(None, f"chat at temperature {TEMPERATURE}: no two tokens' log-probabilities to compare")
    growth = (tempered[both[-1]] - tempered[both[0]]) / difference
    if growth > (1 + 1 / TEMPERATURE) / 2:
        return Finding(True, "log-probabilities of chat answers: those of softmax(logits / T)")
    text = "log-probabilities of chat answers: not those of softmax(logits / T)"
    return Finding(False, text, "--logprobs-mode processed_logprobs")


async def _top(engine: MessagesEngine, body: Mapping[str, Any], temperature: float) -> dict[str, float]:
    asked = {**body, "stream": False, "max_tokens": 1, "temperature": temperature, "top_logprobs": _NUM_TOP}
    answer = await engine.ask(asked)
    try:
        top = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        return {str(entry["token"]): float(entry["logprob"]) for entry in top}
    except (LookupError, TypeError, ValueError):
        return {}


async def _tools(engine: MessagesEngine, body: Mapping[str, Any], server: Identity) -> Finding:
    option = {"vllm": "--enable-auto-tool-choice --tool-call-parser NAME", "sglang": "--tool-call-parser NAME"}
    if server.kind == "sglang" and not server.info.get("tool_call_parser"):
        return Finding(False, "tools in chat: it has no tool parser", option["sglang"])
    try:
        async with asyncio.timeout(ANSWER_S):
            await engine.ask({**body, "stream": False, "tools": [_TOOL], "tool_choice": "auto"})
    except (TimeoutError, ManegeError) as error:
        return Finding(False, f"tools in chat: {error or 'no answer in time'}", option.get(server.kind, ""))
    return Finding(True, "tools in chat are taken")
