"""Runs Alembic on a connection that is inside a transaction, so that a migration is done whole or not at all."""

from pathlib import Path

from alembic.config import Config
from alembic.runtime.environment import EnvironmentContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, inspect

__all__ = ["migrate"]


def migrate(connection: Connection, to: str = "head") -> None:
    """From whatever schema is there, or none, to a later one. Whatever a migration stumbles on is raised."""
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent))
    scripts = ScriptDirectory.from_config(config)
    context = EnvironmentContext(
        config,
        scripts,
        # The function's name is Alembic's; private only by its spelling.
        fn=lambda revision, _context: scripts._upgrade_revs(to, revision),
    )
    context.configure(connection=connection)
    known = inspect(connection)
    if known.has_table("schema_version") and not known.has_table("alembic_version"):
        # Schema 1 was written without Alembic.
        context.get_context().stamp(scripts, "0001")
    with context.begin_transaction():
        context.run_migrations()
