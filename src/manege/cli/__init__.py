"""The command line: one file per verb, and the only place where the parts are wired together."""

from manege.cli.main import main

__all__ = ["main"]
