"""From a model folder to a LanguageModel, and back to a folder.

Weights are safetensors, one file or several with an index. `export_folder` writes what `transformers` loads; it is
complete or absent.
"""

import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from manege.errors import ModelError
from manege.model.base import LanguageModel
from manege.model.folder import ModelFolder
from manege.model.llama import Llama, can_compute

__all__ = ["export_folder", "exported_folder", "load_model", "read_weights", "weights_dtype"]

_KEPT = ("*.json", "*.jinja", "*.txt", "*.model")


def weights_dtype(wanted: str, device: str | torch.device) -> torch.dtype:
    """What `model.dtype` means on a device."""
    automatic = torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16
    return {"auto": automatic, "float32": torch.float32, "bfloat16": torch.bfloat16}[wanted]


def load_model(
    folder: ModelFolder, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> LanguageModel:
    """Raises ModelError for weights that are missing or do not fit, or an architecture that cannot be computed."""
    if can_compute(folder.config):
        with torch.device("meta"):
            model = Llama(folder.config)
        model.module.to(dtype).to_empty(device=device)
        read_weights(model, folder.path)
        return model
    from manege.model.foreign import load_foreign

    return load_foreign(folder, device, dtype)


def read_weights(model: LanguageModel, folder: Path) -> None:
    """Copy the folder's weights into the model's parameters, in place."""
    missing = set(parameters := dict(model.module.named_parameters()))
    for name, tensor in _tensors(folder):
        parameter = parameters.get(name)
        if parameter is None:
            continue  # a tied head that was written too, or rotary buffers of old checkpoints
        if parameter.shape != tensor.shape:
            raise ModelError(
                f"{folder}: weight {name} has shape {list(tensor.shape)}, config.json says {list(parameter.shape)}"
            )
        parameter.data.copy_(tensor)
        missing.discard(name)
    if missing:
        raise ModelError(
            f"{folder}: {len(missing)} weights are missing, {min(missing)} for one; is the download complete?"
        )


def export_folder(
    model: LanguageModel,
    source: ModelFolder,
    target: Path,
    *,
    weights: Iterable[tuple[str, Tensor]] | None = None,
) -> None:
    """Write a Hugging Face model folder: the source's config, tokenizer and template with the present weights, or with
    those that are given under the same names."""
    named = model.module.named_parameters() if weights is None else weights
    with exported_folder(source, target) as unfinished:
        state = {name: tensor.detach().cpu().contiguous() for name, tensor in named}
        save_file(state, unfinished / "model.safetensors", {"format": "pt"})


@contextmanager
def exported_folder(source: ModelFolder, target: Path) -> Iterator[Path]:
    """The same with weights that somebody else writes: into the folder that is given, which takes its name if the block
    ends well."""
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        for pattern in _KEPT:
            for path in source.path.glob(pattern):
                if not path.name.endswith(".safetensors.index.json"):
                    shutil.copyfile(path, unfinished / path.name)
        yield unfinished
        dtype = str(next(_tensors(unfinished))[1].dtype).removeprefix("torch.")
        config = {key: value for key, value in source.config.items() if key != "torch_dtype"} | {"dtype": dtype}
        (unfinished / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        if target.exists():
            shutil.rmtree(target)
        unfinished.chmod(0o755)
        unfinished.rename(target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise ModelError(f"{folder} has no *.safetensors; convert the weights with save_pretrained of transformers")
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a dict
                    yield name, file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} cannot be read: {error}; is the download complete?") from error
