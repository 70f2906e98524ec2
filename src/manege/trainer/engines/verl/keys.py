"""What a run says of verl's training workers, in verl's words; pure, so that a run can be planned without verl.

What a run says of its training is said in its own words (`train`, `model`, `backend`); `backend.verl` adds keys of
verl's, section by section, and wins. Keys that would take what is ours out of our hands are refused by name. Whether
verl knows the others, `settings` finds out.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from manege.config import RunConfig
from manege.errors import ConfigError

__all__ = ["worker_keys"]

_OURS = {
    "model": {"path": "model.path", "lora_rank": 'nothing: adapters are trained by backend.kind = "torch"'},
    "engine": {"strategy": "backend.strategy", "forward_only": "nothing: the workers train"},
    "optimizer": dict.fromkeys(
        ("lr_scheduler_type", "lr_warmup_steps", "lr_warmup_steps_ratio", "total_training_steps"),
        "train.warmup_steps: the learning rate of each step is ours",
    ),
    "checkpoint": {
        "save_contents": "nothing: a run needs all of it",
        "load_contents": "nothing: a run needs all of it",
    },
}
"""Keys of verl's that are refused, and what to set instead."""


def worker_keys(
    config: RunConfig, folder: Path, *, cpu: bool, architecture: str | None = None
) -> Mapping[str, Mapping[str, Any]]:
    """By section of verl's configuration of a training worker. `folder`: of the model; `architecture`: its class, where
    its config.json does not say. Raises ConfigError that names the key."""
    _check_train(config)
    if unknown := sorted(config.backend.verl.keys() - _OURS.keys()):
        raise ConfigError(f"backend.verl.{unknown[0]}: no section of a training worker; there are {', '.join(_OURS)}")
    is_megatron = config.backend.strategy == "megatron"
    ours: dict[str, dict[str, Any]] = {
        "model": _model(config, folder, cpu=cpu, architecture=architecture),
        "engine": _megatron(config) if is_megatron else _fsdp2(config, cpu=cpu),
        "optimizer": _optimizer(config),
        "checkpoint": {},
    }
    return {section: _merged(keys, _theirs(section, config)) for section, keys in ours.items()}


def _merged(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Key by key, also within what is a section in both."""
    both = {
        key: _merged(ours[key], value)
        for key, value in theirs.items()
        if isinstance(value, Mapping) and isinstance(ours.get(key), Mapping)
    }
    return {**ours, **theirs, **both}


def _theirs(section: str, config: RunConfig) -> Mapping[str, Any]:
    theirs = config.backend.verl.get(section, {})
    if not isinstance(theirs, Mapping):
        raise ConfigError(f"backend.verl.{section} = {theirs!r}: it is a section of keys")
    for key, instead in _OURS[section].items():
        if key in theirs:
            raise ConfigError(f"backend.verl.{section}.{key} is not verl's to say here; set {instead}")
    return theirs


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


def _model(config: RunConfig, folder: Path, *, cpu: bool, architecture: str | None) -> dict[str, Any]:
    override: dict[str, Any] = {"attn_implementation": "sdpa"} if cpu else {}
    if architecture:
        override["architectures"] = [architecture]
    return {
        "path": str(folder),
        # Ranks see token ids only, and what an export needs beside the weights is copied from the folder.
        "load_tokenizer": False,
        "override_config": override,
        "enable_gradient_checkpointing": config.train.gradient_checkpointing,
        # Needs flash attention.
        "use_remove_padding": not cpu,
    }


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
