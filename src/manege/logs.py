"""One logger tree, `manege.*`, to stderr: stable text followed by key=value."""

import logging
import sys
from typing import Any

__all__ = ["get_logger", "kv", "setup"]


def get_logger(name: str) -> logging.Logger:
    """The logger of a part, for example `gateway`."""
    return logging.getLogger(f"manege.{name}")


def kv(message: str, **values: Any) -> str:
    """`kv("attempt lost", rollout_id="r1")` -> `attempt lost rollout_id=r1`."""
    return " ".join([message, *(f"{key}={value}" for key, value in values.items())])


def setup(*, verbose: bool = False) -> None:
    """Called once, by the command line only."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s", "%H:%M:%S"))
    logger = logging.getLogger("manege")
    logger.handlers[:] = [handler]
    logger.setLevel(logging.DEBUG if verbose else logging.WARNING)
    logger.propagate = False
