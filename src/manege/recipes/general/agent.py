"""An agent with a computer: a shell in the current folder, and through it files and Python.

An ordinary program with the `openai` client; its task is in QUESTION. PROTOCOL says how the model acts: `tools`, by
calls of the tool `bash`, until it answers without one; or `plain`, for small models, by replies that are one command
each, shown in a demonstration, until one is an `echo`. The answer is the last line on stdout, if the task does not ask
for a file.
"""

import json
import os
import sys

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

from manege.recipes.finder.agent import converse, run

__all__ = ["main"]

MAX_TOOL_TURNS = 40
MAX_PLAIN_TOKENS = 20

SYSTEM = (
    "You have a computer: the tool bash runs a command in your working folder, which holds the files of the task. "
    "Look at files before you answer, let programs do the counting, and check what you wrote. When the task is done, "
    "say the answer alone, in one line."
)
BASH: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command in a shell; what it prints comes back, its end cut if it is long.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}
PLAIN_SYSTEM = (
    "You control a shell. Reply with one command only. Files hold the facts. "
    "When you know the answer, reply: echo VALUE"
)
DEMONSTRATION = (
    ("Read the code in pin.txt.", "cat pin.txt"),
    ("code=517", "echo 517"),
    ("Count the lines of fork.txt.", "wc -l fork.txt"),
    ("240 fork.txt", "echo 240"),
    ("Find the fee of spoon in hat.txt.", "grep spoon hat.txt"),
    ("The fee of spoon is 318", "echo 318"),
)


def main() -> None:
    """Raises ValueError for another PROTOCOL."""
    protocol = os.environ.get("PROTOCOL", "tools")
    if protocol not in ("tools", "plain"):
        raise ValueError(f"PROTOCOL={protocol!r} is not known; use tools or plain")
    if protocol == "plain":
        converse(PLAIN_SYSTEM, DEMONSTRATION, max_reply_tokens=MAX_PLAIN_TOKENS)
    else:
        with_tools(os.environ["QUESTION"])


def with_tools(task: str) -> None:
    """Work until the model answers without a call, or has no turn left."""
    client = OpenAI()
    messages: list[ChatCompletionMessageParam] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": task},
    ]
    for _ in range(MAX_TOOL_TURNS):
        completion = client.chat.completions.create(model="default", messages=messages, tools=[BASH])
        message = completion.choices[0].message
        messages.append(message.model_dump(exclude_none=True))  # pyright: ignore[reportArgumentType]
        if not message.tool_calls:
            print(message.content or "")
            return
        for call in message.tool_calls:
            arguments = call.function.arguments if call.type == "function" else ""
            messages.append({"role": "tool", "tool_call_id": call.id, "content": called(arguments)})
    print("no turn left", file=sys.stderr)


def called(arguments: str) -> str:
    """What a call of the tool shows the model."""
    try:
        command = json.loads(arguments)["command"]
    except (ValueError, TypeError, KeyError):
        return 'not a call of bash: want {"command": "..."}'
    exit_code, output = run(str(command), timeout_s=60, max_chars=8000)
    return output if exit_code == 0 else f"{output}\n(exit code {exit_code})"


if __name__ == "__main__":
    main()
