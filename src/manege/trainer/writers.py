"""Who else gets the rows of metrics.jsonl: event files for TensorBoard, a run at Weights & Biases.

In: rows as the trainer makes them, and after a resume all that came before. Out: numbers under flat names, such as
`step/loss` or `evaluation/T=1/success_rate`. No step is there twice: what is on this machine only, as TensorBoard's
files, is made anew from those rows. Weights & Biases takes nothing back, so what it has got is noted and not sent
again; of a step that a resumed run had to make again it keeps what came first.

Rows are written in a thread, since a writer may wait for a network. One that fails is dropped with a warning: a run
does not end because somebody could not watch it.
"""

import importlib.util
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

from manege.config import RunConfig
from manege.errors import ConfigError
from manege.logs import get_logger, kv
from manege.trainer.loop import Observer

__all__ = ["TensorBoardWriter", "Tracked", "WandbWriter", "Writer", "flat", "tracked"]

_CLOSE_S = 60
"""How long the end of a run waits for what was not written yet."""
_NOTES = "rows.txt"
_NOT_CURVES = ("kind", "step", "time_s", "temperature")

_log = get_logger("trainer")


class Writer(Protocol):
    """Takes rows in its own way; called from one thread. May raise anything."""

    def write(self, row: Mapping[str, Any]) -> None:
        """A step or an evaluation."""
        ...

    def close(self) -> None:
        """After the last row."""
        ...


@contextmanager
def tracked(observer: Observer, config: RunConfig) -> Iterator[Observer]:
    """`observer` with the writers that the run file names. Raises ConfigError where one cannot begin."""
    for key, package in (("tensorboard", "tensorboard"), ("wandb", "wandb")):
        if (value := getattr(config.tracking, key)) and importlib.util.find_spec(package) is None:
            raise ConfigError(f'tracking.{key} = {value!r} needs the package {package}: pip install "manege[tracking]"')
    writers: dict[str, Writer] = {}
    if config.tracking.tensorboard:
        writers["tensorboard"] = TensorBoardWriter(config.run_folder / "tensorboard")
    if config.tracking.wandb is not None:
        writers["wandb"] = WandbWriter(config.tracking.wandb, config)
    observing = Tracked(observer, writers)
    try:
        yield observing
    finally:
        observing.close()


class Tracked:
    """An Observer that also hands every row to writers."""

    def __init__(self, observer: Observer, writers: Mapping[str, Writer]) -> None:
        """`writers`: by the names that warnings call them."""
        self._observer = observer
        self._threads = [_WriterThread(name, writer) for name, writer in writers.items()]

    def on_row(self, row: Mapping[str, Any]) -> None:
        """See Observer."""
        self._observer.on_row(row)
        for thread in self._threads:
            thread.rows.put(row)

    def on_phase(self, phase: str) -> None:
        """See Observer."""
        self._observer.on_phase(phase)

    def close(self) -> None:
        """Waits a while for what is not written yet."""
        for thread in self._threads:
            thread.rows.put(None)
        for thread in self._threads:
            thread.join(_CLOSE_S)
            if thread.is_alive():
                _log.warning(kv("a writer of metrics has not ended and is left alone", writer=thread.name))


class _WriterThread(threading.Thread):
    def __init__(self, name: str, writer: Writer) -> None:
        super().__init__(name=name, daemon=True)  # a writer that hangs keeps no process alive
        self.rows: SimpleQueue[Mapping[str, Any] | None] = SimpleQueue()
        self._writer = writer
        self.start()

    def run(self) -> None:
        fine = True
        while (row := self.rows.get()) is not None:
            fine = fine and self._tried(lambda row=row: self._writer.write(row))
        if fine:
            self._tried(self._writer.close)

    def _tried(self, action: Callable[[], None]) -> bool:
        try:
            action()
        except Exception as error:  # of foreign code, and none of it is worth a training
            _log.warning(kv("a writer of metrics failed and gets no more rows", writer=self.name, reason=repr(error)))
            return False
        return True


class TensorBoardWriter:
    """Event files that hold the rows which it is shown, and none of an earlier life of the run."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        for path in folder.glob("events.out.tfevents.*"):
            path.unlink()
        # A TensorBoard that is open meanwhile is told to forget what it has read.
        self._writer = SummaryWriter(str(folder), purge_step=0)

    def write(self, row: Mapping[str, Any]) -> None:
        """See Writer."""
        for name, value in flat(row).items():
            self._writer.add_scalar(name, value, row["step"], walltime=row["time_s"])
        self._writer.flush()

    def close(self) -> None:
        """See Writer."""
        self._writer.close()


class WandbWriter:
    """A run at Weights & Biases; all lives of ours are one of theirs."""

    def __init__(self, project: str, config: RunConfig) -> None:
        """Raises ConfigError when it cannot begin: no key, no network."""
        import wandb

        folder = config.run_folder / "wandb"
        folder.mkdir(parents=True, exist_ok=True)
        self._sent = _sent_rows(folder)
        # What describes the training; environments and commands may hold what is nobody else's business.
        shown = config.model_dump(mode="json", include={"seed", "model", "sampling", "credit", "train", "backend"})
        try:
            self._run = wandb.init(
                project=project,
                id=_run_id(folder),
                name=config.name,
                dir=str(config.run_folder),
                config=shown,
                resume="allow",
                settings=wandb.Settings(silent=True, console="off", disable_git=True, disable_code=True),
            )
        except wandb.Error as error:
            raise ConfigError(
                f"tracking.wandb = {project!r}: Weights & Biases does not begin a run: {error}. Log in with "
                "`wandb login`, or set WANDB_MODE=offline and send the run later with `wandb sync`"
            ) from error
        # Its own steps only count up; evaluations beside training come later than their step.
        self._run.define_metric("*", step_metric="step")
        self._notes = Path(self._run.settings.sync_dir, _NOTES)

    def write(self, row: Mapping[str, Any]) -> None:
        """See Writer."""
        name = f"{row['kind']} {row['step']} {row.get('temperature', '')}".rstrip()
        if name in self._sent:
            return
        self._run.log({"step": row["step"], **flat(row)})
        self._sent.add(name)
        if not self._run.disabled:
            with self._notes.open("a", encoding="utf-8") as file:
                file.write(f"{name}\n")

    def close(self) -> None:
        """See Writer."""
        self._run.finish()


def _run_id(folder: Path) -> str:
    """Drawn at the first start."""
    path = folder / "id.txt"
    if not path.exists():
        path.write_text(secrets.token_hex(4), encoding="utf-8")
    return path.read_text(encoding="utf-8")


def _sent_rows(folder: Path) -> set[str]:
    """By the notes of earlier lives. Those that nobody has sent yet are removed, since they are told again: one that
    was killed has lost its last minutes."""
    for life in folder.glob("offline-run-*"):
        if not any(life.glob("*.synced")):
            shutil.rmtree(life)
    return {line for path in folder.glob(f"*/{_NOTES}") for line in path.read_text(encoding="utf-8").splitlines()}


def flat(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a row; those of inner objects under the path to them."""
    prefix = row["kind"] if row["kind"] == "step" else f"{row['kind']}/T={row['temperature']:g}"
    return dict(_numbers({key: value for key, value in row.items() if key not in _NOT_CURVES}, prefix))


def _numbers(value: Any, name: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _numbers(inner, f"{name}/{key}")
    elif isinstance(value, int | float):
        yield name, float(value)
