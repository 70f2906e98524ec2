"""Serve a corpus: build its index unless it is cached, say where it is served, end at SIGTERM or Ctrl-C."""

import argparse
import asyncio
import os
import signal
import sys
from pathlib import Path

from manege import logs
from manege.errors import ConfigError, ManegeError
from manege.gateway.server import LOOPBACK, Server
from manege.recipes.search.retrieval.collection import Collection, Kind, open_collection
from manege.recipes.search.retrieval.encoder import MINILM
from manege.recipes.search.retrieval.service import search_app


def main() -> int:
    """The exit code."""
    arguments = _parser().parse_args()
    logs.setup(verbose=True)
    try:
        if arguments.host not in LOOPBACK and not arguments.expose:
            raise ConfigError(
                f"--host {arguments.host}: the service has no key; "
                "bind 127.0.0.1, or say --expose where all who reach it may read the corpus"
            )
        collection = open_collection(arguments.corpus, arguments.kind, arguments.index_folder, arguments.encoder)
        asyncio.run(_serve(collection, arguments.host, arguments.port))
    except ManegeError as error:
        print(f"retrieval: {error}", file=sys.stderr)
        return 2
    return 0


async def _serve(collection: Collection, host: str, port: int) -> None:
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    async with Server(search_app(collection), host=host, port=port, has_explicit_key=True) as server:
        what = f"{len(collection.passages)} passages, {collection.kind}"
        print(f"serving {collection.name} ({what}) at {server.url}", flush=True)
        await ended.wait()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m manege.recipes.search.retrieval", description=__doc__)
    parser.add_argument(
        "--corpus", type=Path, required=True, help="a file of JSON lines or Parquet, or a folder of them"
    )
    parser.add_argument("--kind", type=Kind, choices=list(Kind), default=Kind.BM25, help="default: %(default)s")
    parser.add_argument(
        "--index-folder", type=Path, default=_cache(), help="where indexes are kept (default: %(default)s)"
    )
    parser.add_argument(
        "--encoder", default=MINILM, help="dense: a sentence-transformers folder (default: %(default)s, of a package)"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to bind (default: %(default)s)")
    parser.add_argument("--port", type=int, default=0, help="port to bind, 0: any (default: %(default)s)")
    parser.add_argument("--expose", action="store_true", help="accept an address that can be reached from outside")
    return parser


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("MANEGE_CACHE") or Path(base, "manege"), "retrieval")


if __name__ == "__main__":
    sys.exit(main())
