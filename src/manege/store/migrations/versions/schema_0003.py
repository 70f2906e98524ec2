"""A time before which a rollout that failed is not tried again."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.add_column("rollouts", sa.Column("not_before_s", sa.Float))
