"""Rollouts as files and back: nothing changes, and others read them, too."""

import asyncio
import dataclasses
import itertools
import tempfile
from pathlib import Path

import duckdb
import numpy as np
import orjson
import pandas
import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from manege.errors import ConflictError, StoreError
from manege.store.base import Run
from manege.store.exports.base import ExportedRollout
from manege.store.exports.jsonl import JsonlWriter, read_jsonl
from manege.store.exports.parquet import ParquetWriter, read_parquet
from manege.store.sql import SqlStore
from manege.types import Event, FinishReason, Outcome, Rollout, RolloutSpec, RolloutState, Task, VersionSpan
from tests.calls import make_call
from tests.forests import MOVES, play

FORMS = {"jsonl": (JsonlWriter, read_jsonl), "parquet": (ParquetWriter, read_parquet)}
RUN = Run(id="study", config={"seed": 3, "name": "süß"}, created_s=0.1)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    # What JSON's writers take.
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text("ab", max_size=2), inner, max_size=2),
    max_leaves=4,
)
OBJECTS = st.dictionaries(st.text("xyz", max_size=2), JSON, max_size=2)
FLOAT32 = st.floats(width=32, allow_nan=False) | st.just(float("nan"))


@pytest.fixture(params=FORMS)
def form(request):
    return request.param


def written(path, rollouts, form, run=RUN):
    writer = FORMS[form][0](path, run)
    for exported in rollouts:
        writer.add(exported)
    writer.close()
    return path


def read(path, form):
    export = FORMS[form][1](path)
    return export.run, list(export.rollouts)


def comparable(exported):
    """With arrays as bytes: every bit counts."""
    calls = [
        {
            field.name: value.tobytes() if isinstance(value := getattr(call, field.name), np.ndarray) else value
            for field in dataclasses.fields(call)
        }
        | {"edits": list(call.edits)}
        for call in exported.calls
    ]
    kinds = [(call.prompt_ids_P.dtype, call.response_ids_R.dtype, call.logprobs_R.dtype) for call in exported.calls]
    return exported.rollout, calls, kinds, list(exported.events)


@st.composite
def rollouts(draw, name="r"):
    calls = [
        dataclasses.replace(
            call,
            parent=draw(st.none() | st.just("r0")),
            logprobs_R=np.array(
                draw(st.lists(FLOAT32, min_size=len(call.response_ids_R), max_size=len(call.response_ids_R) + 1)),
                np.float32,
            ),
            spans=[VersionSpan(first_token=0, version=draw(st.integers(0, 2**40)))] * draw(st.integers(0, 2)),
            temperature=draw(st.floats(0, 2)),
            finish_reason=draw(st.sampled_from(FinishReason)),
            request=draw(OBJECTS) | draw(st.sampled_from([{}, {"messages": []}, {"messages": [{"role": "user"}]}])),
            reply=draw(OBJECTS),
            overridden=draw(OBJECTS),
            headers=draw(st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2)),
            edits=draw(st.lists(st.text(max_size=3), max_size=2)),
            constrained=draw(st.booleans()),
            flaw=draw(st.none() | st.text(max_size=3)),
            created_s=draw(st.floats(0, 2e9)),
        )
        for call in play(name, draw(MOVES | st.just([])))
    ]
    outcome = draw(st.none() | st.sampled_from(Outcome))
    spec = RolloutSpec(
        id=name,
        run=RUN.id,
        task=Task(id=draw(st.text(max_size=3)), input=draw(OBJECTS), hidden=draw(OBJECTS)),
        group=draw(st.none() | st.just("g")),
        is_train=draw(st.booleans()),
        temperature=draw(st.none() | st.floats(0, 2)),
        max_attempts=draw(st.integers(1, 3)),
        metadata=draw(OBJECTS),
    )
    rollout = Rollout(
        spec=spec,
        state=outcome.state if outcome else RolloutState.RUNNING,
        attempt=0,
        outcome=outcome,
        reward=draw(st.none() | st.floats(allow_nan=False, allow_infinity=False)),
        message=draw(st.none() | st.text(max_size=3)),
        evidence=draw(OBJECTS),
        created_s=draw(st.floats(0, 2e9)),
        ended_s=draw(st.none() | st.floats(0, 2e9)),
        completion=draw(st.none() | st.integers(1, 2**40)),
    )
    events = [
        Event(rollout_id=name, attempt=number, event_type="note", data=draw(OBJECTS), timestamp_s=draw(st.floats(0, 9)))
        for number in range(draw(st.integers(0, 2)))
    ]
    return ExportedRollout(rollout=rollout, calls=calls, events=events)


