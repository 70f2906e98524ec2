"""What is maximised per token; data only, so that every train engine can read it.

l_t = -min(ratio A, clip(ratio, 1 - low, 1 + high) A), with ratio = pi / mu and mu the recorded log-probability; where
A < 0 additionally bounded by dual_clip * A (dual-clip PPO, arXiv 1912.09729), so that a token that became very likely
cannot dominate.
"""

from dataclasses import dataclass

__all__ = ["Objective"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """Clipped ratio to the recorded policy."""

    clip_low: float
    clip_high: float
    dual_clip: float | None
