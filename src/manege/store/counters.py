"""Numbers that only grow: policy versions, the order of completion, commits that changed something."""

from sqlalchemy import Connection, select, update

from manege.store.tables import counters

__all__ = ["COUNTERS", "count", "count_up"]

COUNTERS = ("completion", "policy_version", "changes")


def count(connection: Connection, name: str) -> int:
    """Where a counter stands."""
    return connection.execute(select(counters.c.value).where(counters.c.name == name)).scalar_one()


def count_up(connection: Connection, name: str) -> int:
    """The next number."""
    counted = update(counters).where(counters.c.name == name).values(value=counters.c.value + 1)
    return connection.execute(counted.returning(counters.c.value)).scalar_one()
