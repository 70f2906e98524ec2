"""What each kind of step says of a row: keep it, maybe with more columns, or drop it, and why.

A step may read all its rows once before it decides on the first (to draw among them); it keeps ids in memory then, and
never rows.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from manege.curation.config import AtMost, Decontaminate, HasRef, NotEmpty, Probe, Select, Split
from manege.curation.contamination import Evaluated, repository
from manege.curation.refs import known_refs, remote_refs
from manege.curation.rows import Row, read_rows
from manege.errors import ConfigError

__all__ = ["Context", "Decide", "Dropped", "Kept", "decider", "files_of", "row_id"]


@dataclass(frozen=True, slots=True)
class Kept:
    """This row goes on."""

    row: Row
    kind: str | None = None
    """For the counts."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """The row ends here."""

    reason: str


Decide = Callable[[Row], Kept | Dropped]


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What a step may know beside its own settings."""

    id: str
    """The column of ids."""
    seed: str
    base: Path
    """What files are relative to."""
    rows: Callable[[], Iterator[Row]]
    """All rows that come in, from the first one on."""
    results: Path | None = None
    """Of a probe."""


def decider(step: Any, context: Context) -> Decide:
    """What a step does with a row. Raises ConfigError, also when it is used."""
    return _KINDS[type(step)](step, context)


def files_of(step: Any) -> Iterable[str]:
    """Whose contents a step depends on."""
    single = [getattr(step, name, None) for name in ("refs", "results", "run")]
    return [*filter(None, single), *getattr(step, "rows", [])]


def row_id(row: Row, column: str) -> str:
    """Raises ConfigError for a row without."""
    value = row.get(column)
    if not isinstance(value, str) or not value:
        raise ConfigError(f"a row has no text in {column!r}, the column of ids (`id`); it has {', '.join(row)}")
    return value


def _not_empty(step: NotEmpty, context: Context) -> Decide:
    def decide(row: Row) -> Kept | Dropped:
        value = row.get(step.column)
        is_empty = not (value.strip() if isinstance(value, str) else value)
        return Dropped(f"{step.column} is empty") if is_empty else Kept(row)

    return decide


def _has_ref(step: HasRef, context: Context) -> Decide:
    column = step.column or context.id
    if step.refs is not None:
        refs = known_refs(context.base / step.refs)
        return lambda row: Kept(row) if row.get(column) in refs else Dropped("no such branch or tag")
    assert step.remote is not None
    of_row = remote_refs(step.remote)
    return lambda row: Kept(row) if row.get(column) in of_row(row) else Dropped("no such branch or tag")


def _at_most(step: AtMost, context: Context) -> Decide:
    def decide(row: Row) -> Kept | Dropped:
        number = sum(_length(row, column) for column in step.columns)
        return Dropped(f"more than {step.max} tests") if number > step.max else Kept(row)

    return decide


def _length(row: Row, column: str) -> int:
    """Of a list, or of one that is written as JSON."""
    value = row.get(column)
    if isinstance(value, str):
        try:
            value = orjson.loads(value) if value.strip() else []
        except orjson.JSONDecodeError:
            value = None
    if not isinstance(value, list):
        raise ConfigError(f"column {column!r} of a row is no list: {str(row.get(column))[:80]!r}; see `columns`")
    return len(value)


def _decontaminate(step: Decontaminate, context: Context) -> Decide:
    repos, statements = list(step.repos), list[str]()
    for file in step.rows:
        for row in read_rows(context.base / file):
            repos += [row["repo"]] if row.get("repo") else []
            statements.append(str(row.get(step.statement) or ""))
    evaluated = Evaluated(repos, statements, ngram=step.ngram)

    def decide(row: Row) -> Kept | Dropped:
        if evaluated.has_repository(str(row.get(step.column) or "")):
            return Dropped("repository of the evaluation")
        if evaluated.has_statement(str(row.get(step.statement) or "")):
            return Dropped("statement of the evaluation")
        return Kept(row)

    return decide


def _probe(step: Probe, context: Context) -> Decide:
    assert context.results is not None
    found = {}
    for row in read_rows(context.results):
        found[row_id(row, "id")] = row["rollouts"], row["successes"]

    def decide(row: Row) -> Kept | Dropped:
        rollouts, successes = found.get(row_id(row, context.id), (0, 0))
        if not rollouts:
            return Dropped("no rollout was judged")
        columns = {"probe_rollouts": rollouts, "probe_successes": successes}
        return Kept({**row, **columns}, f"solved {successes} of {rollouts}")

    return decide


_MIXED, _UNSOLVED = "sometimes solved", "never solved"


def _select(step: Select, context: Context) -> Decide:
    ids: dict[str, list[str]] = {_MIXED: [], _UNSOLVED: []}
    for row in context.rows():
        if (skill := _skill(row)) is not None:
            ids[skill].append(row_id(row, context.id))
    drawn = {
        skill: _draw(ids[skill], number, f"{context.seed}:{skill}")
        for skill, number in ((_MIXED, step.mixed), (_UNSOLVED, step.unsolved))
    }

    def decide(row: Row) -> Kept | Dropped:
        skill = _skill(row)
        if skill is None:
            return Dropped("always solved")
        if row_id(row, context.id) not in drawn[skill]:
            return Dropped(f"{skill}, not drawn")
        return Kept(row, skill)

    return decide


def _skill(row: Row) -> str | None:
    """None: it was always solved."""
    successes = row["probe_successes"]
    if successes == row["probe_rollouts"]:
        return None
    return _MIXED if successes else _UNSOLVED


def _draw(ids: list[str], number: int | None, seed: str) -> set[str]:
    # Not in the order of the file: the same rows are drawn however they are sorted.
    return set(ids) if number is None or number >= len(ids) else set(random.Random(seed).sample(sorted(ids), number))


def _split(step: Split, context: Context) -> Decide:
    def place(row: Row) -> str:
        return row_id(row, context.id) if step.by == "task" else repository(str(row.get(step.column) or ""))

    sizes = Counter(place(row) for row in context.rows())
    heldout, wanted = set[str](), step.heldout * sizes.total()
    order = sorted(sizes)
    random.Random(f"{context.seed}:split").shuffle(order)
    for name in order:
        # A repository that overshoots more than its absence would miss is left to training.
        if sizes[name] <= 2 * wanted and len(heldout) < len(order) - 1:
            heldout.add(name)
            wanted -= sizes[name]

    def decide(row: Row) -> Kept | Dropped:
        side = "heldout" if place(row) in heldout else "train"
        return Kept({**row, "split": side}, side)

    return decide


_KINDS: Mapping[type, Callable[[Any, Context], Decide]] = {
    NotEmpty: _not_empty,
    HasRef: _has_ref,
    AtMost: _at_most,
    Decontaminate: _decontaminate,
    Probe: _probe,
    Select: _select,
    Split: _split,
}
