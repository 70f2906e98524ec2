"""Recognising served conversations, with the real SmolLM2 template and ids sampled by nobody's tokenizer."""

import copy
import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from manege.gateway.continuation import Conversation
from manege.gateway.memory import AttemptMemory
from manege.model.folder import open_folder
from manege.protocols.chat import ChatCompletions
from manege.rendering.select import renderer_for
from manege.store.sql import SqlStore
from manege.types import (
    Call,
    CallId,
    Delivered,
    FinishReason,
    PolicyVersion,
    RolloutId,
    RolloutSpec,
    RunId,
    Task,
    VersionSpan,
)

BASH = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def renderer():
    return renderer_for(open_folder("smollm2"))


@pytest.fixture(scope="module")
def qwen3():
    folder = open_folder("smollm2")
    template = (Path(__file__).parent / "templates" / "qwen3.jinja").read_text(encoding="utf-8")
    return renderer_for(dataclasses.replace(folder, chat_template=template))


class Agent:
    """Serves requests on one conversation as the gateway does."""

    def __init__(self, renderer, conversation=None):
        self.renderer = renderer
        self.conversation = conversation or Conversation()
        self.calls = []

    def ask(self, messages, tools=()):
        body = {"messages": messages, **({"tools": list(tools)} if tools else {})}
        request = ChatCompletions().parse(json.loads(json.dumps(body)))
        return request, self.conversation.prompt(request, self.renderer)

    def serve(self, messages, reply, tools=(), response=None):
        """The call that answers `messages` with `reply`, sampled letter by letter."""
        request, prompt = self.ask(messages, tools)
        if response is None:
            response = [token for letter in str(reply["content"]) for token in self.renderer.encode(letter)] + [2]
        body = {"messages": list(prompt.new_messages), **({"tools": list(request.tools)} if tools else {})}
        call = Call(
            id=CallId(f"c{len(self.calls)}"),
            rollout_id=RolloutId("r"),
            attempt=0,
            parent=prompt.parent,
            protocol="chat",
            mode="train",
            prompt_ids_P=prompt.ids,
            response_ids_R=np.asarray(response, np.int32),
            logprobs_R=np.full(len(response), -0.5, np.float32),
            spans=[VersionSpan(first_token=0, version=PolicyVersion(0))],
            temperature=1.0,
            finish_reason=FinishReason.STOP,
            delivered=Delivered.YES,
            request=body,
            reply=reply,
            created_s=0.0,
            ended_s=0.0,
        )
        self.conversation.add(call)
        self.calls.append(call)
        return call


def user(text):
    return {"role": "user", "content": text}


def says(text, **rest):
    return {"role": "assistant", "content": text, **rest}


def calls_bash(arguments, text="", id="call_ours"):
    call = {"id": id, "type": "function", "function": {"name": "bash", "arguments": arguments}}
    return says(text, tool_calls=[call])


def starts_with(ids, call):
    known = [*call.prompt_ids_P.tolist(), *call.response_ids_R.tolist()]
    return ids.tolist()[: len(known)] == known


def test_next_turn_continues_the_sampled_ids(renderer):
    agent = Agent(renderer)
    first = agent.serve([user("Hi")], says("Hello."))
    second = agent.serve([user("Hi"), says("Hello."), user("Go on")], says("Sure."))
    assert (second.parent, second.request["messages"]) == (first.id, [user("Go on")])
    _, prompt = agent.ask([user("Hi"), says("Hello."), user("Go on"), says("Sure."), user("More"), user("!")])
    assert prompt.parent == second.id
    assert starts_with(prompt.ids, second)
    assert starts_with(prompt.ids, first)


@pytest.mark.parametrize(
    "echo",
    [
        calls_bash('{"c":"ls","n":1}', "Ok.", id="other"),
        calls_bash('{"n": 1, "c": "ls"}', "Ok."),
        calls_bash('{"c": "ls", "n": 1}', [{"type": "text", "text": "Ok.", "cache_control": {"type": "ephemeral"}}]),
        calls_bash('{"c": "ls", "n": 1}', None),
        calls_bash('{"c": "ls", "n": 1}', "Ok.") | {"reasoning_content": "Hm.", "refusal": None},
    ],
    ids=["ids rewritten", "arguments spelled otherwise", "content as list", "text left out", "decorated"],
)
def test_echo_that_means_the_same_is_recognised(renderer, echo):
    agent = Agent(renderer)
    first = agent.serve([user("Hi")], calls_bash('{"c": "ls", "n": 1}', "Ok."), [BASH])
    result = {"role": "tool", "tool_call_id": echo["tool_calls"][0]["id"], "content": "a.txt"}
    _, prompt = agent.ask([user("Hi"), echo, result], [BASH])
    assert prompt.parent == first.id
    assert starts_with(prompt.ids, first)
    # The conversation goes on to be recognised after it.
    second = agent.serve([user("Hi"), echo, result], says("Done."), [BASH])
    _, prompt = agent.ask([user("Hi"), echo, result, says("Done."), user("Thanks")], [BASH])
    assert prompt.parent == second.id


