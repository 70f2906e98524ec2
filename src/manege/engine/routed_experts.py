"""Which experts of a mixture a token was sent to, as vLLM tells it with `--enable-return-routed-experts`; pure.

The text is base64 of a `.npy` file, a row per token that was computed: the prompt's and the sampled ones but the last,
(P + R - 1, layers, experts per token), unsigned. It is recorded as it is, but for rows that are known already, so that
a conversation keeps each token's once. Nothing here trains with them.
"""

import base64
import io
from typing import Any

import numpy as np
import numpy.typing as npt

from manege.errors import EngineError

__all__ = ["joined", "rows_of", "text_of", "without_first"]


def rows_of(text: str) -> npt.NDArray[Any]:
    """(N, layers, experts per token). Raises EngineError for a text that is none."""
    try:
        rows = np.load(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise EngineError(f"the engine's routed experts cannot be read ({error}): {text[:80]!r}") from error
    if rows.ndim != 3:
        raise EngineError(
            f"the engine's routed experts have shape {rows.shape}; want tokens, layers, experts per token"
        )
    return rows


def text_of(rows_NLK: npt.NDArray[Any]) -> str:
    """The reverse of `rows_of`."""
    file = io.BytesIO()
    np.save(file, rows_NLK, allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode()


def joined(first: str | None, then: str | None) -> str | None:
    """Of an answer that was cut: as they were when each token was computed for the first time."""
    if first is None or then is None:
        return then or first
    known = rows_of(first)
    return text_of(np.concatenate([known, rows_of(then)[len(known) :]]))


def without_first(text: str | None, num_known: int) -> str | None:
    """Without the rows of the first tokens, which an earlier call has."""
    return text if text is None or num_known <= 0 else text_of(rows_of(text)[num_known:])
