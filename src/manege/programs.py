"""Functions that users name in a run file as `module:function`."""

import importlib
from collections.abc import Callable
from typing import Any

from manege.errors import HarnessError

__all__ = ["import_function"]


def import_function(name: str, *, what: str) -> Callable[..., Any]:
    """Import `module:function`. Raises HarnessError that names the setting, the value and what is wrong."""
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise HarnessError(f"{what} = {name!r}: want module:function")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise HarnessError(f"{what} = {name!r}: module {module_name!r} cannot be imported: {error}") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise HarnessError(f"{what} = {name!r}: module {module_name!r} has no function {attribute!r}")
    return function
