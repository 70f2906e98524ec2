"""Calls as what they add to each other, to whole calls."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from manege.store.expand import expand
from tests.calls import make_call
from tests.stored_calls import FORESTS, arrays, as_stored, linear


@given(FORESTS)
def test_whole_calls_come_back_in_their_order(forest):
    stored, whole = forest
    found = expand(stored)
    assert [call.id for call in found] == [call.id for call in whole]
    assert [arrays(call) for call in found] == [arrays(call) for call in whole]
    assert [call.request for call in found] == [call.request for call in whole]


def test_the_prompts_of_a_conversation_are_views_of_one_array_that_nobody_may_write():
    first, second, third = expand(linear(([1, 2], [3]), ([4], [5, 6]), ([7], [8])))
    assert third.prompt_ids_P.tolist() == [1, 2, 3, 4, 5, 6, 7]
    memory = third.prompt_ids_P.base
    assert all(call.prompt_ids_P.base is memory and call.response_ids_R.base is memory for call in (first, second))
    with pytest.raises(ValueError, match="read-only"):
        second.prompt_ids_P[0] = 9


def test_a_branch_is_one_array_too_with_one_copy_of_what_it_shares():
    stored = linear(([1, 2], [3]), ([4], [5]))
    for number, (base, num_shared) in enumerate([(0, 3), (2, 5), (1, 1)], start=2):
        stored.append(as_stored(make_call(f"b{number}", [7], [8]), base, num_shared))
    _, main, branch, on_branch, inside = expand(stored)
    assert branch.prompt_ids_P.tolist() == [1, 2, 3, 7]
    assert on_branch.prompt_ids_P.tolist() == [1, 2, 3, 7, 8, 7]
    assert inside.prompt_ids_P.tolist() == [1, 7]
    assert np.shares_memory(branch.prompt_ids_P, on_branch.prompt_ids_P)
    assert not np.shares_memory(branch.prompt_ids_P, main.prompt_ids_P)


@pytest.mark.parametrize(("base", "num_shared"), [(1, 0), (2, 0), (-1, 0), (0, 4), (None, 1), (0, -1)])
def test_a_base_that_cannot_be_is_refused(base, num_shared):
    first, second = linear(([1, 2], [3]), ([4], [5]))
    with pytest.raises(ValueError, match="call 1"):
        expand([first, replace(second, base=base, num_shared=num_shared)])
