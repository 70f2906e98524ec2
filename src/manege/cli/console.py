"""Where tables go."""

import shutil

from rich.console import Console

__all__ = ["narrow_console"]

_WIDTH = 100
"""Columns at most, and in a pipe: longer lines are hard to read."""


def narrow_console() -> Console:
    """Standard output; colours as NO_COLOR and the terminal say."""
    return Console(width=min(_WIDTH, shutil.get_terminal_size((_WIDTH, 0)).columns), highlight=False)
