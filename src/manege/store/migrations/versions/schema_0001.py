"""The first schema, which was for SQLite only: messages and tools whole in each call."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

_Large = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    op.create_table("schema_version", sa.Column("version", sa.Integer, nullable=False))
    op.create_table(
        "counters", sa.Column("name", sa.String, primary_key=True), sa.Column("value", _Large, nullable=False)
    )
    op.create_table(
        "settings", sa.Column("key", sa.String, primary_key=True), sa.Column("value", sa.Text, nullable=False)
    )
    op.create_table(
        "runs",
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("config", sa.Text, nullable=False),
        sa.Column("created_s", sa.Float, nullable=False),
    )
    op.create_table(
        "rollouts",
        sa.Column("seq", _Large, primary_key=True),
        sa.Column("id", sa.String, nullable=False, unique=True),
        sa.Column("run", sa.String, nullable=False),
        sa.Column("spec", sa.Text, nullable=False),
        sa.Column("state", sa.String, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("outcome", sa.String),
        sa.Column("reward", sa.Float),
        sa.Column("message", sa.Text),
        sa.Column("evidence", sa.Text, nullable=False),
        sa.Column("created_s", sa.Float, nullable=False),
        sa.Column("started_s", sa.Float),
        sa.Column("ended_s", sa.Float),
        sa.Column("completion", _Large, unique=True),
        sa.Column("controller", sa.String),
        sa.Column("lease_until_s", sa.Float),
        sa.Column("lease_s", sa.Float),
    )
    op.create_index("rollouts_by_state", "rollouts", ["state", "seq"])
    op.create_index("rollouts_by_run", "rollouts", ["run", "completion"])
    op.create_table(
        "calls",
        sa.Column("seq", _Large, primary_key=True),
        sa.Column("id", sa.String, nullable=False, unique=True),
        sa.Column("rollout_id", sa.String, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("parent", sa.String),
        sa.Column("num_shared", sa.Integer, nullable=False),
        sa.Column("prompt", sa.LargeBinary, nullable=False),
        sa.Column("response", sa.LargeBinary, nullable=False),
        sa.Column("logprobs", sa.LargeBinary, nullable=False),
        sa.Column("context_len", sa.Integer, nullable=False),
        sa.Column("context_hash", sa.LargeBinary, nullable=False),
        sa.Column("record", sa.Text, nullable=False),
        sa.Column("delivered", sa.String, nullable=False),
    )
    op.create_index("calls_by_rollout", "calls", ["rollout_id", "attempt", "seq"])
    op.create_table(
        "events",
        sa.Column("seq", _Large, primary_key=True),
        sa.Column("rollout_id", sa.String, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("event_type", sa.String, nullable=False),
        sa.Column("data", sa.Text, nullable=False),
        sa.Column("timestamp_s", sa.Float, nullable=False),
    )
    op.create_index("events_by_rollout", "events", ["rollout_id", "seq"])
