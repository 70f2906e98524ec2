"""An agent of the standard library only, which says what it was answered as soon as it has it, and never tries again.

Files in its workspace are its orders: `idle` holds it before its first call, `busy` keeps it asking, `stream` has it
ask for streams. Its own are `agent.pid` and, while it reads a stream that has begun, `streaming`.
"""

import json
import os
import time
import urllib.request
from pathlib import Path


def main():
    Path("agent.pid").write_text(str(os.getpid()))
    while Path("idle").exists():
        time.sleep(0.02)
    number = 0
    while number < 2 or Path("busy").exists():
        say("call", ask(f"q {'abcdefgh'[number % 8]}", stream=Path("stream").exists()))
        note = f"{os.environ['MANEGE_ROLLOUT_ID']} {time.time_ns()}"
        post(os.environ["MANEGE_EVENT_URL"], {"event_type": "note", "data": {"text": note}}).close()
        say("event", note)
        number += 1


def ask(text, *, stream):
    """The id of the answer."""
    body = {"model": "default", "messages": [{"role": "user", "content": text}], "max_tokens": 10, "stream": stream}
    with post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body) as response:
        return read_stream(response) if stream else json.load(response)["id"]


def read_stream(response):
    events = []
    for line in response:
        if line.startswith(b"data: "):
            events.append(line[6:].strip())
            Path("streaming").touch()
    Path("streaming").unlink()
    if events[-1] != b"[DONE]":
        raise RuntimeError(f"the stream broke off: {events[-1]}")
    return json.loads(events[0])["id"]


def post(url, body):
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    return urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=60)


def say(what, value):
    print(json.dumps({what: value}), flush=True)
    os.fsync(1)
