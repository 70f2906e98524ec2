"""Low-rank adapters beside the weights of a model (https://arxiv.org/abs/2106.09685), by the package `peft`.

Linear layers of the model are replaced in place, so that whoever shares the model samples with its adapters. The
weights themselves never change: with the adapters off it is the model that the run began with. Adapters are float32
whatever the weights are, since an optimiser's small steps are lost in less.

On the disk they are what `peft` reads over the same model: adapter_model.safetensors and adapter_config.json.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from manege.config import TrainConfig
from manege.errors import TrainerError
from manege.model.base import LanguageModel

__all__ = ["Adapters"]

_NAME = "default"
_PREFIX = "base_model.model."
_WEIGHTS_FILE = "adapter_model.safetensors"


class Adapters:
    """Of one model; making them puts them into it, where they change nothing until they are trained."""

    def __init__(self, model: LanguageModel, config: TrainConfig, *, base: str) -> None:
        """`base`: what the model is called in adapter_config.json. Raises TrainerError for layers that it lacks."""
        try:
            from peft import LoraConfig, inject_adapter_in_model
            from peft.tuners.lora import LoraLayer
        except ImportError as error:
            raise TrainerError(
                f'train.lora_rank = {config.lora_rank} needs the package peft: pip install "manege[lora]"'
            ) from error
        self._module = model.module
        self._config = LoraConfig(
            r=config.lora_rank,
            lora_alpha=config.lora_alpha or 2 * config.lora_rank,  # type: ignore[arg-type] - any number will do
            target_modules=_targets(model, config.lora_targets),
            lora_dropout=0.0,
            bias="none",
            task_type="CAUSAL_LM",
            base_model_name_or_path=base,
        )
        # The same on every rank, and no draw of anybody else's.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            inject_adapter_in_model(self._config, self._module, _NAME)
        self._layers: dict[str, Any] = {
            name: layer for name, layer in self._module.named_modules() if isinstance(layer, LoraLayer)
        }
        self._module.requires_grad_(False)
        self._named = {name: p for name, p in self._module.named_parameters() if ".lora_" in name}
        for parameter in self._named.values():
            parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
            parameter.requires_grad_(True)

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """What is trained."""
        return list(self._named.values())

    @contextmanager
    def off(self) -> Iterator[None]:
        """The model as it was."""
        for layer in self._layers.values():
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for layer in self._layers.values():
                layer.enable_adapters(True)

    @torch.no_grad()
    def merged(self) -> Iterator[tuple[str, Tensor]]:
        """All weights under the model's own names, each with what its adapter adds."""
        for name, parameter in self._module.named_parameters():
            owner, _, part = name.removesuffix(f".{_NAME}").rpartition(".")
            owner = owner.removesuffix(".base_layer")
            if name in self._named:
                continue
            if part == "weight" and owner in self._layers:
                added = self._layers[owner].get_delta_weight(_NAME)
                yield f"{owner}.{part}", (parameter + added).to(parameter.dtype)
            else:
                yield f"{owner}.{part}", parameter

    def save(self, folder: Path) -> None:
        """Write what `peft` reads."""
        folder.mkdir(parents=True, exist_ok=True)
        state = {_disk_name(name): parameter.detach().cpu().contiguous() for name, parameter in self._named.items()}
        save_file(state, folder / _WEIGHTS_FILE, {"format": "pt"})
        self._config.save_pretrained(str(folder))

    def load(self, folder: Path) -> None:
        """The reverse. Raises TrainerError for adapters of another shape."""
        try:
            state = load_file(folder / _WEIGHTS_FILE)
        except (SafetensorError, OSError) as error:
            raise TrainerError(
                f"{folder} holds no adapters that can be read ({error}); resume with the train.lora_rank of the run"
            ) from error
        shapes = {_disk_name(name): parameter.shape for name, parameter in self._named.items()}
        if shapes != {name: tensor.shape for name, tensor in state.items()}:
            raise TrainerError(
                f"{folder} holds adapters of other layers or of another rank; resume with the train.lora_rank and "
                "train.lora_targets of the run"
            )
        for name, parameter in self._named.items():
            parameter.data.copy_(state[_disk_name(name)])


def _disk_name(name: str) -> str:
    return _PREFIX + name.replace(f".{_NAME}.", ".")


def _targets(model: LanguageModel, wanted: Sequence[str]) -> list[str]:
    """Last parts of names. The head is left out: what it adds could not be merged into a tied one."""
    linear = {
        name.rpartition(".")[2]
        for name, layer in model.module.named_modules()
        if isinstance(layer, nn.Linear) and layer.out_features != model.vocab_size
    }
    if unknown := sorted(set(wanted) - linear):
        raise TrainerError(
            f"train.lora_targets: this model has no linear layer {unknown[0]!r} that could get an adapter; it has "
            f"{', '.join(sorted(linear)) or 'none'}"
        )
    if not linear:
        raise TrainerError("train.lora_rank: this model has no linear layers; set it to 0")
    return sorted(wanted or linear)
