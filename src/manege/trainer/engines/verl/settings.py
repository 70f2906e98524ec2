"""A run's settings as verl's own configuration of a training worker; verl's errors name our keys (see `keys`)."""

# pyright: reportMissingImports=false
import dataclasses
from collections.abc import Mapping
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from verl.trainer.config import CheckpointConfig
from verl.workers.config import (
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    McoreEngineConfig,
    McoreOptimizerConfig,
    TrainingWorkerConfig,
)

from manege.config import RunConfig
from manege.errors import ConfigError
from manege.model.folder import ModelFolder
from manege.trainer.engines.verl.keys import worker_keys

__all__ = ["worker_config"]


def worker_config(config: RunConfig, folder: ModelFolder, *, cpu: bool) -> TrainingWorkerConfig:
    """Raises ConfigError that names the key."""
    architecture = None if folder.config.get("architectures") else _architecture(folder)
    keys = worker_keys(config, folder.path, cpu=cpu, architecture=architecture)
    is_megatron = config.backend.strategy == "megatron"
    classes = {
        "model": HFModelConfig,
        "engine": McoreEngineConfig if is_megatron else FSDPEngineConfig,
        "optimizer": McoreOptimizerConfig if is_megatron else FSDPOptimizerConfig,
        "checkpoint": CheckpointConfig,
    }
    built = {section: _object(f"backend.verl.{section}", cls, keys[section]) for section, cls in classes.items()}
    return TrainingWorkerConfig(
        model_type="language_model",
        model_config=built["model"],
        engine_config=built["engine"],
        optimizer_config=built["optimizer"],
        checkpoint_config=built["checkpoint"],
    )


def _architecture(folder: ModelFolder) -> str:
    model_type = folder.config.get("model_type")
    found = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type or "")
    if not isinstance(found, str):
        raise ConfigError(f"{folder.path}/config.json: transformers has no causal language model {model_type!r}")
    return found


def _object(where: str, cls: type, values: Mapping[str, Any]) -> Any:
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for key in values:
        if key not in fields:
            raise ConfigError(
                f"{where}.{key}: verl's {cls.__name__} has no such key; it has {', '.join(sorted(fields))}"
            )
    built = {}
    for key, value in values.items():
        factory = fields[key].default_factory
        is_section = dataclasses.is_dataclass(factory) and isinstance(value, Mapping)
        built[key] = _object(f"{where}.{key}", factory, value) if is_section else value  # type: ignore[arg-type]
    try:
        return cls(**built)
    except (AssertionError, TypeError, ValueError, OSError) as error:
        raise ConfigError(f"{where}: verl's {cls.__name__} refuses it: {error}") from error
