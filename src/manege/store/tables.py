"""The tables of the newest schema; `migrations/` makes them of older ones.

A rollout's `spec`, `evidence` and other nested values are JSON; what the database filters or sorts by has a column of
its own. `seq` is the order of creation. A call is first a row of `raw_calls`, as it came, and soon after one of
`calls`, by what it adds to what is stored already (`indexing.py`).
"""

from sqlalchemy import BigInteger, Column, Float, Index, Integer, LargeBinary, MetaData, String, Table, Text

__all__ = [
    "SCHEMA_VERSION",
    "calls",
    "contents",
    "counters",
    "events",
    "gateways",
    "metadata",
    "raw_calls",
    "rollouts",
    "runs",
    "settings",
    "version",
]

SCHEMA_VERSION = "0003"
"""The last revision in `migrations/versions`."""

metadata = MetaData()

_Large = BigInteger().with_variant(Integer, "sqlite")
"""SQLite's INTEGER has 64 bits, and it numbers rows by itself only where the type has that name."""

# Alembic's own table; read here without it, since importing it takes longer than opening a database.
version = Table("alembic_version", metadata, Column("version_num", String(32), primary_key=True))

counters = Table(
    "counters", metadata, Column("name", String, primary_key=True), Column("value", _Large, nullable=False)
)
settings = Table("settings", metadata, Column("key", String, primary_key=True), Column("value", Text, nullable=False))

gateways = Table(
    "gateways",
    metadata,
    Column("id", String, primary_key=True),
    Column("seen_s", Float, nullable=False),
    Column("state", Text, nullable=False),
)

runs = Table(
    "runs",
    metadata,
    Column("id", String, primary_key=True),
    Column("config", Text, nullable=False),
    Column("created_s", Float, nullable=False),
)

rollouts = Table(
    "rollouts",
    metadata,
    Column("seq", _Large, primary_key=True),
    Column("id", String, nullable=False, unique=True),
    Column("run", String, nullable=False),
    Column("group_id", String),
    Column("spec", Text, nullable=False),
    Column("state", String, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("outcome", String),
    Column("reward", Float),
    Column("message", Text),
    Column("evidence", Text, nullable=False),
    Column("created_s", Float, nullable=False),
    Column("started_s", Float),
    Column("ended_s", Float),
    Column("completion", _Large, unique=True),
    Column("controller", String),
    # None while running: whoever started it watches it without a lease (Agent Lightning's controller).
    Column("lease_until_s", Float),
    Column("lease_s", Float),
    # While queued after a failure: when it may be claimed again.
    Column("not_before_s", Float),
    Index("rollouts_by_state", "state", "seq"),
    Index("rollouts_by_run", "run", "seq"),
    Index("rollouts_by_completion", "run", "completion"),
    Index("rollouts_by_group", "group_id", "seq"),
    Index("rollouts_by_time", "created_s"),
)

raw_calls = Table(
    "raw_calls",
    metadata,
    Column("seq", _Large, primary_key=True),
    Column("id", String, nullable=False, unique=True),
    Column("rollout_id", String, nullable=False),
    Column("attempt", Integer, nullable=False),
    # Leading tokens, of the parent's prompt + response, that `prompt` leaves out; None: it is whole.
    Column("num_shared", Integer),
    Column("prompt", LargeBinary, nullable=False),
    Column("response", LargeBinary, nullable=False),
    Column("logprobs", LargeBinary, nullable=False),
    Column("record", LargeBinary, nullable=False),
    Index("raw_calls_by_rollout", "rollout_id", "attempt", "seq"),
)

calls = Table(
    "calls",
    metadata,
    Column("seq", _Large, primary_key=True),
    Column("id", String, nullable=False, unique=True),
    Column("rollout_id", String, nullable=False),
    Column("attempt", Integer, nullable=False),
    # The earlier call of the attempt whose prompt + response begins with the `num_shared` tokens that `prompt` leaves
    # out.
    Column("base", String),
    Column("num_shared", Integer, nullable=False),
    Column("response_len", Integer, nullable=False),
    # zstd frames of little-endian int32, int32, float32 and JSON.
    Column("prompt", LargeBinary, nullable=False),
    Column("response", LargeBinary, nullable=False),
    Column("logprobs", LargeBinary, nullable=False),
    Column("record", LargeBinary, nullable=False),
    # Of `contents`, as little-endian int64: the messages, tools and other parts of the request (`contents.py`).
    Column("parts", LargeBinary, nullable=False),
    Column("delivered", String, nullable=False),
    Index("calls_by_rollout", "rollout_id", "attempt", "seq"),
)

contents = Table(
    "contents",
    metadata,
    Column("id", _Large, primary_key=True),
    # BLAKE2b of 16 bytes over the JSON in `data`, a zstd frame.
    Column("hash", LargeBinary, nullable=False, unique=True),
    Column("data", LargeBinary, nullable=False),
)

events = Table(
    "events",
    metadata,
    Column("seq", _Large, primary_key=True),
    Column("rollout_id", String, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("event_type", String, nullable=False),
    Column("data", Text, nullable=False),
    Column("timestamp_s", Float, nullable=False),
    Index("events_by_rollout", "rollout_id", "seq"),
)
