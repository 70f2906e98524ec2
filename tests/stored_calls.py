"""Random rollouts as the store gives them: calls as what they add, beside the whole calls that they stand for."""

from dataclasses import replace

import numpy as np
import orjson
from hypothesis import strategies as st

from manege.store.base import StoredCall
from manege.store.codec import call_record
from tests.calls import make_call

__all__ = ["FORESTS", "arrays", "as_stored", "linear"]

_IDS = st.lists(st.integers(0, 2**31 - 1), max_size=4)
_FLOATS = st.lists(st.floats(width=32), max_size=4)


@st.composite
def _forests(draw, name="r"):
    """(stored, whole): calls that go on where an earlier one ends, that branch off inside it, or that stand alone."""
    stored, whole = [], []
    for number in range(draw(st.integers(0, 8))):
        base = draw(st.sampled_from([None, number - 1, *range(number)])) if number else None
        context = [] if base is None else [*whole[base].prompt_ids_P, *whole[base].response_ids_R]
        num_shared = draw(st.sampled_from([len(context), len(context), draw(st.integers(0, len(context)))]))
        new = draw(_IDS)
        call = make_call(
            f"{name}-{number}",
            new,
            draw(_IDS),
            rollout=name,
            logprobs=draw(_FLOATS),
            request={"turn": number},
            edits=["x"],
        )
        stored.append(as_stored(call, base, num_shared))
        prompt = np.asarray([*context[:num_shared], *new], np.int32)
        whole.append(replace(call, prompt_ids_P=prompt))
    return stored, whole


FORESTS = _forests()


def linear(*turns, name="r"):
    """One conversation; a turn is what it adds to the prompt, and the answer."""
    stored, length = [], 0
    for number, (new, response) in enumerate(turns):
        call = make_call(f"{name}-{number}", new, response, rollout=name)
        stored.append(as_stored(call, number - 1 if number else None, length))
        length += len(new) + len(response)
    return stored


def as_stored(call, base, num_shared):
    """Of a call whose prompt holds only what it adds."""
    return StoredCall(
        record=orjson.dumps(call_record(call)),
        new_ids_N=call.prompt_ids_P,
        response_ids_R=call.response_ids_R,
        logprobs_R=call.logprobs_R,
        base=base,
        num_shared=num_shared,
    )


def arrays(call):
    """Bytes and types, so that NaN equals itself."""
    found = (call.prompt_ids_P, call.response_ids_R, call.logprobs_R)
    return [(array.tobytes(), array.dtype) for array in found]
