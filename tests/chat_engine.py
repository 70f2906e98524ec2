"""An engine that takes messages, on a socket: vLLM's chat completions over the scripted engine; servers that fail."""

import asyncio
from contextlib import asynccontextmanager

import orjson
from starlette.applications import Starlette
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from manege.engine.base import Sampling, collect
from manege.engine.scripted import ScriptedEngine, hashed_reply
from manege.gateway.server import Server
from manege.http import Connection, error_handlers
from manege.model.folder import open_folder
from manege.rendering.select import renderer_for
from tests.conftest import TINY_MODEL


class ChatEngine:
    """Remembers the bodies that it was sent; `change` edits an answer (or a chunk) before it is sent."""

    def __init__(self, *, letters="az", num_tokens=8, chunks=(1,), change=None, context_limit=2048, token_delay_s=0.0):
        self.renderer = renderer_for(open_folder(str(TINY_MODEL)))
        first, last = (self.renderer.encode(letter)[0] for letter in letters)
        reply = hashed_reply(num_tokens=num_tokens, first_id=first, last_id=last)
        self.engine = ScriptedEngine(reply, context_limit=context_limit)
        self.context_limit = context_limit
        self.chunks, self.change, self.token_delay_s = chunks, change or (lambda body: body), token_delay_s
        self.bodies = []
        self.num_running = 0
        self.num_checks = 0
        self.app = Starlette(
            routes=[
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
                Route("/v1/models", self.models),
            ],
            exception_handlers=error_handlers,
        )

    async def models(self, _request):
        self.num_checks += 1
        return JSONResponse({"object": "list", "data": [{"id": "m", "max_model_len": self.context_limit}]})

    async def chat(self, request):
        body = orjson.loads(await request.body())
        self.bodies.append(body)
        prompt = self.renderer.render(body["messages"], body.get("tools", ()))
        room = self.context_limit - len(prompt)
        if room < body.get("max_tokens", 1):
            message = f"This model's maximum context length is {self.context_limit} tokens. However, you asked for more"
            return JSONResponse({"error": {"message": message, "type": "BadRequestError", "code": 400}}, 400)
        sampling = Sampling(max_new_tokens=body.get("max_tokens", room))
        answer = await collect(self.engine.generate(prompt, sampling))
        ids, logprobs = answer.ids_R.tolist(), answer.logprobs_R.tolist()
        usage = {
            "prompt_tokens": len(prompt),
            "completion_tokens": len(ids),
            "prompt_tokens_details": {"cached_tokens": 3},
        }
        if body["stream"]:
            return StreamingResponse(self.events(prompt, ids, logprobs, usage), media_type="text/event-stream")
        self.num_running += 1
        try:
            async with Connection(request.receive) as connection:
                await connection.run(asyncio.sleep(self.token_delay_s * len(ids)))
        finally:
            self.num_running -= 1
        choice = {"index": 0, "finish_reason": "stop", "message": self.said(ids), **self.sampled(ids, logprobs)}
        return JSONResponse(self.change({"choices": [choice], "prompt_token_ids": prompt, "usage": usage}))

    async def events(self, prompt, ids, logprobs, usage):
        def event(body):
            return b"data: " + orjson.dumps(self.change(body)) + b"\n\n"

        self.num_running += 1
        try:
            yield event({"choices": [{"index": 0, "delta": {"role": "assistant"}}], "prompt_token_ids": prompt})
            start, number = 0, 0
            while start < len(ids):
                end = min(start + self.chunks[number % len(self.chunks)], len(ids))
                await asyncio.sleep(self.token_delay_s * (end - start))
                part = {
                    "index": 0,
                    "delta": self.said(ids[start:end]),
                    **self.sampled(ids[start:end], logprobs[start:end]),
                }
                yield event({"choices": [part]})
                start, number = end, number + 1
            yield event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
            yield event({"choices": [], "usage": usage})
            yield b"data: [DONE]\n\n"
        finally:
            self.num_running -= 1

    def said(self, ids):
        return {"role": "assistant", "content": self.renderer.decode(ids)}

    def sampled(self, ids, logprobs):
        tokens = [
            {"token": self.renderer.decode([token]), "logprob": logprob, "bytes": [], "top_logprobs": []}
            for token, logprob in zip(ids, logprobs, strict=True)
        ]
        return {"token_ids": ids, "logprobs": {"content": tokens}}


@asynccontextmanager
async def chat_engine(*, port=0, **options):
    """A ChatEngine and its root URL."""
    made = ChatEngine(**options)
    async with Server(made.app, port=port) as server:
        yield made, server.url
    await made.engine.close()


@asynccontextmanager
async def raw_server(*answers):
    """Answers the requests of all connections in turn with these bytes, the last one for ever; None hangs up."""
    left = list(answers)

    async def serve(reader, writer):
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
                await reader.readexactly(length)
                said = left.pop(0) if len(left) > 1 else left[0]
                if said is None:
                    break
                writer.write(said)
                await writer.drain()
                if b"content-length" not in said.lower():
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    try:
        yield f"http://{host}:{port}"
    finally:
        server.close()


def http(body, status="200 OK"):
    """The bytes of an answer."""
    body = body if isinstance(body, bytes) else orjson.dumps(body)
    return f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body
