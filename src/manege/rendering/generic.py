"""Any model with a Jinja chat template and a `tokenizers` tokenizer.

The bridge to the next turn is read off the template itself. With the last answer replaced by a mark, the template is
rendered for the old prompt and for the new one:

    old   <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n
    new   <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nMARK<|im_end|>\\n<|im_start|>user...

If `new` does not start with `old`, or a mark is gone, the template rewrites earlier turns and there is no bridge. Else
what follows the answer is the text from the first end-of-turn token after `old`; its ids are appended to the sampled
ones, without the end-of-turn token where the model sampled one itself. Sampled ids are never derived from text.

What follows an answer, and whether earlier turns are rewritten, depends in every template that was seen on nothing but
the system messages, the last user turn and the last reasoning behind it. So only those are rendered, and a turn costs
what is new and not the history. Whether a template is so is tried once, on a conversation that has everything.
"""

from collections.abc import Mapping, Sequence

from tokenizers import Tokenizer

from manege.errors import ModelError, ProtocolError
from manege.rendering.base import LiveParser
from manege.rendering.calls import PYTHON_TAG
from manege.rendering.form import scanner_for, tags_of
from manege.rendering.reply import THINK, THINK_END, LiveReply
from manege.rendering.shared import TokenizerRenderer
from manege.rendering.template import ChatTemplate
from manege.rendering.text import Detokeniser
from manege.types import IntArray, JsonObject

__all__ = ["GenericRenderer"]

# Letters only: templates trim white space and split at tags.
_MARK = "maNegeContentMark"
_THOUGHT_MARK = "maNegeThoughtMark"

_TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
_USER = {"role": "user", "content": "Hi"}
_SAID = {"role": "assistant", "content": "Hello", "reasoning_content": "Greet."}
_CALLED = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "add", "arguments": "{}"}}],
}
_RESULT = {"role": "tool", "content": "4", "tool_call_id": "call_1"}
_THOUGHT = {**_CALLED, "reasoning_content": "Add."}
_LONG = ({"role": "system", "content": "Be brief."}, _USER, _SAID, _USER, _CALLED, _RESULT)
_PROBES = (
    ((*_LONG, _CALLED, _RESULT), _SAID, (_USER,)),
    ((*_LONG, _THOUGHT, _RESULT, _CALLED, _RESULT), _CALLED, (_RESULT,)),
    ((*_LONG, _THOUGHT, _RESULT, _CALLED, _RESULT), _CALLED, (_RESULT, _USER)),
    (_LONG[1:], _THOUGHT, (_RESULT, _RESULT)),
)


class GenericRenderer(TokenizerRenderer):
    """See `rendering.base.Renderer`."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat_template: str,
        *,
        special_tokens: Mapping[str, str],
        eos_ids: frozenset[int],
    ) -> None:
        """`eos_ids`: what the model's configuration calls end of sequence. Raises ModelError."""
        super().__init__(tokenizer)
        self._template = ChatTemplate(chat_template, special_tokens)
        self._closers = self._find_closers(eos_ids)
        self.stop_ids = eos_ids | frozenset(self._closers.values())
        self._is_local = self._tell_local()
        shown = (THINK, THINK_END, *(tags_of(self._form) or [PYTHON_TAG]))
        # Tags stay in the text of an answer even where they are special tokens.
        self._hidden = frozenset(
            index for index, content in self._special.items() if not any(content in mark for mark in shown)
        )

    def render(self, messages: Sequence[JsonObject], tools: Sequence[JsonObject]) -> list[int]:
        return self.encode(self._template.text(messages, tools))

    def bridge(
        self,
        history: Sequence[JsonObject],
        prompt_ids: Sequence[int] | IntArray,
        response_ids: Sequence[int] | IntArray,
        new_messages: Sequence[JsonObject],
        tools: Sequence[JsonObject],
    ) -> list[int] | None:
        *before, answer = history
        if self._is_local:
            before = _heart(before)
        after = self._after(before, answer, new_messages, tools)
        return after[1:] if after and len(response_ids) and response_ids[-1] in self.stop_ids else after

    def _after(
        self,
        before: Sequence[JsonObject],
        answer: JsonObject,
        new_messages: Sequence[JsonObject],
        tools: Sequence[JsonObject],
    ) -> list[int] | None:
        """Ids from the end of the answer's turn on; None: no bridge."""
        old = self._template.text(before, tools)
        new = self._template.text([*before, _marked(answer), *new_messages], tools)
        if not new.startswith(old):
            return None
        rest = new[len(old) :]
        position, closer = min(((rest.find(text), text) for text in self._closers if text in rest), default=(-1, ""))
        if position < 0 or (answer.get("reasoning_content") and _THOUGHT_MARK not in rest[:position]):
            return None
        # Encoded from the closing token on: what stands behind a special token does not depend on what is before it.
        ids = self.encode(rest[position:])
        assert ids[0] == self._closers[closer]
        return ids

    def _tell_local(self) -> bool:
        """Whether the older turns change nothing behind an answer."""
        try:
            return all(
                self._after(before, answer, new, tools) == self._after(_heart(before), answer, new, tools)
                for before, answer, new in _PROBES
                for tools in ((), (_TOOL,))
            )
        except ProtocolError:
            return False

    def live_parser(
        self, *, prompt_ids: Sequence[int] = (), tools: Sequence[JsonObject] = (), stop: Sequence[str] = ()
    ) -> LiveParser:
        return LiveReply(
            Detokeniser(self._tokenizer, self._hidden),
            scanner_for(self._form, tools) if tools else None,
            is_thinking=self._opened(prompt_ids) == THINK,
            stop=stop,
        )

    def _find_closers(self, eos_ids: frozenset[int]) -> dict[str, int]:
        """Text and id of the tokens that may close an assistant turn: the one after a short answer, and the eos."""
        turn = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": _MARK}]
        try:
            after = self.encode(self._template.text(turn, (), answer=False).partition(_MARK)[2])
        except ProtocolError as error:
            raise ModelError(f"the model cannot be used for chats: {error}") from error
        ids = {*eos_ids, *after[:1]}
        return {self._special[index]: index for index in ids if index in self._special}

    def _text(self, messages: Sequence[JsonObject], tools: Sequence[JsonObject], answer: bool) -> str:
        return self._template.text(messages, tools, answer=answer)


def _heart(before: Sequence[JsonObject]) -> list[JsonObject]:
    """The leading system messages, the last user turn, and the last call with reasoning behind it."""
    roles = [message["role"] for message in before]
    first = next((index for index, role in enumerate(roles) if role != "system"), len(roles))
    last_user = max((index for index, role in enumerate(roles) if role == "user"), default=first)
    thoughts = [i for i in range(last_user + 1, len(roles)) if before[i].get("reasoning_content")]
    thought = thoughts[-1] if thoughts else len(roles)
    end = next((index for index in range(thought + 1, len(roles)) if roles[index] != "tool"), len(roles))
    return [*before[:first], *before[last_user : last_user + 1], *before[thought:end]]


def _marked(answer: JsonObject) -> JsonObject:
    """The answer with its text replaced, its calls kept by name and id: tool results may refer to them."""
    marked: dict[str, object] = {**answer, "content": _MARK}
    if answer.get("reasoning_content"):
        marked["reasoning_content"] = _THOUGHT_MARK
    if answer.get("tool_calls"):
        marked["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": "{}"}} for call in answer["tool_calls"]
        ]
    return marked
