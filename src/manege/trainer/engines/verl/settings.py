"""From a run file to verl's configuration of a training worker.

What a run says of its training is said in its own words (`train`, `model`, `backend`); `backend.verl` adds keys of
verl's, section by section, and wins. Keys that would take what is ours out of our hands are refused by name.
"""

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

__all__ = ["worker_config"]

_OURS = {
    "engine": {"strategy": "backend.strategy", "forward_only": "nothing: the workers train"},
    "optimizer": dict.fromkeys(
        ("lr_scheduler_type", "lr_warmup_steps", "lr_warmup_steps_ratio", "total_training_steps"),
        "train.warmup_steps: the learning rate of each step is ours",
    ),
    "model": {"path": "model.path", "lora_rank": 'nothing: adapters are trained by backend.kind = "torch"'},
    "checkpoint": {
        "save_contents": "nothing: a run needs all of it",
        "load_contents": "nothing: a run needs all of it",
    },
}
"""Keys of verl's that are refused, and what to set instead."""


def worker_config(config: RunConfig, folder: ModelFolder, *, cpu: bool) -> TrainingWorkerConfig:
    """Raises ConfigError that names the key."""
    _check_train(config)
    if unknown := sorted(config.backend.verl.keys() - _OURS.keys()):
        raise ConfigError(f"backend.verl.{unknown[0]}: no section of a training worker; there are {', '.join(_OURS)}")
    is_megatron = config.backend.strategy == "megatron"
    engine = _megatron(config) if is_megatron else _fsdp2(config, cpu=cpu)
    return TrainingWorkerConfig(
        model_type="language_model",
        model_config=_built("model", HFModelConfig, _model(config, folder, cpu=cpu), config),
        engine_config=_built("engine", McoreEngineConfig if is_megatron else FSDPEngineConfig, engine, config),
        optimizer_config=_built(
            "optimizer", McoreOptimizerConfig if is_megatron else FSDPOptimizerConfig, _optimizer(config), config
        ),
        checkpoint_config=_built("checkpoint", CheckpointConfig, {}, config),
    )


def _check_train(config: RunConfig) -> None:
    train = config.train
    for key, value in (("frozen", train.frozen), ("lora_rank", train.lora_rank)):
        if value:
            raise ConfigError(f'train.{key} = {value!r}: verl\'s workers train all weights; use backend.kind = "torch"')
    if config.backend.strategy == "megatron" and train.mini_batches > 1:
        raise ConfigError(
            f"train.mini_batches = {train.mini_batches}: under megatron a step cannot be taken back when a later one "
            "of the same update fails; set it to 1"
        )


def _model(config: RunConfig, folder: ModelFolder, *, cpu: bool) -> dict[str, Any]:
    override: dict[str, Any] = {"attn_implementation": "sdpa"} if cpu else {}
    if not folder.config.get("architectures"):
        override["architectures"] = [_architecture(folder)]
    return {
        "path": str(folder.path),
        # Ranks see token ids only, and what an export needs beside the weights is copied from the folder.
        "load_tokenizer": False,
        "override_config": override,
        "enable_gradient_checkpointing": config.train.gradient_checkpointing,
        # Needs flash attention.
        "use_remove_padding": not cpu,
    }


def _architecture(folder: ModelFolder) -> str:
    model_type = folder.config.get("model_type")
    found = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type or "")
    if not isinstance(found, str):
        raise ConfigError(f"{folder.path}/config.json: transformers has no causal language model {model_type!r}")
    return found


def _common(config: RunConfig) -> dict[str, Any]:
    tokens = config.train.micro_batch_tokens
    return {
        "use_dynamic_bsz": True,
        "max_token_len_per_gpu": tokens,
        "infer_max_token_len_per_gpu": tokens,
        "param_offload": config.backend.colocated,
        "optimizer_offload": config.backend.colocated,
        "seed": config.seed,
    }


def _fsdp2(config: RunConfig, *, cpu: bool) -> dict[str, Any]:
    wanted = config.model.dtype
    dtype = {"auto": "fp32" if cpu else "bf16", "float32": "fp32", "bfloat16": "bf16"}[wanted]
    return {
        **_common(config),
        "strategy": "fsdp2",
        # The optimiser's weights are float32; `dtype` is what the passes see of them.
        "model_dtype": "fp32",
        "mixed_precision": {"param_dtype": dtype, "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
        # The entropy is a metric here: nothing of it is kept for the backward pass.
        "entropy_checkpointing": True,
        "use_torch_compile": not cpu,
    }


def _megatron(config: RunConfig) -> dict[str, Any]:
    return {**_common(config), "strategy": "megatron"}


def _optimizer(config: RunConfig) -> dict[str, Any]:
    train = config.train
    constant = {"lr_decay_style": "constant"} if config.backend.strategy == "megatron" else {}
    return {
        "lr": train.learning_rate,
        "betas": train.betas,
        "weight_decay": train.weight_decay,
        "clip_grad": train.max_grad_norm,
        **constant,
    }


def _built(section: str, cls: type, ours: Mapping[str, Any], config: RunConfig) -> Any:
    """An object of verl's, with the user's keys over ours."""
    theirs = config.backend.verl.get(section, {})
    if not isinstance(theirs, Mapping):
        raise ConfigError(f"backend.verl.{section} = {theirs!r}: it is a section of keys")
    for key, instead in _OURS[section].items():
        if key in theirs:
            raise ConfigError(f"backend.verl.{section}.{key} is not verl's to say here; set {instead}")
    where = f"backend.verl.{section}"
    return _object(where, cls, {**ours, **theirs})


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
