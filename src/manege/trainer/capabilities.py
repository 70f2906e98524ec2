"""Refuses, before anything begins, settings that the train engine or the inference engines cannot carry out."""

from collections.abc import Iterator, Mapping, Sequence

from manege.config import RunConfig, TrainConfig
from manege.errors import TrainerError
from manege.trainer.engines.base import Capabilities, TrainEngine

__all__ = ["check_capabilities", "check_engines", "incapable"]


def check_capabilities(config: RunConfig, engine: TrainEngine) -> None:
    """Raises TrainerError that names the settings and what to do."""
    if reasons := list(incapable(config, engine.capabilities)):
        raise TrainerError("; ".join(reasons))


def incapable(config: RunConfig, can: Capabilities) -> Iterator[str]:
    """Why a train engine cannot carry a run's settings out, each with what to do."""
    # By default it is used where there is one: what is computed is the same.
    if config.train.prefix_tree and "prefix_tree" in config.train.model_fields_set and not can.prefix_tree:
        yield "train.prefix_tree = true: this train engine has none; set it to false"
    if config.credit.loss not in can.losses:
        yield f"credit.loss = {config.credit.loss!r}: this train engine computes {', '.join(sorted(can.losses))}"
    if config.credit.kl > 0 and not can.reference:
        yield f"credit.kl = {config.credit.kl}: this train engine keeps no reference; set it to 0"
    for key, tokens in (
        ("model.max_context", config.model.max_context),
        ("train.max_sample_tokens", config.train.max_sample_tokens),
    ):
        if (tokens or 0) > can.max_sample_tokens:
            yield f"{key} = {tokens}: the train engine takes samples of at most {can.max_sample_tokens} tokens"


def check_engines(train: TrainConfig, engine: TrainEngine, serving: Mapping[str, Sequence[str]]) -> None:
    """`serving`: what the gateway says that its engines can do. Raises TrainerError."""
    if (kind := engine.capabilities.publishes) not in serving["weights"]:
        raise TrainerError(
            f"the gateway's engines take {_listed(serving['weights'])} weights, and this train engine gives {kind!r} "
            "ones; let the gateway serve by an engine that takes them (gateway.engine_url)"
        )
    if train.inflight not in serving["inflight"]:
        raise TrainerError(
            f"train.inflight = {train.inflight!r}: the gateway's engines can do {_listed(serving['inflight'])}"
        )


def _listed(values: Sequence[str]) -> str:
    return ", ".join(map(repr, sorted(values))) or "no"
