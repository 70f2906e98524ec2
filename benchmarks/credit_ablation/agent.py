"""An agent that fragments by nature: a lead that has every value looked up by a sub-agent, each with a fresh prompt.

The lead is told some letters. It may have a sub-agent look one up (`?a`), again if the report was no use, and must in
the end answer with every letter and its value (`=aKbM`). A sub-agent may read a file (`<a`) and must report what it
held (`=K`). Each of these conversations is a sample of its own, so the policy decides by what it says into how many
samples its rollout falls. Words are single characters, since the model reads bytes.

The conversations do no I/O: they yield the messages of a model call and are sent the reply. `main` runs them over HTTP
inside a real run; `collect.py` runs them in its own process. Standard library only.
"""

import json
import os
import re
import urllib.request
from collections.abc import Callable, Generator
from pathlib import Path

Messages = tuple[tuple[str, str], ...]
"""(role, content) of each message."""
Conversation = Generator[Messages, str, str]
"""Yields what the model is asked, is sent its reply, returns the result."""

MAX_REPLY_TOKENS = 8
SPARE_TURNS = 3
"""Of a lead, beyond one for each letter and one for the answer."""
SUB_TURNS = 3
NOTHING = "-"


def lead(letters: str, read: Callable[[str], str]) -> Conversation:
    """The main conversation; returns the answer, empty if there was none."""
    messages: Messages = (("user", letters),)
    for _ in range(len(letters) + 1 + SPARE_TURNS):
        reply = yield messages
        if reply.startswith("="):
            return reply[1:]
        asked = re.fullmatch(r"\?([a-z])", reply)
        if asked is None:
            return ""
        found = yield from look_up(asked[1], read)
        messages = (*messages, ("assistant", reply), ("user", asked[1] + found))
    return ""


def look_up(letter: str, read: Callable[[str], str]) -> Conversation:
    """A sub-agent; returns the value that it reports."""
    messages: Messages = (("user", f"?{letter}"),)
    for _ in range(SUB_TURNS):
        reply = yield messages
        if said := re.fullmatch("=(.)", reply):
            return said[1]
        got = re.fullmatch("<([a-z])", reply)
        if got is None:
            return NOTHING
        messages = (*messages, ("assistant", reply), ("user", read(got[1])))
    return NOTHING


def read_file(letter: str) -> str:
    """What the file of that name in the current folder says."""
    file = Path(letter)
    return file.read_text() if file.exists() else NOTHING


def main() -> None:
    """Ask the model over HTTP and print the answer."""
    conversation = lead(os.environ["LETTERS"], read_file)
    try:
        messages = next(conversation)
        while True:
            messages = conversation.send(_ask(messages))
    except StopIteration as ended:
        print(ended.value)


def _ask(messages: Messages) -> str:
    body = {
        "model": "default",
        "max_tokens": MAX_REPLY_TOKENS,
        "messages": [{"role": role, "content": content} for role, content in messages],
    }
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["message"]["content"]
