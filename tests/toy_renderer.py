"""The toy tokenizer and chat template of tests/golden/rollouts.json: a renderer of a few lines, also live.

Word wN is the id N. 1000000+N and 2000000+N are its halves, which decode to the same text, so ids that no tokenizer
would give are easily made. 1 to 4 open a message of system, user, assistant and tool; 9 ends it:

    [system w100] [user w120]  ->  1 100 9 2 120 9 3
"""

from manege.errors import ProtocolError
from manege.rendering.base import ParsedReply
from manege.rendering.text import whole_reply

_ROLES = {"system": 1, "user": 2, "assistant": 3, "tool": 4}
_END = 9
_HALF = 1_000_000


class ToyRenderer:
    """See `rendering.base.Renderer`. The model calls no tools."""

    stop_ids = frozenset({_END})
    vocab_size = 3 * _HALF

    def render(self, messages, tools):
        return [*self._turns(messages), _ROLES["assistant"]]

    def bridge(self, history, prompt_ids, response_ids, new_messages, tools):
        closed = len(response_ids) and response_ids[-1] == _END
        return [*([] if closed else [_END]), *self.render(new_messages, tools)]

    def parse(self, response_ids, *, prompt_ids=(), tools=()):
        return whole_reply(self.live_parser(), response_ids)

    def live_parser(self, *, prompt_ids=(), tools=(), stop=()):
        return _LiveWords()

    def live_text(self, *, stop=()):
        return _LiveWords()

    def tool_grammar(self, prompt_ids, tools, *, max_calls):
        return None

    def json_grammar(self, prompt_ids, json_schema, *, tools=(), max_calls=None):
        raise ProtocolError("the toy model writes words only: ask it without a JSON schema")

    def encode(self, text):
        return [int(word.removeprefix("w")) for word in text.split()]

    def decode(self, ids):
        return self.parse(ids).content

    def _turns(self, messages):
        return [id for said in messages for id in (_ROLES[said["role"]], *self.encode(said["content"]), _END)]


class _LiveWords:
    """See `rendering.base.LiveParser`; stop strings are not looked for."""

    stopped_by = None

    def __init__(self):
        self._space = ""

    def feed(self, ids):
        return ParsedReply(content="".join(map(self._text, ids)), reasoning=None, tool_calls=())

    def finish(self):
        return ParsedReply(content="", reasoning=None, tool_calls=())

    def _text(self, token):
        half, number = divmod(token, _HALF)
        if token == _END:
            return ""
        if half == 2:
            return str(number)
        space, self._space = self._space, " "
        return f"{space}w" if half else f"{space}w{number}"