@pytest.mark.parametrize(
    ("messages", "tools"),
    [
        ([user("Hi!"), calls_bash('{"c": "ls"}', "Ok."), user("x")], [BASH]),
        ([user("Hi"), calls_bash('{"c": "pwd"}', "Ok."), user("x")], [BASH]),
        ([user("Hi"), calls_bash('{"c": "ls"}', "Okay."), user("x")], [BASH]),
        ([user("Hi"), says("Ok."), user("x")], [BASH]),
        ([{"role": "system", "content": "s"}, user("Hi"), calls_bash('{"c": "ls"}', "Ok."), user("x")], [BASH]),
        ([user("Hi"), calls_bash('{"c": "ls"}', "Ok."), user("x")], []),
    ],
    ids=["history", "arguments", "text", "calls left out", "system prompt", "tools"],
)
def test_what_was_edited_is_another_conversation(renderer, messages, tools):
    agent = Agent(renderer)
    agent.serve([user("Hi")], calls_bash('{"c": "ls"}', "Ok."), [BASH])
    request, prompt = agent.ask(messages, tools)
    assert (prompt.parent, prompt.new_messages) == (None, request.messages)
    assert prompt.ids.tolist() == renderer.render(request.messages, request.tools)


def test_edit_late_in_a_conversation_continues_from_before_it(renderer):
    agent = Agent(renderer)
    first = agent.serve([user("Hi")], says("Hello."))
    agent.serve([user("Hi"), says("Hello."), user("Go on")], says("Sure."))
    _, prompt = agent.ask([user("Hi"), says("Hello."), user("Go on"), says("Sure, edited."), user("x")])
    assert prompt.parent == first.id
    assert [message["content"] for message in prompt.new_messages] == ["Go on", "Sure, edited.", "x"]


def test_answer_after_a_rewritten_history_is_continued(qwen3):
    """A new user turn drops earlier reasoning, so a branch starts; what is served there is recognised as well."""
    agent = Agent(qwen3)
    first = agent.serve([user("Hi")], calls_bash("{}", "Ok.", id="call_1") | {"reasoning_content": "Look."}, [BASH])
    # This harness leaves out the text beside a call.
    history = [user("Hi"), calls_bash("{}", None, id="call_1"), {"role": "tool", "tool_call_id": "x", "content": "a"}]
    second = agent.serve(history, says("Done.", reasoning_content="So."), [BASH])
    assert second.parent == first.id
    history += [says("Done."), user("More")]
    third = agent.serve(history, calls_bash("{}", "", id="call_3"), [BASH])
    assert third.parent is None
    history += [calls_bash("{}", "", id="rewritten"), {"role": "tool", "tool_call_id": "x", "content": "b"}]
    assert agent.ask(history, [BASH])[1].parent == third.id


def test_twins_are_told_apart_by_their_tool_call_ids(renderer):
    agent = Agent(renderer)
    one = agent.serve([user("Hi")], calls_bash("{}", "a", id="call_one"), [BASH])
    two = agent.serve([user("Hi")], calls_bash("{}", "a", id="call_two"), [BASH], response=[5, 6, 2])
    for call in (one, two):
        _, prompt = agent.ask([user("Hi"), call.reply, {"role": "tool", "tool_call_id": "x", "content": "y"}], [BASH])
        assert prompt.parent == call.id


def test_answer_that_was_not_delivered_is_not_continued(renderer):
    agent = Agent(renderer)
    one = agent.serve([user("Hi")], says("Hello."))
    two = agent.serve([user("Hi")], says("Hello."), response=[5, 6, 2])
    history = [user("Hi"), says("Hello."), user("x")]
    assert agent.ask(history)[1].parent == two.id
    agent.conversation.forget(two)
    assert agent.ask(history)[1].parent == one.id
    agent.conversation.forget(one)
    assert agent.ask(history)[1].parent is None


def test_request_without_new_messages_opens_the_next_answer(renderer):
    agent = Agent(renderer)
    first = agent.serve([user("Hi")], says("Hello."))
    _, prompt = agent.ask([user("Hi"), says("Hello.")])
    assert prompt.parent == first.id
    assert renderer.decode(prompt.ids[-4:].tolist()).endswith("assistant\n")


@pytest.mark.anyio
async def test_conversation_is_rebuilt_from_the_store(renderer, tmp_path):
    store = await SqlStore.open(tmp_path / "store.db")
    try:
        await store.put_run(RunId("run"), {})
        spec = RolloutSpec(id=RolloutId("r"), run=RunId("run"), task=Task(id="t", input={}))
        await store.create_rollouts([spec])
        await store.claim(controller="c", limit=1, lease_s=60)
        agent = Agent(renderer)
        history = [user("Hi")]
        for text in ("a", "b", "c"):
            reply = calls_bash('{"c": "ls"}', text, id=f"call_{text}")
            await store.add_call(agent.serve(history, reply, [BASH]))
            history = [*history, copy.deepcopy(reply), {"role": "tool", "tool_call_id": "x", "content": text}]
        rebuilt = await AttemptMemory(store, Conversation).of(RolloutId("r"), 0)
        expected = agent.ask(history, [BASH])[1]
        found = Agent(renderer, rebuilt).ask(history, [BASH])[1]
        assert found.parent == expected.parent == agent.calls[-1].id
        assert found.ids.tolist() == expected.ids.tolist()
        assert starts_with(found.ids, agent.calls[-1])
    finally:
        await store.close()
