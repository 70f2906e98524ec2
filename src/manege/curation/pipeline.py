"""Rows through the steps of a curation, each of which leaves what it did in a folder of its own.

    FOLDER/01-not_empty/rows.jsonl.zst   the rows that went on
                        dropped.jsonl    the ids of the others, with the reason
                        step.json        its key and its counts, written last: a step that has it is done
    FOLDER/probes/KEY/results.jsonl      what a probe saw, by task
    FOLDER/curated.jsonl                 what came out, or train.jsonl and heldout.jsonl after a split

A step's key is a digest of its settings, of the files that it reads, and of the key before it. A step whose key stands
in its folder is not done again; from the first that differs on, all are. What a probe saw has a key of its own: it is
good as long as agent and row are the same, whatever steps come before.
"""

import asyncio
import hashlib
import json
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import orjson

from manege.curation.config import CurationConfig, Probe
from manege.curation.rows import Row, read_rows, write_rows
from manege.curation.steps import Context, Dropped, decider, files_of, row_id
from manege.errors import ConfigError

__all__ = ["Output", "Prober", "Report", "StepReport", "curate"]

_VERSION = 1
"""Of what steps do: a change makes all of them be done again."""

Prober = Callable[[Probe, Callable[[], Iterable[Row]], Path], Awaitable[None]]
"""Has an agent try the tasks of all rows for which results are not yet in the file, and appends what it saw."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What a step did; also its file."""

    key: str
    kind: str
    num_in: int
    num_out: int
    kept: Mapping[str, int] = field(default_factory=dict)
    """By kind, where the step tells kinds apart."""
    dropped: Mapping[str, int]
    """By reason."""
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """A file that came out."""

    path: str
    num_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A whole curation."""

    name: str
    key: str
    steps: Sequence[StepReport]
    outputs: Sequence[Output]


async def curate(
    config: CurationConfig,
    *,
    base: Path,
    folder: Path,
    probe: Prober,
    on_step: Callable[[StepReport, bool], None] = lambda report, is_new: None,
) -> Report:
    """Do what is not done yet. `base`: what files are relative to. Raises ConfigError."""
    sources = [base / name for name in config.input]
    key = await asyncio.to_thread(_digest, [_VERSION, config.id, config.seed], sources)
    rows = partial(_read, sources, config.id)
    done: list[StepReport] = []
    for number, step in enumerate(config.steps, start=1):
        place = folder / f"{number:02d}-{step.kind}"
        settings = step.model_dump(mode="json")
        key = await asyncio.to_thread(_digest, [key, settings], [base / file for file in files_of(step)])
        report, is_new = _finished(place, key), False
        if report is None:
            results = None
            if isinstance(step, Probe):
                results = await _results(step, config, base, folder, rows, probe)
            context = Context(id=config.id, seed=f"{config.seed}", base=base, rows=rows, results=results)
            report, is_new = await _do(step, context, place, key), True
        rows = partial(read_rows, place / "rows.jsonl.zst")
        done.append(report)
        on_step(report, is_new)
    outputs = await _in_thread(lambda stopped: _write(config, folder, key, lambda: stopped(rows()), done))
    return Report(name=config.name, key=key, steps=done, outputs=outputs)


async def _results(
    step: Probe, config: CurationConfig, base: Path, folder: Path, rows: Callable[[], Iterator[Row]], probe: Prober
) -> Path:
    """The file, made first if it is to be made here."""
    if step.results is not None:
        return base / step.results
    files = [base / file for file in files_of(step)]
    key = await asyncio.to_thread(_digest, [step.model_dump(mode="json"), config.seed], files)
    results = folder / "probes" / key[:16] / "results.jsonl"
    results.parent.mkdir(parents=True, exist_ok=True)
    await probe(step, rows, results)
    return results


async def _do(step: Any, context: Context, place: Path, key: str) -> StepReport:
    began_s = time.monotonic()
    kept, dropped = Counter[str](), Counter[str]()

    def going_on(rows: Iterator[Row]) -> Iterator[Row]:
        decide = decider(step, context)
        with (place / "dropped.jsonl").open("wb") as file:
            for row in rows:
                decision = decide(row)
                if isinstance(decision, Dropped):
                    dropped[decision.reason] += 1
                    line = {"id": row_id(row, context.id), "reason": decision.reason}
                    file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
                else:
                    kept[decision.kind or ""] += 1
                    yield decision.row

    place.mkdir(parents=True, exist_ok=True)
    (place / "step.json").unlink(missing_ok=True)
    await _in_thread(lambda stopped: write_rows(place / "rows.jsonl.zst", going_on(stopped(context.rows()))))
    report = StepReport(
        key=key,
        kind=step.kind,
        num_in=kept.total() + dropped.total(),
        num_out=kept.total(),
        kept={kind: kept[kind] for kind in sorted(kept, key=lambda kind: (len(kind), kind)) if kind},
        dropped=dict(dropped.most_common()),
        seconds=round(time.monotonic() - began_s, 2),
    )
    write_rows(place / "step.json", [asdict(report)])
    return report


def _write(
    config: CurationConfig, folder: Path, key: str, rows: Callable[[], Iterator[Row]], done: Sequence[StepReport]
) -> Sequence[Output]:
    """The files that come out, unless they are there."""
    kinds = ["train", "heldout"] if any(step.kind == "split" for step in config.steps) else [None]
    known = folder / "outputs.json"
    key = _digest([key, config.format], [])
    if known.exists():
        found = json.loads(known.read_text(encoding="utf-8"))
        outputs = [Output(**each) for each in found["outputs"]]
        if found["key"] == key and all(Path(each.path).exists() for each in outputs):
            return outputs
    outputs = []
    for kind in kinds:
        path = folder / f"{kind or 'curated'}.{config.format}"
        some = (row for row in rows() if kind is None or row["split"] == kind)
        outputs.append(Output(path=str(path), num_rows=write_rows(path, some)))
    write_rows(known, [{"key": key, "outputs": [asdict(each) for each in outputs]}])
    return outputs


async def _in_thread(work: Callable[[Callable[[Iterator[Row]], Iterator[Row]]], Any]) -> Any:
    """Rows are read in a thread, which ends soon after whoever waits for it is cancelled."""
    stop = threading.Event()

    def stopped(rows: Iterator[Row]) -> Iterator[Row]:
        for row in rows:
            if stop.is_set():
                raise ConfigError("stopped")
            yield row

    try:
        return await asyncio.to_thread(work, stopped)
    finally:
        stop.set()


def _finished(place: Path, key: str) -> StepReport | None:
    """None: it has to be done."""
    try:
        report = StepReport(**json.loads((place / "step.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    return report if report.key == key and (place / "rows.jsonl.zst").exists() else None


def _read(sources: Sequence[Path], column: str) -> Iterator[Row]:
    """Raises ConfigError for an id that comes twice."""
    seen = set[str]()
    for row in chain.from_iterable(map(read_rows, sources)):
        name = row_id(row, column)
        if name in seen:
            raise ConfigError(f"{column} = {name!r} comes twice; ids must be unique")
        seen.add(name)
        yield row


def _digest(values: Sequence[Any], files: Sequence[Path]) -> str:
    found = hashlib.sha256(json.dumps(values, sort_keys=True).encode())
    for path in files:
        try:
            with path.open("rb") as file:
                found.update(hashlib.file_digest(file, "sha256").digest())
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error}") from error
    return found.hexdigest()
