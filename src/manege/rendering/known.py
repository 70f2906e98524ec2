"""Models that the library `renderers` knows: templates as code, which also know how to bridge and to parse.

Imported only for those models, since the library takes a second to import.
"""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import renderers
from renderers.base import MODEL_RENDERER_MAP, ParsedToolCall, ToolCallParseStatus
from renderers.tagged import DEEPSEEK_V4_GRAMMAR
from tokenizers import Tokenizer

from manege.errors import ProtocolError
from manege.rendering.base import LiveParser, ParsedReply, ToolCall
from manege.rendering.known_live import KnownLive
from manege.rendering.reply import THINK, THINK_END
from manege.rendering.shared import TokenizerRenderer
from manege.types import IntArray, JsonObject

__all__ = ["KnownRenderer", "is_known"]

_MAX_QUESTIONS = 16
"""To the library about one answer, on where its text stands: each takes time in proportion to the answer so far."""
_CALLS = (ToolCallParseStatus.OK, ToolCallParseStatus.UNKNOWN_TOOL)
"""A call of a tool that was not offered is a call: the agent answers it."""


def is_known(name: str) -> bool:
    """Whether the library knows a model of this Hugging Face name."""
    return name in MODEL_RENDERER_MAP


class KnownRenderer(TokenizerRenderer):
    """See `rendering.base.Renderer`."""

    def __init__(self, tokenizer: Tokenizer, name: str) -> None:
        """`name`: the model's Hugging Face name, which `is_known`."""
        super().__init__(tokenizer)
        self._renderer = renderers.create_renderer(_TokenizerView(tokenizer, name))
        self.stop_ids = frozenset(self._renderer.get_stop_token_ids())
        added = self._added.values()
        # Gemma's thoughts begin with a title that the library takes away.
        self._tags = [
            THINK,
            THINK_END,
            *DEEPSEEK_V4_GRAMMAR.text_markers,
            *(["thought\n"] if "<|channel>" in added else []),
        ]
        # Inkling's calls begin with a name that is text until a token behind it says otherwise.
        self._is_live = "<|content_invoke_tool_json|>" not in added
        json_call = self._renderer.parse_response(self.encode('{"name": "f", "parameters": {}}'))
        self._is_json_call = bool(json_call.tool_calls)

    def render(self, messages: Sequence[JsonObject], tools: Sequence[JsonObject]) -> list[int]:
        return self._render(messages, tools, answer=True)

    def bridge(
        self,
        history: Sequence[JsonObject],
        prompt_ids: Sequence[int] | IntArray,
        response_ids: Sequence[int] | IntArray,
        new_messages: Sequence[JsonObject],
        tools: Sequence[JsonObject],
    ) -> list[int] | None:
        prompt, response = np.asarray(prompt_ids).tolist(), np.asarray(response_ids).tolist()
        found = self._renderer.bridge_to_next_turn(prompt, response, _plain(new_messages), tools=_plain(tools) or None)
        if found is None:
            return None
        known = prompt + response
        # The library cuts what was sampled behind an end-of-turn token; then the context differs from ours.
        return found.token_ids[len(known) :] if found.token_ids[: len(known)] == known else None

    def live_parser(
        self, *, prompt_ids: Sequence[int] = (), tools: Sequence[JsonObject] = (), stop: Sequence[str] = ()
    ) -> LiveParser:
        known_prompt, known_tools = list(prompt_ids), _plain(tools) or None

        def parse(ids: Sequence[int], is_all: bool) -> ParsedReply:
            parsed = self._renderer.parse_response(list(ids), tools=known_tools, prompt_ids=known_prompt)
            calls = [call for call in parsed.tool_calls if tools and call.status in _CALLS and call.name]
            attempts = [call for call in parsed.tool_calls if call not in calls] if is_all else []
            return ParsedReply(
                content="\n".join(filter(None, [parsed.content.strip(), *self._texts(ids, attempts)])),
                reasoning=(parsed.reasoning_content or "").strip() or None,
                tool_calls=[ToolCall(name=str(call.name), arguments=_json_text(call.arguments)) for call in calls],
            )

        return KnownLive(
            self._tokenizer,
            parse,
            added=self._added,
            special=self._special,
            tags=self._tags,
            is_json_call=self._is_json_call,
            max_questions=_MAX_QUESTIONS if self._is_live else 0,
            stop=stop,
        )

    def _render(self, messages: Sequence[JsonObject], tools: Sequence[JsonObject], *, answer: bool) -> list[int]:
        try:
            return self._renderer.render_ids(
                _plain(messages), tools=_plain(tools) or None, add_generation_prompt=answer
            )
        except (ValueError, TypeError, KeyError) as error:
            raise ProtocolError(f"the model's chat template refuses these messages: {error}") from error

    def _text(self, messages: Sequence[JsonObject], tools: Sequence[JsonObject], answer: bool) -> str:
        return self._tokenizer.decode(self._render(messages, tools, answer=answer), skip_special_tokens=False)

    def _texts(self, ids: Sequence[int], attempts: Sequence[ParsedToolCall]) -> list[str]:
        """What the library takes out of the text though it is no call; several attempts may share their ids."""
        spans = dict.fromkeys(call.token_span for call in attempts if call.token_span is not None)
        texts = [self._tokenizer.decode(list(ids[start:end]), skip_special_tokens=False) for start, end in spans]
        return [text.strip() for text in [*texts, *(call.raw for call in attempts if call.token_span is None)]]


def _plain(items: Sequence[JsonObject]) -> list[Any]:
    return [dict(item) for item in items]


def _json_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)


class _TokenizerView:
    """A `tokenizers.Tokenizer` in the shape that the library asks for."""

    unk_token_id = None
    eos_token_id = None

    def __init__(self, tokenizer: Tokenizer, name: str) -> None:
        self.name_or_path = name
        self._tokenizer = tokenizer

    def encode(self, text: str, *_: Any, **__: Any) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, token_ids: Any, *_: Any, skip_special_tokens: bool = False, **__: Any) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        if isinstance(tokens, str):
            return self._tokenizer.token_to_id(tokens)
        return [self._tokenizer.token_to_id(token) for token in tokens]
