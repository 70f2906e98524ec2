"""The section `credit` of a run file, and which of its values go together.

COMBINATIONS is the one table of what is tested (tests/unit/test_combinations.py trains a row each); docs/reference/
credit.md shows it, and every other combination is refused before anything starts. So is a key that would do nothing:
one that is set to something else than its default while the key that gives it a meaning is not.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, dataclass, fields
from itertools import product
from typing import Annotated, Literal

from pydantic import Field, model_validator

from manege.section import PositiveFloat, PositiveInt, Section

__all__ = ["ASSIGNMENTS", "COMBINATIONS", "CONDITIONS", "OBJECTIVES", "Combination", "CreditConfig"]


@dataclass(frozen=True, slots=True)
class Combination:
    """One row."""

    level: str
    advantage: str
    weighting: str
    loss: str
    ratio: str
    mismatch_level: str


# Who gets how much: (level, advantage, weighting). Weights that depend on rollouts only go with every advantage.
_BY_ROLLOUT = tuple(
    product(("rollout",), ("centred", "grpo", "rloo", "returns"), ("rollout_mean", "token_mean", "constant"))
)
# For study, as far as they are published baselines: they depend on how rollouts fall apart.
_BY_SAMPLE = (
    *product(("rollout",), ("centred", "grpo"), ("sample_mean",)),
    *product(("sample",), ("centred", "grpo"), ("sample_mean", "rollout_mean", "token_mean")),
)
ASSIGNMENTS = (*_BY_ROLLOUT, *_BY_SAMPLE)

_PLAIN = ("ppo", "recorded", "token")
OBJECTIVES = (
    _PLAIN,
    ("ppo", "decoupled", "token"),
    ("ppo", "decoupled", "call"),
    ("cispo", "recorded", "token"),
    ("cispo", "decoupled", "token"),
    ("cispo", "decoupled", "call"),
    ("gspo", "recorded", "token"),
    # GSPO has one ratio per call: a correction that differs from token to token would undo that.
    ("gspo", "decoupled", "call"),
)
"""What is done with it: (loss, ratio, mismatch_level); with recorded ratios the mismatch level stays at its default."""

COMBINATIONS: Sequence[Combination] = [
    *(Combination(*assignment, *objective) for assignment, objective in product(_BY_ROLLOUT, OBJECTIVES)),
    *(Combination(*assignment, *_PLAIN) for assignment in _BY_SAMPLE),
]
"""All that is allowed."""


class CreditConfig(Section):
    """How rewards become gradients (docs/concepts/credit.md)."""

    level: Literal["rollout", "sample"] = "rollout"
    """What is compared within a group. `sample` is for study only: it depends on how rollouts fall apart."""
    advantage: Literal["centred", "grpo", "rloo", "returns"] = "centred"
    """`returns`: per call, from rewards of single calls."""
    discount: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Of `returns`: what a reward counts for the call before the one that earned it."""
    zero_variance: Literal["keep", "refill"] = "keep"
    """A group whose rewards are all equal: kept, with advantage zero, or replaced by another one."""
    loss: Literal["ppo", "cispo", "gspo"] = "ppo"
    weighting: Literal["rollout_mean", "token_mean", "constant", "sample_mean"] = "rollout_mean"
    """`sample_mean` is for study only: it depends on how rollouts fall apart into samples."""
    constant_tokens: PositiveInt | None = None
    """L of the `constant` weighting."""
    clip_low: PositiveFloat = 0.2
    """The ratio to the old policy is clipped below 1 - clip_low ..."""
    clip_high: PositiveFloat = 0.28
    """... and above 1 + clip_high."""
    dual_clip: Annotated[float, Field(gt=1)] | None = 3.0
    """Bound on the ratio where the advantage is negative; None: unbounded."""
    ratio: Literal["recorded", "decoupled"] = "recorded"
    """The old policy: the recorded log-probabilities, or the policy at the start of the update, corrected for the
    distance between the two."""
    mismatch_level: Literal["token", "call"] = "token"
    """That distance, of a token or (its geometric mean) of a whole answer."""
    mismatch_cap: PositiveFloat = 2.0
    """Bound on the correction's weight."""
    mismatch_band: Annotated[float, Field(gt=1)] = 5.0
    """Tokens whose distance is above this or below its inverse are masked."""
    kl: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the divergence from the model that the run began with; 0: none."""
    side_calls: Literal["train", "exclude"] = "train"
    """Calls beside the agent's work (titles, summaries, commit messages), as far as its harness is known."""
    cut_short: Literal["train", "mask", "penalise"] = "train"
    """Answers that hit their token limit: trained, left out, or trained with `length_penalty` off the reward."""
    overlong_tokens: PositiveInt | None = None
    """Sampled tokens of a rollout from which on the whole `length_penalty` is off its reward; None: no such limit."""
    overlong_buffer: PositiveInt = 1
    """Tokens before that limit over which the penalty rises from zero."""
    length_penalty: PositiveFloat = 1.0
    """Taken off the reward of a rollout that is too long or was cut short, once if both."""
    flagged: Literal["keep", "mask", "zero"] = "keep"
    """Rollouts whose hack report says that they tried to cheat (docs/concepts/sandbox.md): trained as they are, left
    out of the baseline and the loss, or given reward 0."""
    min_trained_fraction: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Stop with a diagnosis when a smaller share of a step's sampled tokens is trained."""
    shuffle_rewards: bool = False
    """A control for experiments: rewards are shuffled among the rollouts of a step, so that nothing can be learnt."""

    @model_validator(mode="after")
    def _tested(self) -> "CreditConfig":
        asked = Combination(*(getattr(self, each.name) for each in fields(Combination)))
        _refuse_what_does_nothing(self)
        if asked not in COMBINATIONS:
            raise ValueError(_untested(asked))
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """A key that means something only beside another one."""

    key: str
    needs: str
    """For people: what must be set."""
    holds: Callable[[CreditConfig], bool]


