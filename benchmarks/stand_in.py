"""A stand-in engine for load measurements: as little work as possible per call, in its own process.

    python benchmarks/stand_in.py --port PORT --sampled 200 --added 275

Token wire (`engine.server` over the scripted engine) and, at `/v1/chat/completions`, messages: conversation `n` (its
first message begins with "conversation n ") has one fixed stream of token ids, of which turn k's prompt is the first
`first + k * added` and its answer the next `sampled`. So conversations are distinct and grow as real ones do, and an
answer is put together from slices of prepared bytes.
"""

import argparse
import asyncio
import random
import re

import orjson
import uvicorn

from manege.engine.scripted import ScriptedEngine, hashed_reply
from manege.engine.server import engine_app

CONVERSATION = re.compile(rb"conversation (\d+) ")
TEXT = "word " * 40
END = 2
JSON = [(b"content-type", b"application/json")]


class Chat:
    """The answers of one shape."""

    def __init__(self, *, first: int, added: int, sampled: int, max_turns: int) -> None:
        rng = random.Random(0)
        self.first, self.added, self.sampled = first, added, sampled
        numbers = [b"%d" % rng.randrange(1000, 150000) for _ in range(first + max_turns * added + sampled)]
        self.ends = [0]
        for number in numbers:
            self.ends.append(self.ends[-1] + len(number) + 1)
        self.ids = b",".join(numbers)
        logprobs = [
            {"token": f"tok{i % 100}", "logprob": -rng.random(), "bytes": [97, 98, 99], "top_logprobs": []}
            for i in range(sampled)
        ]
        self.logprobs = orjson.dumps({"content": logprobs})
        self.message = orjson.dumps({"role": "assistant", "content": TEXT})

    def answer(self, body: bytes) -> bytes:
        found = CONVERSATION.search(body)
        turn = body.count(b'"assistant"')
        num_prompt = self.first + turn * self.added
        begin, end = self.ends[num_prompt - 1], self.ends[num_prompt - 1 + self.sampled]
        return (
            b'{"id":"chatcmpl-1","object":"chat.completion","created":1,"model":"m","prompt_token_ids":[%s,%s],'
            b'"choices":[{"index":0,"message":%s,"finish_reason":"stop","token_ids":[%s],"logprobs":%s}],'
            b'"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}}'
        ) % (
            found[1] if found else b"0",
            self.ids[: begin - 1],
            self.message,
            self.ids[begin : end - 1],
            self.logprobs,
            num_prompt,
            self.sampled,
            num_prompt + self.sampled,
        )


def application(chat: Chat, token_delay_s: float):
    reply = hashed_reply(num_tokens=chat.sampled - 1, first_id=1000, last_id=20000, end=[END])
    engine = ScriptedEngine(reply, chunk_size=chat.sampled, context_limit=2**18)
    tokens = engine_app(engine, encode=lambda text: [], decode=lambda ids: "")

    async def app(scope, receive, send):
        if scope["type"] != "http" or scope["path"] != "/v1/chat/completions":
            await tokens(scope, receive, send)
            return
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        if b'"stream":true' in body:
            await stream(send)
            return
        answer = chat.answer(body)
        headers = [*JSON, (b"content-length", b"%d" % len(answer))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer})

    async def stream(send):
        async def event(data):
            await send({"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": True})

        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await event(b'{"prompt_token_ids":[1,2,3],"choices":[{"index":0,"delta":{"role":"assistant"}}]}')
        for number in range(chat.sampled):
            await asyncio.sleep(token_delay_s)
            await event(
                b'{"choices":[{"index":0,"delta":{"content":"word "},"token_ids":[%d],"logprobs":{"content":'
                b'[{"token":"word ","logprob":-0.5}]}}]}' % (1000 + number)
            )
        await event(b'{"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}')
        await event(b"[DONE]")
        await send({"type": "http.response.body", "body": b""})

    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--first", type=int, required=True, help="prompt tokens of a conversation's first call")
    parser.add_argument("--added", type=int, required=True, help="tokens that each turn adds, the answer included")
    parser.add_argument("--sampled", type=int, required=True, help="tokens of an answer")
    parser.add_argument("--max-turns", type=int, default=8)
    parser.add_argument("--token-delay", type=float, default=0.0, help="seconds between streamed tokens")
    asked = parser.parse_args()
    chat = Chat(first=asked.first, added=asked.added, sampled=asked.sampled, max_turns=asked.max_turns)
    uvicorn.run(application(chat, asked.token_delay), port=asked.port, log_level="warning", access_log=False)


if __name__ == "__main__":
    main()
