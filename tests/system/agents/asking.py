"""What tests of model calls do again and again."""

import asyncio

import anyio
import orjson

from manege.types import RolloutId

BASH = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}
CALL = '<tool_call>{"name": "bash", "arguments": {"c":  "ls"}}</tool_call>'
"""How the model calls the tool; the arguments are spelt in its own way."""
END = 2
"""SmolLM2's end-of-turn token."""


def user(text):
    return {"role": "user", "content": text}


async def ask(client, messages, **options):
    return await client.chat.completions.create(model="any", messages=messages, **options)


async def calls_of(store, rollout_id="r1"):
    return (await store.calls([RolloutId(rollout_id)]))[rollout_id]


async def until(condition, timeout_s=10):
    with anyio.fail_after(timeout_s):
        while not await condition():
            await asyncio.sleep(0.01)


def events(text):
    """Server-sent events: (name or None, parsed data or text)."""
    found = []
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if line and not line.startswith(":"))
        if "data" in fields:
            data = fields["data"]
            found.append((fields.get("event"), data if data == "[DONE]" else orjson.loads(data)))
    return found
