"""Models that the library `renderers` knows: templates as code, which also know how to bridge and to parse.

Imported only for those models, since the library takes a second to import.
"""

import json
from collections.abc import Sequence
from typing import Any

import renderers
from renderers.base import MODEL_RENDERER_MAP
from tokenizers import Tokenizer

from manege.errors import ProtocolError
from manege.rendering.base import ParsedReply, ToolCall
from manege.rendering.parse import parse_text
from manege.types import JsonObject

__all__ = ["KnownRenderer", "is_known"]


def is_known(name: str) -> bool:
    """Whether the library knows a model of this Hugging Face name."""
    return name in MODEL_RENDERER_MAP


class KnownRenderer:
    """See `rendering.base.Renderer`."""

    def __init__(self, tokenizer: Tokenizer, name: str) -> None:
        """`name`: the model's Hugging Face name, which `is_known`."""
        self._tokenizer = tokenizer
        self.vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)
        self._renderer = renderers.create_renderer(_TokenizerView(tokenizer, name))
        self.stop_ids = frozenset(self._renderer.get_stop_token_ids())

    def render(self, messages: Sequence[JsonObject], tools: Sequence[JsonObject]) -> list[int]:
        try:
            return self._renderer.render_ids(_plain(messages), tools=_plain(tools) or None, add_generation_prompt=True)
        except (ValueError, TypeError, KeyError) as error:
            raise ProtocolError(f"the model's chat template refuses these messages: {error}") from error

    def bridge(
        self,
        history: Sequence[JsonObject],
        prompt_ids: Sequence[int],
        response_ids: Sequence[int],
        new_messages: Sequence[JsonObject],
        tools: Sequence[JsonObject],
    ) -> list[int] | None:
        found = self._renderer.bridge_to_next_turn(
            list(prompt_ids), list(response_ids), _plain(new_messages), tools=_plain(tools) or None
        )
        if found is None:
            return None
        known = [*prompt_ids, *response_ids]
        # The library cuts what was sampled behind an end-of-turn token; then the context differs from ours.
        return found.token_ids[len(known) :] if found.token_ids[: len(known)] == known else None

    def parse(
        self, response_ids: Sequence[int], *, prompt_ids: Sequence[int] = (), tools: Sequence[JsonObject] = ()
    ) -> ParsedReply:
        parsed = self._renderer.parse_response(
            list(response_ids), tools=_plain(tools) or None, prompt_ids=list(prompt_ids)
        )
        calls = [call for call in parsed.tool_calls if tools and call.status == "ok" and call.name is not None]
        if parsed.tool_calls and not calls:
            # The library takes attempts at calls out of the text, and their tags away.
            shown = [token for token in response_ids if token not in self.stop_ids]
            return parse_text(self._tokenizer.decode(shown, skip_special_tokens=False), with_tools=False)
        malformed = [call.raw for call in parsed.tool_calls if call not in calls]
        return ParsedReply(
            content="\n".join(filter(None, [parsed.content, *malformed])),
            reasoning=parsed.reasoning_content,
            tool_calls=[ToolCall(name=str(call.name), arguments=_json_text(call.arguments)) for call in calls],
        )

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)


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
