"""A coding policy for the scripted engine: look at a file, edit it, run a command, finish.

It reads prompts as a model would: from the ids it decodes the text, in that it sees which tools are offered, how many
turns it has had and what its commands printed. A call that does not offer the harness's shell gets a short text.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from manege.model.folder import open_folder

TASK = (
    "The file words.txt holds three words, one a line. Write the second word in upper case in its place, "
    "then write the number of lines of words.txt to count.txt."
)
MODEL = "smollm2"
CONTEXT_LIMIT = 131072
_TURN = "<|im_start|>assistant\n"
_END = "<|im_end|>"


@dataclass(frozen=True, kw_only=True)
class Shell:
    """How a harness lets its model run a command and say that it is done."""

    tool: str
    """Name of the tool."""
    arguments: Callable[[str], dict]
    """From a command."""
    finish: str | Callable[[], str] = "Done: the word is in upper case and count.txt is written."
    """The last answer."""
    write: Callable[[str], str] | None = None
    """From a command to an answer, where commands are no tool calls."""

    def act(self, command: str) -> str:
        if self.write is not None:
            return self.write(command)
        return "On it.\n" + tool_call(self.tool, self.arguments(command))


def tool_call(name: str, arguments: dict) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def coding_reply(shell: Shell) -> Callable[[Sequence[int]], Sequence[int]]:
    """The `reply` of a ScriptedEngine."""
    tokenizer = open_folder(MODEL).tokenizer

    def reply(prompt_ids):
        prompt = tokenizer.decode(list(prompt_ids), skip_special_tokens=False)
        return tokenizer.encode(_answer(shell, prompt) + _END, add_special_tokens=False).ids

    return reply


def _answer(shell: Shell, prompt: str) -> str:
    if f'"name": "{shell.tool}"' not in prompt and shell.write is None:
        return "A word in upper case"
    num_turns = prompt.count(_TURN) - 1
    if num_turns == 0:
        return shell.act("cat words.txt")
    if num_turns == 1:
        # What the first command printed, wherever the harness put it.
        seen = prompt.rpartition(_END + "\n<|im_start|>")[0].rpartition(_TURN)[2]
        words = re.findall(r"secret-[a-z]+", seen.partition(_END)[2])
        second = words[1] if len(words) > 1 else "unseen"
        return shell.act(f"sed 's/{second}/{second.upper()}/' words.txt > words.new && mv words.new words.txt")
    if num_turns == 2:
        return shell.act("wc -l < words.txt > count.txt; cat words.txt count.txt")
    return shell.finish if isinstance(shell.finish, str) else shell.finish()
