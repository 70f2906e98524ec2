"""Which renderer a model folder gets.

The library `renderers` goes by names; a folder's own chat template is the truth. So a known renderer is taken only if
it renders a short conversation to the same ids as the template; otherwise, and for all other models, ours is.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from manege.logs import get_logger, kv
from manege.model.folder import ModelFolder
from manege.rendering.base import Renderer
from manege.rendering.generic import GenericRenderer

__all__ = ["renderer_for"]

_log = get_logger("rendering")

_PROBE = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "What is 2 + 2?"},
)


def renderer_for(folder: ModelFolder) -> Renderer:
    """Raises ModelError for a folder whose template or end-of-turn token cannot be used."""
    tokenizer_config = _read_json(folder.path / "tokenizer_config.json")
    special_tokens = _special_tokens(tokenizer_config)
    eos_ids = _eos_ids(folder, special_tokens)
    generic = GenericRenderer(folder.tokenizer, folder.chat_template, special_tokens=special_tokens, eos_ids=eos_ids)
    name = _hub_name(folder)
    if name is None:
        return generic
    # Costs a second, so only for folders that carry a name.
    from manege.rendering.known import KnownRenderer, is_known

    if not is_known(name):
        return generic
    known = KnownRenderer(folder.tokenizer, name)
    if known.render(_PROBE, ()) == generic.render(_PROBE, ()):
        return known
    _log.warning(kv("the folder's chat template differs from that of its name; using the template", name=name))
    return generic


def _hub_name(folder: ModelFolder) -> str | None:
    """`organisation/model`, from the configuration or from the hub's cache folder."""
    name = folder.config.get("_name_or_path")
    if isinstance(name, str) and re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return name
    for part in folder.path.parts:
        if part.startswith("models--") and part.count("--") == 2:
            return "/".join(part.split("--")[1:])
    return None


def _eos_ids(folder: ModelFolder, special_tokens: Mapping[str, str]) -> list[int]:
    named = folder.tokenizer.token_to_id(special_tokens.get("eos_token", ""))
    ids = set() if named is None else {named}
    for config in (folder.config, _read_json(folder.path / "generation_config.json")):
        value = config.get("eos_token_id")
        ids.update(value if isinstance(value, list) else [] if value is None else [value])
    return sorted(ids)


def _special_tokens(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and so on: a string, or an object with `content`."""
    found = {key: value for key, value in tokenizer_config.items() if key.endswith("_token") and value}
    texts = {key: value.get("content") if isinstance(value, dict) else value for key, value in found.items()}
    return {key: text for key, text in texts.items() if isinstance(text, str)}


def _read_json(path: Path) -> Mapping[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