@given(st.tuples(rollouts("a"), rollouts("b")))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_file_read_back_is_what_was_written(tmp_path, form, given_):
    run, found = read(written(tmp_path / "file", given_, form), form)
    assert run == RUN
    assert [comparable(each) for each in found] == [comparable(each) for each in given_]


async def stored(folder, rollouts, run=RUN):
    """What a new store says that it imported."""
    store = await SqlStore.open(folder / "store.db")
    try:
        for exported in rollouts:
            await store.import_rollouts(run, [exported])
        found = (await store.list_rollouts(limit=None)).rollouts
        calls = await store.calls([rollout.spec.id for rollout in found])
        return await store.get_run(run.id), [
            ExportedRollout(rollout=rollout, calls=calls[rollout.spec.id], events=await store.events(rollout.spec.id))
            for rollout in found
        ]
    finally:
        await store.close()


@given(st.tuples(rollouts("a"), rollouts("b")))
@settings(max_examples=30, deadline=None)
def test_a_store_holds_an_import_as_it_was(given_):
    first, second = (each.rollout.completion for each in given_)
    assume(first is None or first != second)
    with tempfile.TemporaryDirectory() as folder:
        run, found = asyncio.run(stored(Path(folder), given_))
    assert run == RUN
    assert [comparable(each) for each in found] == [comparable(each) for each in given_]


def ended(name, calls=(), reward=1.0):
    spec = RolloutSpec(id=name, run=RUN.id, task=Task(id="t", input={"q": 1}))
    rollout = Rollout(
        spec=spec, state=RolloutState.SUCCEEDED, attempt=0, outcome=Outcome.OK, reward=reward, created_s=0.0
    )
    return ExportedRollout(rollout=rollout, calls=calls, events=[])


def talk(name, num_calls, num_tokens=5):
    prompt, calls = [1, 2], []
    for number in range(num_calls):
        calls.append(make_call(f"{name}-{number}", prompt, [7] * num_tokens, rollout=name))
        prompt = [*prompt, *[7] * num_tokens, 9]
    return calls


def test_an_import_is_all_or_nothing_and_later_ends_come_after_it(tmp_path):
    def numbered(name, completion):
        exported = ended(name, talk(name, 2))
        return dataclasses.replace(
            exported, rollout=dataclasses.replace(exported.rollout, completion=completion, ended_s=1.0)
        )

    async def use():
        store = await SqlStore.open(tmp_path / "store.db")
        await store.import_rollouts(RUN, [numbered("a", 41)])
        with pytest.raises(ConflictError, match="'a'"):
            await store.import_rollouts(RUN, [numbered("b", 42), numbered("a", 43)])
        with pytest.raises(ConflictError, match="number 41"):
            await store.import_rollouts(RUN, [numbered("c", 41)])
        await store.create_rollouts([RolloutSpec(id="new", run=RUN.id, task=Task(id="t", input={}))])
        await store.cancel("new")
        page = await store.terminal(run=RUN.id, after=0, limit=9)
        await store.close()
        return [(rollout.spec.id, rollout.completion) for rollout in page.rollouts]

    assert asyncio.run(use()) == [("a", 41), ("new", 42)]


def test_a_run_without_a_config_has_none(tmp_path, form):
    assert read(written(tmp_path / "file", [ended("a")], form, run=None), form)[0] is None


def test_files_of_many_calls_have_row_groups_of_whole_rollouts(tmp_path):
    prompt = np.arange(2**20, dtype=np.int32)
    exported = [ended(name, [make_call(f"{name}{n}", prompt, [1], rollout=name) for n in range(5)]) for name in "abcd"]
    path = written(tmp_path / "file", exported, "parquet")
    file = pq.ParquetFile(path)
    groups = [file.read_row_group(n, ["rollout_id"])["rollout_id"].to_pylist() for n in range(file.num_row_groups)]
    assert groups == [["a"] * 5 + ["b"] * 5, ["c"] * 5 + ["d"] * 5]
    assert path.stat().st_size < prompt.nbytes * 20
    assert [comparable(each) for each in read(path, "parquet")[1]] == [comparable(each) for each in exported]


