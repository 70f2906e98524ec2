"""Checkpoints: weights, optimiser and rng of the engine, and where the trainer was.

Written to a temporary folder and renamed, so that a checkpoint is whole or not there. The two newest are kept.
"""

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from manege.errors import TrainerError
from manege.trainer.engines.base import TrainEngine

__all__ = ["TrainerState", "latest_checkpoint", "load_checkpoint", "save_checkpoint"]

_SCHEMA = 1
_STATE_FILE = "trainer.json"
_NUM_KEPT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """Where the loop was after a step."""

    step: int
    """Optimiser steps done (skipped ones included)."""
    tasks_taken: int
    """Position in the endless sequence of shuffled epochs."""
    cursor: int
    """Of the terminal feed."""
    train_s: float
    """Seconds of training so far, evaluations apart."""
    successes: Sequence[float]
    """Success rates of the steps, for early stopping."""


def save_checkpoint(folder: Path, engine: TrainEngine, state: TrainerState) -> Path:
    """Write `folder/step-NNNNNN`."""
    target = folder / f"step-{state.step:06d}"
    partial = folder / f".{target.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        engine.save(partial)
        (partial / _STATE_FILE).write_text(json.dumps({"schema": _SCHEMA, **asdict(state)}))
        for path in partial.rglob("*"):
            if path.is_file():
                _sync(path)
        if target.exists():
            shutil.rmtree(target)
        os.replace(partial, target)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise TrainerError(
            f"checkpoint {target} cannot be written: {error}; free some space, then go on with --resume"
        ) from error
    for old in sorted(folder.glob("step-*"))[:-_NUM_KEPT]:
        shutil.rmtree(old)
    return target


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest whole checkpoint."""
    return max(folder.glob("step-*"), default=None)


def load_checkpoint(checkpoint: Path, engine: TrainEngine) -> TrainerState:
    """Restore the engine. Raises TrainerError for a checkpoint of a newer format."""
    try:
        raw = json.loads((checkpoint / _STATE_FILE).read_text())
    except (OSError, ValueError) as error:
        raise TrainerError(f"checkpoint {checkpoint} cannot be read: {error}") from error
    schema = raw.pop("schema")
    if schema != _SCHEMA:
        raise TrainerError(f"checkpoint {checkpoint} has format {schema}, this manege reads {_SCHEMA}; update manege")
    engine.load(checkpoint)
    return TrainerState(**raw)


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
