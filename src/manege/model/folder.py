"""A model as a folder in Hugging Face format: config, tokenizer, chat template, special tokens.

In: `smollm2`, the path of a folder, or a name on the Hugging Face hub. Out: a ModelFolder, checked so far that whoever
renders messages or samples tokens can work with it. Imports neither torch nor transformers: the gateway needs this much
of a model and no more.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from manege.errors import ModelError
from manege.model.smollm2 import smollm2_folder

__all__ = ["ModelFolder", "hub_file", "is_hub_name", "open_folder"]

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """What can be known of a model without loading its weights."""

    name: str
    """As the user gave it."""
    path: Path
    config: Mapping[str, Any]
    """config.json."""
    tokenizer: Tokenizer
    chat_template: str
    """Jinja."""
    special_tokens: Mapping[str, str]
    """Text of `bos_token`, `eos_token`, `unk_token`, `pad_token`, as far as there are any; templates use them."""
    eos_ids: frozenset[int]
    """Tokens that end an answer; not empty."""
    context_limit: int
    """Prompt + answer tokens."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens included."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=False)


def open_folder(path: str) -> ModelFolder:
    """Find and check a model. Raises ModelError that says what is missing, where, and what to do."""
    folder = _locate(path)
    config = _read_json(folder, "config.json")
    tokenizer_config = _read_json(folder, "tokenizer_config.json")
    tokenizer = _tokenizer(folder)
    special = {
        key: text
        for key in ("bos_token", "eos_token", "unk_token", "pad_token")
        if (text := _text(tokenizer_config.get(key)))
    }
    return ModelFolder(
        name=path,
        path=folder,
        config=config,
        tokenizer=tokenizer,
        chat_template=_chat_template(folder, tokenizer_config),
        special_tokens=special,
        eos_ids=_eos_ids(folder, config, special, tokenizer),
        context_limit=_context_limit(folder, config),
    )


def _locate(path: str) -> Path:
    if path == "smollm2":
        return smollm2_folder()
    folder = Path(path).expanduser().absolute()
    if folder.is_dir():
        return folder
    if not is_hub_name(path):
        raise ModelError(f'model folder {folder} does not exist; give a folder, a Hugging Face name, or "smollm2"')
    return _from_hub(path, lambda hub: hub.snapshot_download(path, allow_patterns=_HUB_FILES))


def is_hub_name(path: str) -> bool:
    """Whether that is to be fetched from the Hugging Face hub."""
    return bool(_HUB_NAME.fullmatch(path)) and not Path(path).expanduser().is_dir()


def hub_file(name: str, file: str) -> Path:
    """One file of a model on the hub, and no more. Raises ModelError."""
    return _from_hub(name, lambda hub: hub.hf_hub_download(name, file))


def _from_hub(path: str, fetch: Callable[[Any], str]) -> Path:
    try:
        import huggingface_hub
    except ImportError as error:
        raise ModelError(
            f"model {path!r} is no local folder; to fetch it from the hub install the extra: "
            'pip install "manege[transformers]"'
        ) from error
    try:
        return Path(fetch(huggingface_hub))
    except (
        Exception
    ) as error:  # the hub client raises many unrelated classes for "not found", "no access" and "no network"
        reason = str(error).strip().partition("\n")[0]
        raise ModelError(f"model {path!r} is no local folder and cannot be fetched from the hub: {reason}") from error


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    path = folder / name
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{folder} has no {name}: it is not a complete Hugging Face model folder") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error


def _tokenizer(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.exists():
        raise ModelError(
            f"{folder} has no tokenizer.json; write one with "
            f"transformers.AutoTokenizer.from_pretrained(...).save_pretrained({str(folder)!r})"
        )
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the tokenizers library raises plain Exception
        raise ModelError(f"{path} cannot be read: {error}") from error


def _chat_template(folder: Path, tokenizer_config: Mapping[str, Any]) -> str:
    path = folder / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):
        template = {item["name"]: item["template"] for item in template}.get("default")
    if not isinstance(template, str):
        raise ModelError(
            f"{folder} has no chat template, so messages cannot be turned into tokens; use an instruction-tuned model, "
            f"or put the template into {path}"
        )
    return template


def _text(token: Any) -> str | None:
    return token.get("content") if isinstance(token, dict) else token


def _eos_ids(
    folder: Path, config: Mapping[str, Any], special: Mapping[str, str], tokenizer: Tokenizer
) -> frozenset[int]:
    generation = _read_json(folder, "generation_config.json") if (folder / "generation_config.json").exists() else {}
    given = generation.get("eos_token_id", config.get("eos_token_id"))
    named = tokenizer.token_to_id(special["eos_token"]) if "eos_token" in special else None
    ids = {id for id in [*(given if isinstance(given, list) else [given]), named] if id is not None}
    if not ids:
        raise ModelError(f"{folder} names no end-of-text token; set eos_token_id in its generation_config.json")
    return frozenset(ids)


def _context_limit(folder: Path, config: Mapping[str, Any]) -> int:
    text_config = config.get("text_config", config)
    for key in _CONTEXT_KEYS:
        if isinstance(text_config.get(key), int):
            return text_config[key]
    raise ModelError(f"{folder / 'config.json'} has none of {', '.join(_CONTEXT_KEYS)}; add max_position_embeddings")
