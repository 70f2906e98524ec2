"""Names and labels of what an attempt is in a cluster. Pure and deterministic: whoever restarts finds its own again.

The name of a Job ends with a digest of the attempt's key, which says gateway, rollout and attempt at once and which
nobody can guess; so one that exists already is the one that was meant.
"""

import hashlib
import re
from collections.abc import Mapping

from manege.client import Claim
from manege.types import RolloutId

__all__ = ["GATEWAY", "NETWORK", "Owner", "job_name", "labels_of", "rollout_label"]

GATEWAY, CONTROLLER, ROLLOUT, NETWORK = "manege/gateway", "manege/controller", "manege/rollout", "manege/network"
_SLUG_CHARS = 34
"""With what is added, a Job's name stays under 58: its pods' names have six characters more, and 63 is their limit."""


class Owner:
    """A controller of a gateway, as labels say it."""

    def __init__(self, *, gateway_url: str, controller: str) -> None:
        self.gateway = _digest(gateway_url)
        """Of the URL, so controllers of one gateway have to give it the same one."""
        self.controller = f"{_slug(controller)}-{_digest(controller)[:8]}"

    @property
    def selector(self) -> str:
        """Of all Jobs of the gateway, whoever made them."""
        return f"{GATEWAY}={self.gateway}"

    def owns(self, labels: Mapping[str, str]) -> bool:
        """Whether this controller made it."""
        return labels.get(GATEWAY) == self.gateway and labels.get(CONTROLLER) == self.controller


def job_name(claim: Claim, *, part: str = "") -> str:
    """Of Job and Secret; `part` tells a second Job of the attempt apart."""
    rollout = claim.rollout
    return f"manege-{_slug(rollout.spec.id)}-{rollout.attempt}-{_digest(claim.agent_key + part)[:8]}"


def labels_of(claim: Claim, owner: Owner) -> dict[str, str]:
    """Of Job and pods."""
    rollout = claim.rollout
    return {
        "app.kubernetes.io/managed-by": "manege",
        GATEWAY: owner.gateway,
        CONTROLLER: owner.controller,
        ROLLOUT: rollout_label(rollout.spec.id),
        "manege/run": _slug(rollout.spec.run),
        "manege/attempt": str(rollout.attempt),
    }


def rollout_label(rollout_id: RolloutId) -> str:
    """Ids may be longer than labels, and hold what those may not."""
    return _digest(rollout_id)


def _slug(text: str) -> str:
    """What is good for names and labels alike."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower())[:_SLUG_CHARS].strip("-") or "x"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
