"""Which renderer a model folder gets.

The library `renderers` goes by names; a folder's own chat template is the truth. So a known renderer is taken only if
it renders two short conversations to the same ids as the template; otherwise, and for all other models, ours is.
"""

import re

from manege.errors import ProtocolError
from manege.logs import get_logger, kv
from manege.model.folder import ModelFolder
from manege.rendering.base import Renderer
from manege.rendering.generic import GenericRenderer

__all__ = ["renderer_for"]

_log = get_logger("rendering")

_TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
_CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
_PROBES = (
    (({"role": "user", "content": "Hi"},), ()),
    (
        (
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello."},
            {"role": "user", "content": "What is 2 + 2?"},
            {"role": "assistant", "content": "", "reasoning_content": "Add.", "tool_calls": [_CALL]},
            {"role": "tool", "content": "4", "tool_call_id": "call_1"},
        ),
        (_TOOL,),
    ),
)


def renderer_for(folder: ModelFolder) -> Renderer:
    """Raises ModelError for a folder whose template cannot be used."""
    generic = GenericRenderer(
        folder.tokenizer, folder.chat_template, special_tokens=folder.special_tokens, eos_ids=folder.eos_ids
    )
    for name in (folder.name, folder.config.get("_name_or_path")):
        if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
            continue
        # Costs a second, so only for folders that carry a hub name.
        from manege.rendering.known import KnownRenderer, is_known

        if not is_known(name):
            continue
        try:
            known = KnownRenderer(folder.tokenizer, name)
        except Exception as error:
            # The library raises whatever it likes where the tokenizer lacks a token or a file must be fetched.
            _log.warning(kv("the library cannot render this model; using the template", name=name, error=error))
            continue
        if _agree(known, generic):
            return known
        _log.warning(kv("the folder's chat template differs from that of its name; using the template", name=name))
    return generic


def _agree(known: Renderer, generic: Renderer) -> bool:
    try:
        return all(known.render(messages, tools) == generic.render(messages, tools) for messages, tools in _PROBES)
    except ProtocolError:
        # A template that refuses system prompts or tools is not worth a finer probe.
        return False
