"""Parents of calls by their token ids alone."""

import numpy as np
import pytest

from manege.gateway.memory import AttemptMemory
from manege.gateway.prefixes import PrefixIndex, ids_text
from manege.store.sql import SqlStore
from manege.types import Delivered, RolloutSpec, Task
from tests.calls import make_call

USER, ASSISTANT = {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}


def chat(name, prompt, response, *, messages=(USER,), **changes):
    made = make_call(name, prompt, response, **changes)
    made.request["messages"] = list(messages)
    return made


def found(index, prompt):
    match = index.match(ids_text(np.asarray(prompt, np.int32)))
    return match.known and match.known.call_id, match.ids[match.begin :]


@pytest.mark.parametrize(
    ("prompt", "parent", "new"),
    [
        ([1, 2, 3, 4, 5], "c1", b"5"),
        ([1, 2, 3, 4, 5, 6, 7], "c2", b"7"),
        ([1, 2, 3, 4, 9], "c1", b"9"),
        ([1, 2, 3, 4], None, b"1,2,3,4"),
        ([1, 2, 3, 45, 6], None, b"1,2,3,45,6"),
        ([9, 2, 3, 4, 5], None, b"9,2,3,4,5"),
        ([], None, b""),
    ],
    ids=["first", "longest", "branch", "not proper", "cut inside a number", "other beginning", "empty"],
)
def test_the_parent_is_the_longest_call_that_is_a_proper_prefix(prompt, parent, new):
    index = PrefixIndex()
    first = index.add(chat("c1", [1, 2, 3], [4]), None)
    index.add(chat("c2", [1, 2, 3, 4, 5], [6]), first)
    index.add(chat("other", [7, 8], [9]), None)
    assert found(index, prompt) == (parent, new)


def test_messages_must_hold_the_parents_answer_where_it_was():
    index = PrefixIndex()
    first = index.add(chat("c1", [1, 2], [3], messages=[USER, USER]), None)
    prompt = np.asarray([1, 2, 3, 4], np.int32)
    assert index.parent(prompt, [USER, USER, ASSISTANT, USER]) == first
    assert index.parent(prompt, [USER, ASSISTANT, USER]) is None
    assert index.parent(prompt, [USER, USER]) is None
    second = index.add(chat("c2", [1, 2, 3, 4], [5]), first)
    assert (second.num_messages, second.num_tokens) == (5, 5)


def test_an_answer_that_was_not_delivered_is_nobodys_parent():
    index = PrefixIndex()
    call = chat("c1", [1], [2])
    index.add(call, None)
    index.forget(call)
    assert found(index, [1, 2, 3])[0] is None


@pytest.mark.anyio
async def test_after_a_restart_the_index_is_what_the_store_holds(tmp_path):
    store = await SqlStore.open(tmp_path / "store.db")
    await store.create_rollouts([RolloutSpec(id="r", run="run", task=Task(id="t", input={}))])
    await store.claim(controller="c", limit=1, lease_s=9)
    await store.add_call(chat("c1", [1, 2, 3], [4]))
    await store.add_continued_call(chat("c2", [5], [6], parent="c1"), 4)
    await store.add_call(chat("lost", [1, 2, 3], [8], delivered=Delivered.NO))
    indexes = AttemptMemory(store, PrefixIndex)
    index = await indexes.of("r", 0)
    assert [found(index, prompt)[0] for prompt in ([1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 8, 1])] == ["c2", None]
    assert index.match(b"1,2,3,4,5,6,7").known.num_messages == 4
    assert await indexes.of("r", 0) is index
    indexes.forget("r")
    assert await indexes.of("r", 0) is not index
    await store.close()
