"""What carries out attempts: processes of this machine (`local.py`) or Jobs of a cluster (`kubernetes/`)."""

from pathlib import Path
from typing import Protocol

from manege.client import Claim
from manege.config import RunConfig
from manege.store.base import Ending

__all__ = ["Runner"]


class Runner(Protocol):
    """Carries out any number of attempts at once."""

    folder: Path
    """Where it keeps what it keeps on this machine."""

    async def prepare(self, config: RunConfig) -> None:
        """Make ready for a run's attempts. Raises ManegeError for a run that cannot be carried out here."""
        ...

    async def run(self, claim: Claim, config: RunConfig) -> Ending:
        """The whole attempt; whatever goes wrong is an outcome. Cancelling it kills what runs."""
        ...

    async def close(self) -> None:
        """Let go of what it holds open."""
        ...
