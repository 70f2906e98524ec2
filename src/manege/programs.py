"""Programs that users name in a run file: `module:function`, or a command as a list of arguments."""

import importlib
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from manege.errors import HarnessError

__all__ = ["check_program", "import_function"]


def import_function(name: str, *, what: str) -> Callable[..., Any]:
    """Import `module:function`. Raises HarnessError that names the setting, the value and what is wrong."""
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise HarnessError(f"{what} = {name!r}: want module:function or a list of arguments")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise HarnessError(f"{what} = {name!r}: module {module_name!r} cannot be imported: {error}") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise HarnessError(f"{what} = {name!r}: module {module_name!r} has no function {attribute!r}")
    return function


def check_program(program: str | Sequence[str], *, what: str) -> None:
    """Refuse a program that cannot be started, before anything runs."""
    if isinstance(program, str):
        import_function(program, what=what)
    elif not program:
        raise HarnessError(f"{what} is an empty list; name a command")
    elif shutil.which(program[0]) is None and not Path(program[0]).is_file():
        raise HarnessError(f"{what} = {list(program)!r}: command {program[0]!r} does not exist or is not executable")
