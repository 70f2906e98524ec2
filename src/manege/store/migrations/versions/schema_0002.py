"""PostgreSQL; calls in compressed parts, messages and tools once per database; raw calls; gateways; groups."""

import hashlib
from typing import Any

import numpy as np
import orjson
import sqlalchemy as sa
import zstandard
from alembic import op

revision = "0002"
down_revision = "0001"

_Large = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    connection = op.get_bind()
    op.drop_table("schema_version")
    _make_tables()
    connection.execute(sa.text("INSERT INTO counters (name, value) VALUES ('changes', 0)"))
    _add_groups(connection)
    _move_calls(connection)


def _make_tables() -> None:
    op.create_table(
        "gateways",
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("seen_s", sa.Float, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
    )
    op.create_table(
        "contents",
        sa.Column("id", _Large, primary_key=True),
        sa.Column("hash", sa.LargeBinary, nullable=False, unique=True),
        sa.Column("data", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "raw_calls",
        sa.Column("seq", _Large, primary_key=True),
        sa.Column("id", sa.String, nullable=False, unique=True),
        sa.Column("rollout_id", sa.String, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("num_shared", sa.Integer),
        sa.Column("prompt", sa.LargeBinary, nullable=False),
        sa.Column("response", sa.LargeBinary, nullable=False),
        sa.Column("logprobs", sa.LargeBinary, nullable=False),
        sa.Column("record", sa.LargeBinary, nullable=False),
    )
    op.create_index("raw_calls_by_rollout", "raw_calls", ["rollout_id", "attempt", "seq"])
    op.rename_table("calls", "old_calls")
    op.drop_index("calls_by_rollout", "old_calls")
    op.create_table(
        "calls",
        sa.Column("seq", _Large, primary_key=True),
        sa.Column("id", sa.String, nullable=False, unique=True),
        sa.Column("rollout_id", sa.String, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("base", sa.String),
        sa.Column("num_shared", sa.Integer, nullable=False),
        sa.Column("response_len", sa.Integer, nullable=False),
        sa.Column("prompt", sa.LargeBinary, nullable=False),
        sa.Column("response", sa.LargeBinary, nullable=False),
        sa.Column("logprobs", sa.LargeBinary, nullable=False),
        sa.Column("record", sa.LargeBinary, nullable=False),
        sa.Column("parts", sa.LargeBinary, nullable=False),
        sa.Column("delivered", sa.String, nullable=False),
    )
    op.create_index("calls_by_rollout", "calls", ["rollout_id", "attempt", "seq"])
    op.add_column("rollouts", sa.Column("group_id", sa.String))
    op.drop_index("rollouts_by_run", "rollouts")
    op.create_index("rollouts_by_run", "rollouts", ["run", "seq"])
    op.create_index("rollouts_by_completion", "rollouts", ["run", "completion"])
    op.create_index("rollouts_by_group", "rollouts", ["group_id", "seq"])
    op.create_index("rollouts_by_time", "rollouts", ["created_s"])


def _add_groups(connection: sa.Connection) -> None:
    set_group = sa.text("UPDATE rollouts SET group_id = :group_id WHERE seq = :seq")
    for seq, spec in connection.execute(sa.text("SELECT seq, spec FROM rollouts")).all():
        if (group := orjson.loads(spec).get("group")) is not None:
            connection.execute(set_group, {"group_id": group, "seq": seq})


def _move_calls(connection: sa.Connection) -> None:
    pack, ids = zstandard.ZstdCompressor().compress, dict[bytes, int]()
    add_part = sa.text("INSERT INTO contents (id, hash, data) VALUES (:id, :hash, :data)")
    add_call = sa.text(
        "INSERT INTO calls (seq, id, rollout_id, attempt, base, num_shared, response_len, prompt, response, logprobs, "
        "record, parts, delivered) VALUES (:seq, :id, :rollout_id, :attempt, :base, :num_shared, :response_len, "
        ":prompt, :response, :logprobs, :record, :parts, :delivered)"
    )

    def put(value: Any) -> int:
        text = orjson.dumps(value)
        key = hashlib.blake2b(text, digest_size=16).digest()
        if key not in ids:
            ids[key] = len(ids) + 1
            connection.execute(add_part, {"id": ids[key], "hash": key, "data": pack(text)})
        return ids[key]

    last = 0
    while rows := connection.execute(
        sa.text("SELECT * FROM old_calls WHERE seq > :last ORDER BY seq LIMIT 256"), {"last": last}
    ).all():
        for row in rows:
            record = orjson.loads(row.record)
            request, headers = record.pop("request"), record.pop("headers")
            record.pop("delivered")
            lists = [
                request.pop(name) if isinstance(request.get(name), list) else None for name in ("tools", "messages")
            ]
            parts = [put(request), put(headers)]
            for found in lists:
                parts += [-1 if found is None else len(found), *map(put, found or ())]
            values = {
                **{
                    name: getattr(row, name)
                    for name in ("seq", "id", "rollout_id", "attempt", "num_shared", "delivered")
                },
                **{name: pack(getattr(row, name)) for name in ("prompt", "response", "logprobs")},
                "base": row.parent if row.num_shared else None,
                "response_len": len(row.response) // 4,
                "record": pack(orjson.dumps(record)),
                "parts": np.array(parts, "<i8").tobytes(),
            }
            connection.execute(add_call, values)
        last = rows[-1].seq
    op.drop_table("old_calls")
