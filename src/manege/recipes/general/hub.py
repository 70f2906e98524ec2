"""Rows of public data sets, from the Hugging Face hub or its local cache, by the library `datasets`."""

import importlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from manege.errors import ConfigError

__all__ = ["hub_rows", "hub_table"]


def hub_rows(name: str, *, split: str, config: str | None = None) -> Sequence[Mapping[str, Any]]:
    """All rows of a split. Raises ConfigError as `hub_table` does."""
    return [dict(row) for row in hub_table(name, split=split, config=config)]


def hub_table(name: str, *, split: str, config: str | None = None) -> Iterable[Mapping[str, Any]]:
    """A split, whose rows are read as they are asked for. Raises ConfigError without the library, and where neither hub
    nor cache have it."""
    try:
        load_dataset = importlib.import_module("datasets").load_dataset
    except ImportError as error:
        raise ConfigError(
            f"the data set {name!r} is read with the library datasets, which is not installed: "
            "pip install 'manege[general]'"
        ) from error
    try:
        return load_dataset(name, config, split=split)
    # It passes on what its many parts raise: of the network, of the hub's answers, of files.
    except Exception as error:
        raise ConfigError(
            f"the data set {name!r} cannot be loaded ({type(error).__name__}: {error}); where no hub can be reached, "
            "take a .jsonl file or the generated tasks"
        ) from error