@pytest.fixture
def table(tmp_path):
    """Three rollouts, of 3, no and 2 calls."""
    exported = [ended("a", talk("a", 3)), ended("b", reward=0.0), ended("c", talk("c", 2))]
    ids = [call.prompt_ids_P.tolist() for each in exported for call in each.calls]
    return written(tmp_path / "run.parquet", exported, "parquet"), ids


def with_pandas(path):
    frame = pandas.read_parquet(path)
    called = frame[frame.call_id.notna()]
    return frame.groupby("rollout_id").call_id.count().to_dict(), [ids.tolist() for ids in called.prompt_ids]


def with_polars(path):
    frame = polars.read_parquet(path)
    counts = frame.group_by("rollout_id").agg(polars.col("call_id").count()).rows()
    return dict(counts), frame.filter(polars.col("call_id").is_not_null())["prompt_ids"].to_list()


def with_duckdb(path):
    with duckdb.connect() as connection:
        counts = connection.sql(f"SELECT rollout_id, count(call_id) FROM '{path}' GROUP BY ALL").fetchall()
        rows = connection.sql(f"SELECT prompt_ids FROM '{path}' WHERE call_id IS NOT NULL").fetchall()
    return dict(counts), [ids for (ids,) in rows]


@pytest.mark.parametrize("reader", [with_pandas, with_polars, with_duckdb])
def test_others_read_the_same_counts_and_ids(table, reader):
    path, ids = table
    assert reader(path) == ({"a": 3, "b": 0, "c": 2}, ids)


def test_columns_have_the_types_that_others_know(table):
    schema = pq.read_schema(table[0])
    assert schema.field("prompt_ids").type.value_type == pa.int32()
    assert schema.field("logprobs").type.value_type == pa.float32()
    assert [field.name for field in schema.field("spans").type.value_type] == ["first_token", "version"]
    assert orjson.loads(schema.metadata[b"manege"])["run"]["config"] == RUN.config


def test_a_damaged_or_foreign_file_is_named(tmp_path, form):
    path = written(tmp_path / "file", [ended("a", talk("a", 3)), ended("b", talk("b", 3))], form)
    whole = path.read_bytes()
    path.write_bytes(whole[: -len(whole) // 3])
    with pytest.raises(StoreError, match=str(path)):
        read(path, form)
    path.write_bytes(b'{"messages": []}\n')
    with pytest.raises(StoreError, match=str(path)):
        read(path, form)


def test_a_newer_file_is_refused(tmp_path, form):
    path = written(tmp_path / "file", [ended("a")], form)
    if form == "jsonl":
        path.write_bytes(path.read_bytes().replace(b'"version":1', b'"version":7'))
    else:
        table = pq.read_table(path)
        pq.write_table(table.replace_schema_metadata({"manege": '{"format":"manege-rollouts","version":7}'}), path)
    with pytest.raises(StoreError, match="version 7"):
        read(path, form)


def test_damage_within_a_parquet_file_is_named(tmp_path):
    path = written(tmp_path / "file", [ended("a", talk("a", 3, 99))], "parquet")
    whole = bytearray(path.read_bytes())
    whole[4 : len(whole) // 3] = bytes(len(whole) // 3 - 4)
    path.write_bytes(whole)
    with pytest.raises(StoreError, match=str(path)):
        read(path, "parquet")


def test_parquet_of_another_program_is_none_of_ours(tmp_path):
    path = tmp_path / "other.parquet"
    pandas.DataFrame({"a": [1]}).to_parquet(path)
    with pytest.raises(StoreError, match="no export of manege"):
        read(path, "parquet")


def test_every_cut_of_a_text_file_is_noticed_or_leaves_out_whole_rollouts(tmp_path):
    exported = [ended("a", talk("a", 1, 2)), ended("b")]
    path = written(tmp_path / "file", exported, "jsonl")
    whole = path.read_bytes()
    known = [comparable(each) for each in exported]
    for size in itertools.chain(range(1, len(whole), 7), range(len(whole) - 3, len(whole))):
        path.write_bytes(whole[:size])
        try:
            found = [comparable(each) for each in read(path, "jsonl")[1]]
        except StoreError:
            continue
        assert found == known[: len(found)]
