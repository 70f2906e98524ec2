"""Inserts that leave alone what is there."""

from sqlalchemy import Connection, Insert, Table
from sqlalchemy.dialects import postgresql, sqlite

__all__ = ["insert_new"]

_INSERT = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}


def insert_new(connection: Connection, table: Table, key: str) -> Insert:
    """Rows whose unique `key` is there already are skipped."""
    return _INSERT[connection.dialect.name](table).on_conflict_do_nothing(index_elements=[key])
