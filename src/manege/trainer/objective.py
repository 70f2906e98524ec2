"""What is maximised per token; data only, so that every train engine can read it.

mu is always the recorded policy, pi the present one, old the denominator of the ratio: mu itself (`recorded`), or the
policy at the start of the update (`decoupled`; then each token is weighted by min(old / mu, cap), and masked where
old / mu leaves [1 / band, band]). The losses are in `losses/`, a file each.
"""

from dataclasses import dataclass
from typing import Literal

from manege.config import CreditConfig

__all__ = ["Objective", "objective_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """One of the combinations of docs/reference/credit.md."""

    loss: Literal["ppo", "cispo", "gspo"]
    clip_low: float
    clip_high: float
    dual_clip: float | None
    ratio: Literal["recorded", "decoupled"]
    mismatch_level: Literal["token", "call"]
    mismatch_cap: float
    mismatch_band: float
    kl: float
    """Weight of the divergence from the reference (k3); 0: none."""


def objective_of(credit: CreditConfig) -> Objective:
    """What a run asks for."""
    return Objective(
        loss=credit.loss,
        clip_low=credit.clip_low,
        clip_high=credit.clip_high,
        dual_clip=credit.dual_clip,
        ratio=credit.ratio,
        mismatch_level=credit.mismatch_level,
        mismatch_cap=credit.mismatch_cap,
        mismatch_band=credit.mismatch_band,
        kl=credit.kl,
    )
