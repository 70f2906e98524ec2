"""What a rank in a process of its own does: it answers the questions of rank 0, one after the other, until there are
none (`rank_process`)."""

from collections.abc import Callable
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from typing import Any

from manege.errors import ManegeError
from manege.trainer.engines.rank_engine import RankEngine

__all__ = ["answer_questions"]


class _UndoneError(Exception):
    """Rank 0 has failed."""


class _Work:
    """What can be asked of a rank beside what its engine does."""

    def __init__(self, engine: RankEngine) -> None:
        self._engine = engine
        self._remembered = ExitStack()

    def remember(self) -> None:
        self._remembered.enter_context(self._engine.undone_on_error())

    def undo(self) -> None:
        with suppress(_UndoneError), self._remembered:
            raise _UndoneError

    def forget(self) -> None:
        self._remembered.close()


def answer_questions(pipe: Connection, engine: RankEngine) -> None:
    """Returns when rank 0 has closed its end. What is no ManegeError is a bug, or memory is used up: it ends this
    process, and so the run."""
    work = _Work(engine)
    while True:
        try:
            name, arguments = pipe.recv()
        except EOFError:
            return
        asked: Callable[..., Any] = getattr(work, name, None) or getattr(engine, name)
        try:
            answer = asked(*arguments)
        except ManegeError as error:
            answer = error
        pipe.send(answer)
