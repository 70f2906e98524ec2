"""The tables of schema version 1.

A rollout's `spec`, `evidence` and other nested values are JSON; what the database filters or sorts by has a column of
its own. `seq` is the order of creation. Token ids are little-endian int32 blobs, log-probabilities float32 blobs.
"""

from sqlalchemy import Column, Float, Index, Integer, LargeBinary, MetaData, String, Table, Text

__all__ = [
    "SCHEMA_VERSION",
    "calls",
    "counters",
    "events",
    "metadata",
    "rollouts",
    "runs",
    "schema_version",
    "settings",
]

SCHEMA_VERSION = 1

metadata = MetaData()

schema_version = Table("schema_version", metadata, Column("version", Integer, nullable=False))

counters = Table(
    "counters", metadata, Column("name", String, primary_key=True), Column("value", Integer, nullable=False)
)
settings = Table("settings", metadata, Column("key", String, primary_key=True), Column("value", Text, nullable=False))

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
    Column("seq", Integer, primary_key=True),
    Column("id", String, nullable=False, unique=True),
    Column("run", String, nullable=False),
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
    Column("completion", Integer, unique=True),
    Column("controller", String),
    # None while running: whoever started it watches it without a lease (Agent Lightning's controller).
    Column("lease_until_s", Float),
    Column("lease_s", Float),
    Index("rollouts_by_state", "state", "seq"),
    Index("rollouts_by_run", "run", "completion"),
)

calls = Table(
    "calls",
    metadata,
    Column("seq", Integer, primary_key=True),
    Column("id", String, nullable=False, unique=True),
    Column("rollout_id", String, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("parent", String),
    # Leading tokens of the prompt that are the parent's prompt + response; `prompt` holds what follows them.
    Column("num_shared", Integer, nullable=False),
    Column("prompt", LargeBinary, nullable=False),
    Column("response", LargeBinary, nullable=False),
    Column("logprobs", LargeBinary, nullable=False),
    # Of prompt + response, so that a child is checked without reading the chain of its ancestors.
    Column("context_len", Integer, nullable=False),
    Column("context_hash", LargeBinary, nullable=False),
    Column("record", Text, nullable=False),
    Column("delivered", String, nullable=False),
    Index("calls_by_rollout", "rollout_id", "attempt", "seq"),
)

events = Table(
    "events",
    metadata,
    Column("seq", Integer, primary_key=True),
    Column("rollout_id", String, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("event_type", String, nullable=False),
    Column("data", Text, nullable=False),
    Column("timestamp_s", Float, nullable=False),
    Index("events_by_rollout", "rollout_id", "seq"),
)
