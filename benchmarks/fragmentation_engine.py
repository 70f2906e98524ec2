"""The policy of the fragmentation benchmark, and what a system without continuation serves it by.

The policy does a coding task of 8 to 12 turns. Each turn is a thought of `fragmentation_thoughts`, its ids as they were
sampled, and a tool call of the script. The tokenizer is SmolLM2's, the chat template Qwen3's own.

`chat_app` is an engine that takes messages, as vLLM's chat completions: at every call the whole history is rendered and
tokenised again, and the prompt's ids and the sampled ones come back with the answer.
"""

import random
import re
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from benchmarks.fragmentation_thoughts import MODEL, Thought
from manege.engine.base import Engine, Sampling, collect
from manege.http import read_object
from manege.model.folder import open_folder
from manege.rendering.base import ParsedReply, Renderer
from manege.rendering.generic import GenericRenderer
from tests.harnesses.policy import CONTEXT_LIMIT, Shell, num_turns

_TEMPLATE = Path(__file__).parents[1] / "tests" / "unit" / "templates" / "qwen3.jinja"
_EXERCISE = re.compile(r"Exercise (\d+):")
_COMMANDS = (
    "ls",
    "cat words.txt",
    "grep -n 'secret' words.txt",
    "sed -n 2p words.txt | tr a-z A-Z",
    "sort -r words.txt > \"sorted words.txt\" && head -n 2 'sorted words.txt'",
    'printf "def count(path):\\n\\treturn len(open(path).readlines())\\n" > count.py; cat count.py',
    "diff words.txt 'sorted words.txt' || true",
    "rm 'sorted words.txt' count.py; ls",
    "echo \"done <&> 'quoted'\"",
)
_LAST = (
    "sed -i '2s/.*/\\U&/' words.txt && cat words.txt",
    "wc -l < words.txt > count.txt; cat count.txt",
)
"""The task itself; with the final answer a rollout has between 8 and 12 turns."""


def exercise(number: int, task: str) -> str:
    """What the agent is told: by its number the policy knows how long it takes and what it thinks."""
    return f"Exercise {number}: {task}"


def fragmentation_renderer() -> Renderer:
    """SmolLM2's tokenizer under Qwen3's chat template, which knows tools; both write `<|im_start|>`."""
    folder = open_folder(MODEL)
    return GenericRenderer(
        folder.tokenizer,
        _TEMPLATE.read_text(encoding="utf-8"),
        special_tokens=folder.special_tokens,
        eos_ids=folder.eos_ids,
    )


def thinking_reply(
    shell: Shell, thoughts: Sequence[Thought], renderer: Renderer
) -> Callable[[Sequence[int]], Sequence[int]]:
    """The `reply` of a ScriptedEngine. One exercise of one harness always has the same thoughts, so that
    both modes are compared on the same ones."""
    tokenizer = open_folder(MODEL).tokenizer
    (end,) = tokenizer.encode("<|im_end|>", add_special_tokens=False).ids

    def reply(prompt_ids: Sequence[int]) -> Sequence[int]:
        prompt = tokenizer.decode(list(prompt_ids), skip_special_tokens=False)
        found = _EXERCISE.search(prompt)
        number, turn = int(found[1]) if found else 0, num_turns(prompt)
        thought = random.Random(f"{shell.tool}/{number}/{turn}").choice(thoughts)
        if f'"name": "{shell.tool}"' not in prompt:
            return [*thought.ids, end]
        commands = (*_COMMANDS[: 5 + number % 5], *_LAST)
        # The words that lead to the call are the model's own, so that its text ends where the call begins.
        said = shell.finish if turn >= len(commands) else shell.act(commands[turn]).removeprefix("On it.\n")
        return [*thought.ids, *renderer.encode(f"\n{said}"), end]

    return reply


def chat_app(engine: Engine, renderer: Renderer) -> Starlette:
    """`/v1/chat/completions`, plain and streamed."""

    async def chat(request: Request) -> Response:
        body = await read_object(request)
        tools = body.get("tools", ())
        prompt = renderer.render(body["messages"], tools)
        room = min(CONTEXT_LIMIT - len(prompt), body.get("max_tokens", CONTEXT_LIMIT))
        answer = await collect(engine.generate(prompt, Sampling(max_new_tokens=room, stop_ids=renderer.stop_ids)))
        ids = answer.ids_R.tolist()
        message = _message(renderer.parse(ids, prompt_ids=prompt, tools=tools))
        logprobs = [{"token": renderer.decode([token]), "logprob": -1.0} for token in ids]
        choice = {"index": 0, "token_ids": ids, "logprobs": {"content": logprobs}, "finish_reason": "stop"}
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids)}
        common = {"prompt_token_ids": prompt, "usage": usage}
        if body.get("stream"):
            return StreamingResponse(_events({"choices": [{**choice, "delta": message}], **common}))
        return JSONResponse({"choices": [{**choice, "message": message}], **common})

    async def models(_request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": MODEL, "max_model_len": CONTEXT_LIMIT}]})

    return Starlette(routes=[Route("/v1/chat/completions", chat, methods=["POST"]), Route("/v1/models", models)])


async def _events(chunk: Mapping[str, Any]) -> AsyncIterator[bytes]:
    yield b"data: " + orjson.dumps(chunk) + b"\n\n"
    yield b"data: [DONE]\n\n"


def _message(parsed: ParsedReply) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": parsed.content}
    if parsed.tool_calls:
        message["tool_calls"] = [
            {
                "index": index,
                "id": f"call_{secrets.token_hex(12)}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for index, call in enumerate(parsed.tool_calls)
        ]
    return message
