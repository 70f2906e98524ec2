"""The sampling contract: what a call may ask for, and what the gateway fixes (docs/concepts/token-truth.md).

In training the temperature is the run's and truncation is off, so that what was sampled is the policy that is trained;
a fixed seed would make the rollouts of a group the same. In validation the client's own settings hold. Settings that no
engine has are off in both modes. Whatever was replaced is recorded with the caller's value.
"""

from dataclasses import dataclass

from manege.config import SamplingConfig
from manege.engine.base import Constraint, Sampling
from manege.errors import ContextOverflowError
from manege.protocols.base import AskedSampling
from manege.types import JsonObject, RolloutSpec

__all__ = ["Admitted", "admit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """How a call is sampled."""

    sampling: Sampling
    overridden: JsonObject


def admit(
    asked: AskedSampling,
    *,
    spec: RolloutSpec,
    limits: SamplingConfig,
    num_prompt: int,
    context_limit: int,
    stop_ids: frozenset[int],
    constraint: Constraint | None = None,
) -> Admitted:
    """Raises ContextOverflowError, in the words by which SDKs and harnesses know it, if no token fits."""
    room = context_limit - num_prompt
    if room < 1:
        raise ContextOverflowError(
            f"This model's maximum context length is {context_limit} tokens. However, your messages resulted in "
            f"{num_prompt} tokens. Please reduce the length of the messages.",
            num_prompt=num_prompt,
            context_limit=context_limit,
        )
    wanted = {"temperature": asked.temperature, "top_p": asked.top_p, "top_k": asked.top_k, "seed": asked.seed}
    defaults = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": None}
    used = {key: defaults[key] if value is None else value for key, value in wanted.items()}
    if spec.is_train:
        used = {**defaults, "temperature": limits.temperature}
    if spec.temperature is not None:
        used["temperature"] = spec.temperature
    replaced = {key: value for key, value in wanted.items() if value is not None and value != used[key]}
    sampling = Sampling(
        max_new_tokens=min(asked.max_new_tokens or room, limits.max_new_tokens, room),
        stop_ids=stop_ids,
        stop_strings=asked.stop,
        constraint=constraint,
        **used,
    )
    return Admitted(sampling=sampling, overridden={**replaced, **asked.others})
