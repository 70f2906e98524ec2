"""An agent with a shell: it finds a value in the files of its folder and reports it.

An ordinary program. It takes its model endpoint from the environment (OPENAI_BASE_URL, OPENAI_API_KEY), its question
from QUESTION, runs every reply of the model as a shell command in the current folder, and shows the model the output.
A reply that is an `echo` ends the work; what it echoes is the answer, the last line on stdout.
"""

import os
import re
import subprocess
import sys
from collections.abc import Sequence

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam

MAX_TURNS = 5
MAX_REPLY_TOKENS = 12
MAX_OUTPUT_CHARS = 200

SYSTEM = (
    "You control a shell. Reply with one command only. Files hold the facts. "
    "When you know the answer, reply: echo VALUE"
)
DEMONSTRATION = [("What is the pin? It is in pin.txt.", "cat pin.txt"), ("pin=517", "echo 517")]


def main() -> None:
    """Work until the model answers, gives up the form, or has no turn left."""
    converse(SYSTEM, DEMONSTRATION)


def converse(
    system: str, demonstration: Sequence[tuple[str, str]], *, max_reply_tokens: int = MAX_REPLY_TOKENS
) -> None:
    """The same, for a prompt: what is asked and replied in it."""
    client = OpenAI()
    messages: list[ChatCompletionMessageParam] = [{"role": "system", "content": system}]
    for asked, replied in demonstration:
        messages.append({"role": "user", "content": asked})
        messages.append({"role": "assistant", "content": replied})
    messages.append({"role": "user", "content": os.environ["QUESTION"]})
    for _ in range(MAX_TURNS):
        completion = client.chat.completions.create(model="default", messages=messages, max_tokens=max_reply_tokens)
        reply = completion.choices[0].message.content or ""
        messages.append({"role": "assistant", "content": reply})
        command = clean(reply)
        exit_code, output = run(command)
        if re.match(r"echo\b", command):
            print(output)
            return
        if exit_code in (2, 126, 127) or not command:
            print(f"not a command: {command!r}: {output}", file=sys.stderr)
            return
        messages.append({"role": "user", "content": output})
    print("no turn left", file=sys.stderr)


def clean(reply: str) -> str:
    """The command itself: models like to wrap it in a code fence or to write the prompt sign."""
    text = reply.strip().strip("`").strip()
    text = re.sub(r"^(bash|sh)?\s*\n", "", text).strip()
    return re.sub(r"^\$\s*", "", text)


def run(command: str, *, timeout_s: float = 5, max_chars: int = MAX_OUTPUT_CHARS) -> tuple[int, str]:
    """Exit code and what a terminal would show."""
    try:
        done = subprocess.run(
            ["bash", "--norc", "-c", command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout_s,
        )
    except (subprocess.TimeoutExpired, ValueError, OSError) as error:
        return 1, type(error).__name__
    text = done.stdout.decode("utf-8", "replace").strip()
    return done.returncode, re.sub(r"^bash: (line \d+: )?", "", text)[:max_chars]


if __name__ == "__main__":
    main()
