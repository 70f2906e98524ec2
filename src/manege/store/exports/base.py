"""What an export holds, whatever its form, and the names that its forms share."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from manege.errors import StoreError
from manege.store.base import Run
from manege.store.codec import RUN
from manege.types import Call, Event, JsonObject, Rollout

__all__ = ["ARRAYS", "Export", "ExportWriter", "ExportedRollout", "check_head", "head"]

FORMAT, VERSION = "manege-rollouts", 1

ARRAYS: Mapping[str, str] = {
    "prompt_ids": "prompt_ids_P",
    "response_ids": "response_ids_R",
    "logprobs": "logprobs_R",
}
"""Fields of a call in a file, and of `Call`; all others are named alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedRollout:
    """A rollout with all that belongs to it."""

    rollout: Rollout
    calls: Sequence[Call]
    """Of its last attempt, the only one that counts, in the order in which they were stored."""
    events: Sequence[Event]
    """Of all attempts, in the order of insertion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """A file that is read back."""

    run: Run | None
    """None: the run has no config, as those of Agent Lightning's clients."""
    rollouts: Iterator[ExportedRollout]
    """In the order in which they were written. Raises StoreError for a damaged file."""


class ExportWriter(Protocol):
    """One form of file."""

    def add(self, exported: ExportedRollout) -> None:
        """Write one more."""
        ...

    def close(self) -> None:
        """Write what is left; the file is whole now."""
        ...


def head(run: Run | None) -> Mapping[str, Any]:
    """What a file says of itself."""
    return {"format": FORMAT, "version": VERSION, "run": run}


def check_head(found: Any, source: str) -> Run | None:
    """The run of a file. Raises StoreError for a file that is none of ours, or a newer one."""
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise StoreError(f"{source} is no export of manege: it does not begin as one; write it with `manege export`")
    if found.get("version") != VERSION:
        raise StoreError(
            f"{source} is an export of version {found.get('version')}, this manege reads version {VERSION}; "
            "upgrade manege, or export the run again"
        )
    run: JsonObject | None = found["run"]
    return None if run is None else RUN.validate_python(run)
