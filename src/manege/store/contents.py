"""Parts of requests that come again and again, kept once per database: messages, tool schemas, headers, the rest.

A part is known by the hash of its JSON. A call keeps the ids of its parts as one array:

    [rest, headers, num_tools, *tools, num_messages, *messages]        a number of -1: the request has no such list
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import orjson
import zstandard
from sqlalchemy import Connection, select

from manege.store.inserting import insert_new
from manege.store.tables import contents
from manege.types import JsonObject

__all__ = ["Contents", "join_parts", "read_contents", "split_parts", "with_members"]

MAX_KNOWN = 16384
"""Hashes that are remembered: the messages and tools of the agents that run, at some 150 bytes each."""
_LISTS = ("tools", "messages")
_PER_QUERY = 500


def split_parts(request: JsonObject, headers: Mapping[str, str]) -> tuple[Sequence[bytes], Sequence[int]]:
    """The JSON of each part, and how many belong to each list (-1: no such list)."""
    lists = [request[name] if isinstance(request.get(name), list) else None for name in _LISTS]
    inside = {name for name, found in zip(_LISTS, lists, strict=True) if found is not None}
    rest = {name: value for name, value in request.items() if name not in inside}
    parts = [orjson.dumps(part) for part in (rest, headers, *(item for found in lists for item in found or ()))]
    return parts, [-1 if found is None else len(found) for found in lists]


def join_parts(ids: bytes, values: Mapping[int, bytes]) -> tuple[bytes, bytes]:
    """The JSON of the request and of the headers of an array of ids."""
    rest, headers, *more = np.frombuffer(ids, "<i8").tolist()
    lists, position = [], 0
    for name in _LISTS:
        number, position = more[position], position + 1
        if number >= 0:
            items = b",".join([values[part] for part in more[position : position + number]])
            lists.append(b'"%s":[%s]' % (name.encode(), items))
            position += number
    return with_members(values[rest], *lists), values[headers]


def with_members(json: bytes, *members: bytes) -> bytes:
    """The JSON of an object with more members, each `"name":value`."""
    inside = json[1:-1]
    return b"{%s}" % b",".join([inside, *members] if inside else members)


def part_ids(ids: bytes) -> Iterable[int]:
    """The parts of an array of ids."""
    rest, headers, *more = np.frombuffer(ids, "<i8").tolist()
    yield from (rest, headers)
    position = 0
    for _ in _LISTS:
        number, position = more[position], position + 1
        yield from more[position : position + max(number, 0)]
        position += max(number, 0)


def read_contents(connection: Connection, arrays: Iterable[bytes]) -> dict[int, bytes]:
    """The JSON of all parts of some arrays of ids."""
    wanted, unpack = sorted({part for ids in arrays for part in part_ids(ids)}), zstandard.ZstdDecompressor()
    found: dict[int, bytes] = {}
    for first in range(0, len(wanted), _PER_QUERY):
        statement = select(contents.c.id, contents.c.data).where(contents.c.id.in_(wanted[first : first + _PER_QUERY]))
        found |= {row.id: unpack.decompress(row.data) for row in connection.execute(statement)}
    return found


class Contents:
    """Keeps parts; remembers those that are stored. Lives in the writer's thread."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, int] = OrderedDict()
        self._pack = zstandard.ZstdCompressor()

    def forget(self) -> None:
        """What was stored may be gone."""
        self._known.clear()

    def put(self, connection: Connection, parts: Sequence[bytes]) -> Sequence[int]:
        """The ids of parts, those that are new stored first."""
        hashes = [hashlib.blake2b(part, digest_size=16).digest() for part in parts]
        new = {key: part for key, part in zip(hashes, parts, strict=True) if key not in self._known}
        ids = {key: self._known[key] for key in hashes if key not in new} | self._store(connection, new)
        for key in ids:
            self._known[key] = ids[key]
            self._known.move_to_end(key)
        while len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        return [ids[key] for key in hashes]

    def _store(self, connection: Connection, new: Mapping[bytes, bytes]) -> dict[bytes, int]:
        keys, ids = list(new), dict[bytes, int]()
        insert = insert_new(connection, contents, "hash")
        for first in range(0, len(keys), _PER_QUERY):
            some = keys[first : first + _PER_QUERY]
            connection.execute(insert, [{"hash": key, "data": self._pack.compress(new[key])} for key in some])
            statement = select(contents.c.id, contents.c.hash).where(contents.c.hash.in_(some))
            ids |= {bytes(row.hash): row.id for row in connection.execute(statement)}
        return ids
