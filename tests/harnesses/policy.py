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
SUBTASK = "Look at the file words.txt and tell me its second word, nothing else."
_TURN = "<|im_start|>assistant\n"
_END = "<|im_end|>"


@dataclass(frozen=True, kw_only=True)
class Shell:
    """How a harness lets its model run a command and say that it is done."""

    tool: str
    """Name of the tool."""
    arguments: Callable[[str], dict]
    """From a command."""
    finish: str = "Done: the word is in upper case and count.txt is written."
    """The last answer."""
    write: Callable[[str], str] | None = None
    """From a command to an answer, where commands are no tool calls."""

    def act(self, command: str) -> str:
        if self.write is not None:
            return self.write(command)
        return "On it.\n" + tool_call(self.tool, self.arguments(command))


def tool_call(name: str, arguments: dict) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


Reply = Callable[[Sequence[int]], Sequence[int]]


def coding_reply(shell: Shell) -> Reply:
    """The `reply` of a ScriptedEngine."""

    def answer(prompt):
        if f'"name": "{shell.tool}"' not in prompt and shell.write is None:
            return "A word in upper case"
        steps = [look(shell), edit(shell, printed(prompt)[1:2]), count(shell), shell.finish]
        return steps[min(num_turns(prompt), 3)]

    return from_text(answer)


def delegating_reply(shell: Shell, delegate: Callable[[str], str], wait: Callable[[str], str] | None) -> Reply:
    """The same task, but a sub-agent looks at the file. `delegate`: from what it is told to the answer that starts it;
    `wait`: from the prompt to the answer that waits for it, where that is a turn of its own."""

    def answer(prompt):
        if f'"name": "{shell.tool}"' not in prompt:
            return "A word in upper case"
        if SUBTASK in prompt.partition(_TURN)[0]:
            return [look(shell), f"It is {' '.join(printed(prompt)[1:2])}."][min(num_turns(prompt), 1)]
        steps = [delegate(SUBTASK), *([wait(prompt)] if wait else [])]
        steps += [edit(shell, printed(prompt)[:1]), count(shell), shell.finish]
        return steps[min(num_turns(prompt), len(steps) - 1)]

    return from_text(answer)


def from_text(answer: Callable[[str], str]) -> Reply:
    tokenizer = open_folder(MODEL).tokenizer

    def reply(prompt_ids):
        prompt = tokenizer.decode(list(prompt_ids), skip_special_tokens=False)
        return tokenizer.encode(answer(prompt) + _END, add_special_tokens=False).ids

    return reply


def num_turns(prompt: str) -> int:
    return prompt.count(_TURN) - 1


def printed(prompt: str) -> Sequence[str]:
    """The words that the last tool result shows, wherever the harness put it."""
    seen = prompt.rpartition(_TURN)[0].rpartition(_TURN)[2]
    return re.findall(r"secret-[a-z]+", seen.partition(_END)[2])


def look(shell: Shell) -> str:
    return shell.act("cat words.txt")


def edit(shell: Shell, words: Sequence[str]) -> str:
    word = words[0] if words else "unseen"
    return shell.act(f"sed 's/{word}/{word.upper()}/' words.txt > words.new && mv words.new words.txt")


def count(shell: Shell) -> str:
    return shell.act("wc -l < words.txt > count.txt; cat words.txt count.txt")