CONDITIONS = (
    Condition(key="discount", needs='advantage = "returns"', holds=lambda c: c.advantage == "returns"),
    Condition(key="constant_tokens", needs='weighting = "constant"', holds=lambda c: c.weighting == "constant"),
    Condition(key="dual_clip", needs='loss = "ppo"', holds=lambda c: c.loss == "ppo"),
    *(
        Condition(key=f"mismatch_{name}", needs='ratio = "decoupled"', holds=lambda c: c.ratio == "decoupled")
        for name in ("level", "cap", "band")
    ),
    Condition(key="overlong_buffer", needs="overlong_tokens", holds=lambda c: c.overlong_tokens is not None),
    Condition(
        key="length_penalty",
        needs='cut_short = "penalise" or overlong_tokens',
        holds=lambda c: c.cut_short == "penalise" or c.overlong_tokens is not None,
    ),
    Condition(
        key="shuffle_rewards",
        needs='an advantage other than "returns": rewards of calls would still teach',
        holds=lambda c: c.advantage != "returns",
    ),
)


def _refuse_what_does_nothing(credit: CreditConfig) -> None:
    """Compared with the default, not by who set it: a stored run has every key."""
    for condition in CONDITIONS:
        value = getattr(credit, condition.key)
        if value != CreditConfig.model_fields[condition.key].default and not condition.holds(credit):
            raise ValueError(f"{condition.key} = {_toml(value)} does nothing here: it needs {condition.needs}")
    if credit.weighting == "constant" and credit.constant_tokens is None:
        raise ValueError('weighting = "constant" needs constant_tokens, the L of its 1 / (N L)')
    if credit.overlong_tokens is not None and credit.overlong_buffer > credit.overlong_tokens:
        raise ValueError(
            f"overlong_buffer = {credit.overlong_buffer} begins before the first token: it is at most "
            f"overlong_tokens = {credit.overlong_tokens}"
        )


def _untested(asked: Combination) -> str:
    def distance(row: Combination) -> tuple[int, Sequence[bool]]:
        """Few changes, and those to the later keys: what is trained matters more than how it is corrected."""
        differs = [a != b for a, b in zip(astuple(row), astuple(asked), strict=True)]
        return sum(differs), differs

    nearest, wanted = min(COMBINATIONS, key=distance), asdict(asked)
    changes = [f"{key} = {_toml(value)}" for key, value in asdict(nearest).items() if value != wanted[key]]
    shown = ", ".join(f"{key} = {_toml(value)}" for key, value in wanted.items())
    return f"{shown} is not a tested combination; the nearest one has {', '.join(changes)} (docs/reference/credit.md)"


def _toml(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value).lower()
