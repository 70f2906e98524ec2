"""Constrained decoding: which tokens may come next so that an answer can still match a grammar. Imports no torch.

`Grammars` belongs to one tokenizer and compiles a constraint with llguidance into a `Guide`, which follows one answer:
ask it which ids are allowed, choose one, tell it. A stop id is allowed where the grammar allows the end, so that an
answer ends there or, where the grammar leaves nothing to add, with the token that completes it.
"""

from collections.abc import Collection
from functools import cached_property
from typing import TypeAlias

import numpy as np
import orjson
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray
from tokenizers import Tokenizer

from manege.engine.base import Constraint
from manege.errors import EngineError, ProtocolError
from manege.types import JsonObject

__all__ = ["BoolArray", "Grammars", "Guide", "json_constraint"]

BoolArray: TypeAlias = NDArray[np.bool_]

_WHITE_SPACE = r"[ \n\t]{0,12}"
"""Between two tokens of JSON. Without a bound, a weak model writes white space until its tokens are used up."""


def json_constraint(schema: JsonObject) -> Constraint:
    """An answer that is JSON of this schema."""
    bounded = {**schema, "x-guidance": {"whitespace_pattern": _WHITE_SPACE}}
    return Constraint(
        grammar=f"start: %json {orjson.dumps(bounded).decode()}", json_schema=orjson.dumps(schema).decode()
    )


class Grammars:
    """Compiles the constraints of one tokenizer; may be used from several threads."""

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int, eos_ids: Collection[int]) -> None:
        """`vocab_size`: of the model, which may have more ids than its tokenizer."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = sorted(eos_ids)

    def guide(self, constraint: Constraint, stop_ids: Collection[int]) -> "Guide":
        """For a new answer. Takes milliseconds, the first one of a large tokenizer up to a second. Raises
        ProtocolError for a grammar that does not compile."""
        # Without limits of our own; short errors, since they reach the caller.
        limits = LLParserLimits(verbose_errors=False)
        grammar = LLMatcher.grammar_from_lark(constraint.grammar)
        matcher = LLMatcher(self._tokens, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            what = "JSON schema" if constraint.json_schema else "grammar of the answer"
            raise ProtocolError(f"the {what} cannot be used: {matcher.get_error()}")
        return Guide(matcher, self._vocab_size, stop_ids)

    def token_id(self, text: str) -> int | None:
        """Of a token that is just this text, if there is one."""
        return self._tokenizer.token_to_id(text)

    @cached_property
    def _tokens(self) -> LLTokenizer:
        size = max(self._vocab_size, self._tokenizer.get_vocab_size())
        return LLTokenizer(self._tokenizer.to_str(), n_vocab=size, eos_token=self._eos_ids)


class Guide:
    """How far one answer has got in its grammar."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, stop_ids: Collection[int]) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._stop_ids = [id for id in stop_ids if id < vocab_size]

    def allowed_V(self) -> BoolArray:
        """For each id whether it may come next. Raises EngineError when the grammar is too complex to follow."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise EngineError(f"the grammar of the answer cannot be followed: {self._matcher.get_error()}")
        allowed_V = np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)
        if self._matcher.is_accepting():
            allowed_V[self._stop_ids] = True
        return allowed_V

    @property
    def can_end(self) -> bool:
        """The answer so far matches the grammar, even if more could follow."""
        return self._matcher.is_accepting()

    def advance(self, id: int) -> bool:
        """Go on by an allowed id that is no stop id; True: the answer is complete, nothing can be added to it."""
        self._matcher.consume_token(id)
        return self._matcher.is_stopped() and not self._matcher.is_error()
