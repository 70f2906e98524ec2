"""Corpora in every form that is read, and what is said of those that cannot be."""

import gzip
import json

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from manege.errors import ConfigError
from manege.recipes.search.retrieval.corpus import Passage, corpus_name, read_passages
from manege.recipes.search.retrieval.passages import Passages, write_passages


def lines(*records):
    return "".join(json.dumps(record) + "\n" for record in records).encode()


RECORDS = [{"id": "a", "title": "Łódź", "text": "a city\nin Poland", "url": "x"}, {"text": "no title"}]
WANTED = [Passage(id="a", title="Łódź", text="a city\nin Poland"), Passage(id="1", title="", text="no title")]
PACK = {
    "c.jsonl": bytes,
    "c.ndjson": bytes,
    "c.jsonl.gz": gzip.compress,
    "c.jsonl.zst": zstandard.compress,
    "two frames.jsonl.zst": lambda raw: zstandard.compress(raw[:20]) + zstandard.compress(raw[20:]),
}


@pytest.mark.parametrize("name", PACK)
def test_lines_plain_and_packed(tmp_path, name):
    (tmp_path / name).write_bytes(PACK[name](lines(*RECORDS) + b"\n"))
    assert list(read_passages(tmp_path / name)) == WANTED


def test_parquet(tmp_path):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(RECORDS), tmp_path / "c.parquet")
    assert list(read_passages(tmp_path / "c.parquet")) == WANTED


def test_a_folder_is_one_corpus_in_the_order_of_names(tmp_path):
    (tmp_path / "part-1.jsonl").write_bytes(lines(RECORDS[1]))
    (tmp_path / "part-0.jsonl.gz").write_bytes(gzip.compress(lines(RECORDS[0])))
    (tmp_path / "README.md").write_text("not a corpus")
    assert list(read_passages(tmp_path)) == WANTED
    assert corpus_name(tmp_path) == tmp_path.name
    assert corpus_name(tmp_path / "part-0.jsonl.gz") == "part-0"


@pytest.mark.parametrize(
    ("record", "title", "text"),
    [
        ({"contents": '"Bram Stoker"\nwrote\nDracula'}, "Bram Stoker", "wrote\nDracula"),
        ({"contents": "only text"}, "", "only text"),
        ({"title": "T", "contents": "T\nrest"}, "T", "rest"),
        ({"title": "T", "contents": "other\nrest"}, "T", "other\nrest"),
        ({"title": None, "text": "x"}, "", "x"),
    ],
)
def test_titles_and_contents(tmp_path, record, title, text):
    (tmp_path / "c.jsonl").write_bytes(lines(record))
    (passage,) = read_passages(tmp_path / "c.jsonl")
    assert (passage.title, passage.text) == (title, text)


def test_ids_of_other_kinds_and_names(tmp_path):
    (tmp_path / "c.jsonl").write_bytes(lines({"id": 7, "text": ""}, {"_id": "b", "text": ""}))
    assert [passage.id for passage in read_passages(tmp_path / "c.jsonl")] == ["7", "b"]


GOOD = lines(RECORDS[0])


@pytest.mark.parametrize(
    ("name", "raw", "said"),
    [
        ("c.jsonl", GOOD + b'{"text": ', "c.jsonl:2 is not valid JSON"),
        ("c.jsonl", GOOD + b"[1]\n", r"c.jsonl:2 is \[1\]"),
        ("c.jsonl", b'\n{"title": "x", "body": "y"}\n', "c.jsonl:2 has neither text nor contents, but title, body"),
        ("c.jsonl", b'{"text": 3}', "c.jsonl:1: text is 3"),
        ("c.jsonl", b'{"text": "\xff"}', "c.jsonl:1 is not valid JSON"),
        ("c.jsonl.gz", gzip.compress(GOOD)[:-9], "c.jsonl.gz cannot be read after line"),
        ("c.jsonl.gz", GOOD, "c.jsonl.gz cannot be read after line 0"),
        ("c.jsonl.zst", zstandard.compress(GOOD)[:-1], "c.jsonl.zst cannot be read after line"),
        ("c.parquet", GOOD, "c.parquet cannot be read after row 0"),
        ("c.csv", GOOD, "c.csv is of no known kind"),
    ],
)
def test_what_cannot_be_read_is_named_by_file_and_line(tmp_path, name, raw, said):
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(ConfigError, match=said):
        list(read_passages(tmp_path / name))


def test_a_corpus_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        list(read_passages(tmp_path / "c.jsonl"))
    with pytest.raises(ConfigError, match="has no file that ends in"):
        list(read_passages(tmp_path))


def test_passages_come_back_from_disk_as_they_were(tmp_path):
    num = 2**16 + 3
    many = [Passage(id=str(number), title="é" * (number % 3), text=f"{number}\n") for number in range(num)]
    assert write_passages(iter(many), tmp_path) == num
    stored = Passages(tmp_path)
    assert len(stored) == num
    assert [stored[number] for number in (0, 2**16 - 2, 2**16 - 1, 2**16, num - 1)] == [
        many[number] for number in (0, 2**16 - 2, 2**16 - 1, 2**16, num - 1)
    ]
    assert list(stored) == many
