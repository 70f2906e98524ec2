"""The search service as a process of its own, asked over a real socket."""

import gzip
import json
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import pytest

PASSAGES = {
    "Dracula": "A novel of 1897 by Bram Stoker.",
    "Ada Lovelace": "She wrote the first program for an engine that was never built.",
    "Oslo": "The capital of Norway lies on a fjord.",
    "Vlad": "The count in the novel by Stoker was named after him.",
}
SERVING = re.compile(r"serving (\S+) \((\d+) passages, (\w+)\) at (http://127\.0\.0\.1:\d+)\n")


def write_corpus(path, passages):
    records = [{"id": f"id-{title}", "contents": f"{title}\n{text}"} for title, text in passages.items()]
    path.write_bytes(gzip.compress("".join(json.dumps(record) + "\n" for record in records).encode()))
    return path


def start(corpus, folder, *arguments):
    command = [sys.executable, "-m", "manege.recipes.search.retrieval", "--corpus", corpus, "--index-folder", folder]
    return subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def end(process):
    """What it wrote to stderr."""
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 0, err
    return err


@contextmanager
def service(corpus, folder, *arguments):
    process = start(corpus, folder, *arguments)
    line = process.stdout.readline()
    found = SERVING.fullmatch(line)
    assert found, line + process.communicate(timeout=30)[1]
    with httpx.Client(base_url=found[4], timeout=30) as client:
        yield client
    assert "Traceback" not in end(process)


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    folder = tmp_path_factory.mktemp("retrieval")
    with service(write_corpus(folder / "small.jsonl.gz", PASSAGES), folder / "indexes") as client:
        yield client


def ask(client, body):
    answer = client.post("/search", json=body)
    return answer.status_code, answer.json()


def test_the_health_check_names_what_is_served(client):
    health = client.get("/healthz").json()
    assert re.fullmatch(r"[0-9a-f]{16}", health.pop("fingerprint"))
    assert health == {"status": "ok", "corpus": "small", "num_passages": 4, "kind": "bm25"}


def test_a_batch_is_answered_in_its_order_with_the_best_first(client):
    status, body = ask(client, {"queries": ["Stoker's novels of 1897", "", "unheard", "fjord"], "top_k": 2})
    assert status == 200
    first, blank, unheard, last = body["results"]
    assert [found["title"] for found in first] == ["Dracula", "Vlad"]
    assert first[0]["score"] > first[1]["score"] > 0
    assert (blank, unheard) == ([], [])
    score = last[0].pop("score")
    assert last == [{"id": "id-Oslo", "title": "Oslo", "text": PASSAGES["Oslo"]}]
    assert score > 0


def test_without_top_k_it_is_three(client):
    assert len(ask(client, {"queries": ["novel engine fjord Vlad"]})[1]["results"][0]) == 3


@pytest.mark.parametrize(
    ("content", "status", "said"),
    [
        ('{"queries": [', 400, "the body is not valid JSON"),
        ("[]", 400, "the body is a JSON list; send an object"),
        ("{}", 422, "queries is None; send a list of 1 to 512 strings"),
        ('{"queries": "who"}', 422, "queries is 'who'; send a list"),
        ('{"queries": []}', 422, "queries is 0 long; send a list"),
        ('{"queries": ["a", 3]}', 422, "queries[1] is 3; send a string"),
        (json.dumps({"queries": ["a"] * 513}), 422, "queries is 513 long"),
        (json.dumps({"queries": ["a" * 4001]}), 422, "queries[0] has 4001 characters; send at most 4000"),
        ('{"queries": ["a"], "top_k": 0}', 422, "top_k is 0; send a number from 1 to 100"),
        ('{"queries": ["a"], "top_k": 101}', 422, "top_k is 101"),
        ('{"queries": ["a"], "top_k": true}', 422, "top_k is True"),
        ('{"queries": ["a"], "topk": 3}', 422, "topk: unknown; send queries and top_k"),
    ],
)
def test_a_bad_body_is_told_what_to_send(client, content, status, said):
    answer = client.post("/search", content=content)
    message = answer.json()["error"]["message"]
    assert (answer.status_code, said in message, "\n" in message) == (status, True, False), message


def test_another_path_is_404_and_another_method_405(client):
    assert client.get("/").status_code == 404
    assert client.get("/search").status_code == 405


def test_many_clients_get_each_their_own_answers(client):
    def one(number):
        wanted = [list(PASSAGES)[n % 4] for n in range(number, number + number % 20 + 1)]
        body = {"queries": [PASSAGES[title] for title in wanted], "top_k": 1}
        return [ranking[0]["title"] for ranking in ask(client, body)[1]["results"]] == wanted

    with ThreadPoolExecutor(16) as threads:
        assert all(threads.map(one, range(200)))


def test_processes_that_start_together_build_once_and_a_later_one_not_at_all(tmp_path):
    corpus = write_corpus(tmp_path / "small.jsonl.gz", PASSAGES)
    processes = [start(corpus, tmp_path / "indexes") for _ in range(3)]
    lines = [process.stdout.readline() for process in processes]
    assert all(map(SERVING.fullmatch, lines)), lines
    assert sum(end(process).count("building") for process in processes) == 1
    with service(corpus, tmp_path / "indexes") as client:
        before = client.get("/healthz").json()["fingerprint"]
    write_corpus(corpus, PASSAGES | {"Bergen": "Another town on a fjord."})
    with service(corpus, tmp_path / "indexes") as client:
        assert client.get("/healthz").json()["fingerprint"] != before
        assert len(ask(client, {"queries": ["fjord"]})[1]["results"][0]) == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--host", "0.0.0.0"], "--host 0.0.0.0: the service has no key"),
        (["--kind", "dense", "--encoder", "/none"], "encoder /none: /none/modules.json does not exist"),
    ],
)
def test_what_cannot_be_served_is_one_line_and_exit_2(tmp_path, arguments, said):
    process = start(write_corpus(tmp_path / "c.jsonl.gz", PASSAGES), tmp_path / "indexes", *arguments)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err.count("\n")) == (2, "", 1)
    assert said in err


def test_an_empty_corpus_is_told_so(tmp_path):
    process = start(write_corpus(tmp_path / "c.jsonl.gz", {}), tmp_path / "indexes")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert err.endswith("c.jsonl.gz has no passages\n")


def test_dense_search_finds_what_is_said_in_other_words(tmp_path):
    corpus = write_corpus(tmp_path / "small.jsonl.gz", PASSAGES)
    with service(corpus, tmp_path / "indexes", "--kind", "dense") as client:
        assert client.get("/healthz").json()["kind"] == "dense"
        _, body = ask(client, {"queries": ["Scandinavian seat of government", " ", "early coder"], "top_k": 1})
    titles = [[found["title"] for found in ranking] for ranking in body["results"]]
    assert titles == [["Oslo"], [], ["Ada Lovelace"]]
