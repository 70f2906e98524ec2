"""What carries out attempts: processes of this machine (`local.py`) or Jobs of a cluster (`kubernetes/`)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from manege.client import Claim
from manege.config import RunConfig
from manege.store.base import Ending

__all__ = ["LastingRunner", "Runner"]


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


@runtime_checkable
class LastingRunner(Runner, Protocol):
    """One whose attempts go on while no controller is there. Cancelling its `run` leaves them alone, and calling it
    again, with the same claim, takes up what it finds."""

    async def adopt(self, claims: Sequence[Claim]) -> None:
        """Before anything runs: `claims` are what this controller still holds; what else it left behind is removed.
        Raises ManegeError where nothing can be run."""
        ...

    async def discard(self, claim: Claim) -> None:
        """Kill and remove what is left of an attempt that is over."""
        ...
