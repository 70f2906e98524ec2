"""The search service with a large corpus: what building and serving cost, and how long a search takes.

    python benchmarks/retrieval.py [--passages 1000000] [--kind bm25] [--folder build/retrieval]

The corpus is made here, with word statistics like those of English prose: real stop words in front, then a million
made-up words, drawn by the Zipf-Mandelbrot law; 60 to 100 words a passage. A query is six words of a passage
of the corpus, stop words among them. Everything is measured from outside, on the real process: build and second start
until it says that it serves, its memory from /proc (anonymous: what it holds itself; file: pages of the index that the
system may drop at any time), searches over HTTP. CPU time is told beside the clock's, which others on the machine
lengthen.
"""

import argparse
import os
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import orjson
from rich.console import Console
from rich.table import Table

VOCABULARY = 1_000_000
COMMON = """
the of and in to a is was for that on as with by it his at from he be this which an are were had or not but have
her they she their one all has who been will would more there its when no what if so up out into than them two
first new time may some any these only other made over can such most after years about year during world between
"""
SYLLABLES = [c + v + e for c in "bcdfghklmnprstvw" for v in "aeiou" for e in ("", "n", "r", "s", "l", "t")]


def vocabulary(rng):
    """Words by rank; frequent ones are shorter, as they are in any language."""
    words = dict.fromkeys(COMMON.split())
    for num, last in ((2, 2_000), (3, 200_000), (4, VOCABULARY)):
        while len(words) < last:
            words.update(dict.fromkeys(map("".join, rng.choice(SYLLABLES, (last - len(words), num)).tolist())))
    return np.array(list(words), dtype=object)


def generate(path, num_passages):
    """Write the corpus; the same one for the same number."""
    rng = np.random.default_rng(0)
    words = vocabulary(rng)
    shares = np.cumsum(1 / (np.arange(1, VOCABULARY + 1) + 2.7) ** 1.07)
    with path.with_suffix(".unfinished").open("wb") as file:
        for start in range(0, num_passages, 10_000):
            lengths = rng.integers(60, 101, min(10_000, num_passages - start))
            ranks = np.searchsorted(shares, rng.random(lengths.sum()) * shares[-1])
            for number, ids in enumerate(np.split(ranks, np.cumsum(lengths)[:-1]), start):
                title, text = " ".join(words[ids[-2:]]), " ".join(words[ids])
                file.write(orjson.dumps({"id": str(number), "title": title, "text": text}) + b"\n")
    path.with_suffix(".unfinished").rename(path)


class Watch:
    """Of a process: peaks of its memory, looked at ten times a second, and its CPU time."""

    def __init__(self, pid):
        self.total_mib = self.anonymous_mib = 0
        self._pid, self._ended = pid, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def now(self):
        """(all, anonymous) in MiB."""
        text = Path(f"/proc/{self._pid}/status").read_text()
        return tuple(int(re.search(rf"{key}:\s+(\d+)", text)[1]) // 1024 for key in ("VmRSS", "RssAnon"))

    def cpu_s(self):
        fields = Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def end(self):
        self._ended.set()
        self._thread.join()

    def _watch(self):
        while not self._ended.wait(0.1):
            total_mib, anonymous_mib = self.now()
            self.total_mib = max(self.total_mib, total_mib)
            self.anonymous_mib = max(self.anonymous_mib, anonymous_mib)


@contextmanager
def serving(corpus, kind, folder):
    """Address, seconds until it served, watch."""
    command = [sys.executable, "-m", "manege.recipes.search.retrieval", "--corpus", corpus, "--kind", kind]
    started = time.perf_counter()
    process = subprocess.Popen([*command, "--index-folder", folder], stdout=subprocess.PIPE, text=True)
    watch = Watch(process.pid)
    try:
        url = process.stdout.readline().split()[-1]
        yield url, time.perf_counter() - started, watch
    finally:
        watch.end()
        process.terminate()
        process.wait(10)


def searches(url, queries, batch, num_clients):
    """Milliseconds of each request."""

    def ask(client, part):
        started = time.perf_counter()
        client.post(f"{url}/search", json={"queries": part, "top_k": 3}, timeout=120).raise_for_status()
        return (time.perf_counter() - started) * 1000

    parts = [queries[n : n + batch] for n in range(0, len(queries), batch)]
    with httpx.Client() as client, ThreadPoolExecutor(num_clients) as threads:
        return list(threads.map(lambda part: ask(client, part), parts))


def sampled_queries(corpus, num):
    """Each of six words of one of the first passages."""
    rng = np.random.default_rng(1)
    with corpus.open("rb") as file:
        texts = [orjson.loads(next(file))["text"].split() for _ in range(num)]
    return [" ".join(rng.choice(text, 6, replace=False)) for text in texts]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--passages", type=int, default=1_000_000)
    parser.add_argument("--kind", default="bm25", choices=["bm25", "dense"])
    parser.add_argument("--folder", type=Path, default=Path("build/retrieval"))
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    corpus = arguments.folder / f"passages-{arguments.passages}.jsonl"
    if not corpus.exists():
        generate(corpus, arguments.passages)
    indexes = arguments.folder / f"index-{time.time_ns()}"
    table = Table("what", "value", title=f"{arguments.passages:,} passages, {arguments.kind}", title_justify="left")
    with serving(corpus, arguments.kind, indexes) as (_, seconds, watch):
        table.add_row("build", f"{seconds:.0f} s, {watch.cpu_s():.0f} s of CPU")
        table.add_row("peak memory of the build", f"{watch.total_mib:,} MiB, {watch.anonymous_mib:,} anonymous")
    files = sum(path.stat().st_size for path in indexes.rglob("*") if path.is_file())
    table.add_row("corpus, index with its passages", f"{corpus.stat().st_size / 2**20:,.0f}, {files / 2**20:,.0f} MiB")
    queries = sampled_queries(corpus, min(640, arguments.passages))
    with serving(corpus, arguments.kind, indexes) as (url, seconds, watch):
        table.add_row("second start", f"{seconds:.1f} s, {watch.cpu_s():.1f} s of CPU")
        table.add_row("memory before a search", "{:,} MiB, {:,} anonymous".format(*watch.now()))
        searches(url, queries, 32, 1)
        for batch, num_clients in ((1, 1), (1, 8), (32, 1), (32, 8)):
            before_s = watch.cpu_s()
            times = searches(url, queries, batch, num_clients)
            cpu_ms = (watch.cpu_s() - before_s) * 1000 / len(queries)
            p50, p99 = np.percentile(times, [50, 99])
            table.add_row(
                f"request of {batch}, {num_clients} at once",
                f"p50 {p50:,.0f} ms, p99 {p99:,.0f} ms; CPU {cpu_ms:.1f} ms a query",
            )
        table.add_row("peak memory of serving", f"{watch.total_mib:,} MiB, {watch.anonymous_mib:,} anonymous")
    Console().print(table)


if __name__ == "__main__":
    main()
