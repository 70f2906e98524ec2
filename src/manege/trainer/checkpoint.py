"""Checkpoints: a whole model folder, the optimiser beside it, and where the trainer was.

    checkpoints/latest              one line: the name of the folder to go on from
    checkpoints/step-000010/        what `transformers` and vLLM load, optimizer.pt, trainer.json

In this order: the folder is written under a hidden name, all of it is on the disk, it gets its own name, `latest` names
it, older ones are removed. So what `latest` names is whole, and stays until it names another one.
"""

import itertools
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from manege.errors import TrainerError
from manege.trainer.durable import sync, write_text
from manege.trainer.engines.base import TrainEngine
from manege.types import PolicyVersion

__all__ = [
    "AskedGroup",
    "TrainerState",
    "latest_checkpoint",
    "load_checkpoint",
    "remove_unfinished",
    "save_checkpoint",
]

_SCHEMA = 2
_STATE_FILE = "trainer.json"
_POINTER = "latest"


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedGroup:
    """A group whose rollouts were asked for and that no step has used yet."""

    index: int
    """Position in the sequence of tasks; its task and its id follow from it."""
    policy_version: PolicyVersion
    """In service when it was asked for."""
    oldest: int | None = None
    """Of its oldest token, as far as is known; None: it may not have begun."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """Where the loop was after a step."""

    nonce: str
    """Tells this run from all others; the ids of its groups are made from it."""
    config_hash: str
    """RunConfig.digest of the config that the step was made with."""
    step: int
    """Updates done (skipped ones included)."""
    tasks_taken: int
    """Position in the endless sequence of shuffled epochs."""
    asked: Sequence[AskedGroup]
    """Carried over to the next step; `sync` leaves none."""
    policy_version: PolicyVersion
    """In service after the step."""
    train_s: float
    """Seconds of training so far, evaluations apart."""
    successes: Sequence[float]
    """Success rates of the last steps, for early stopping."""
    evaluating: Sequence[int] = field(default_factory=list)
    """Steps whose evaluation beside training is under way."""


def save_checkpoint(folder: Path, engine: TrainEngine, state: TrainerState, *, num_kept: int) -> Path:
    """Write a checkpoint, point `latest` to it and keep this and the `num_kept` - 1 before it. Raises TrainerError."""
    target = _free_name(folder, state.step)
    partial = folder / f".{target.name}.partial"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        engine.save(partial)
        (partial / _STATE_FILE).write_text(json.dumps({"schema": _SCHEMA, **asdict(state)}), encoding="utf-8")
        for path in [*partial.rglob("*"), partial]:
            sync(path)
        os.replace(partial, target)
        sync(folder)
        write_text(folder / _POINTER, f"{target.name}\n")
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise TrainerError(
            f"checkpoint {target} cannot be written: {error}; free some space, then go on with --resume"
        ) from error
    older = [path for path in _whole(folder) if path.name < target.name]
    kept = {target, *older[::-1][: num_kept - 1]}
    for path in _whole(folder):
        if path not in kept:
            _remove(path)
    return target


def latest_checkpoint(folder: Path) -> Path | None:
    """The one that `latest` names, or else the newest; None: there is none."""
    pointer, whole = folder / _POINTER, _whole(folder)
    if pointer.is_file() and (named := folder / pointer.read_text(encoding="utf-8").strip()) in whole:
        return named
    return whole[-1] if whole else None


def load_checkpoint(checkpoint: Path, engine: TrainEngine) -> TrainerState:
    """Restore the engine. Raises TrainerError for a checkpoint of another format."""
    try:
        raw = json.loads((checkpoint / _STATE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TrainerError(f"checkpoint {checkpoint} cannot be read: {error}") from error
    schema = raw.pop("schema")
    if schema != _SCHEMA:
        raise TrainerError(
            f"checkpoint {checkpoint} has format {schema}, this manege reads {_SCHEMA}; go on with the manege that "
            "wrote it, or start a new run from it with model.path"
        )
    engine.load(checkpoint)
    return TrainerState(**{**raw, "asked": [AskedGroup(**group) for group in raw["asked"]]})


def remove_unfinished(folder: Path) -> None:
    """What a trainer that was killed left half written."""
    for path in folder.glob(".*"):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _whole(folder: Path) -> Sequence[Path]:
    """From the oldest to the newest."""
    return sorted(path.parent for path in folder.glob(f"step-*/{_STATE_FILE}"))


def _remove(path: Path) -> None:
    """Under a hidden name, since it is not whole for long."""
    hidden = path.with_name(f".{path.name}.old")
    os.replace(path, hidden)
    shutil.rmtree(hidden)


def _free_name(folder: Path, step: int) -> Path:
    """`step-000010`, or `step-000010-2` beside one that a run which went back has left."""
    endings = itertools.chain([""], (f"-{number}" for number in itertools.count(2)))
    return next(path for ending in endings if not (path := folder / f"step-{step:06d}{ending}").exists())
