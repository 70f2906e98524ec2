"""What harnesses send beside their work: noise that would break prefixes, side calls, sub-agents."""

import pytest

from tests.system.agents.asking import ask, calls_of, user

pytestmark = pytest.mark.anyio

CLAUDE = {"user-agent": "claude-cli/2.1.332 (external, cli)"}
TOOLS = [{"name": "Bash", "input_schema": {"type": "object"}}]


async def claude_asks(http, system, messages, headers=None, **fields):
    body = {"model": "m", "max_tokens": 50, "system": system, "messages": messages, "tools": TOOLS, **fields}
    answer = await http.post("/v1/messages?beta=true", json=body, headers={**CLAUDE, **(headers or {})})
    assert answer.status_code == 200, answer.text
    return answer.json()["content"]


def with_nonce(nonce):
    line = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1; cch={nonce};"}
    return [line, {"type": "text", "text": "You are a coder.", "cache_control": {"type": "ephemeral"}}]


async def test_attribution_line_does_not_break_the_conversation(http, store):
    messages = [user("say Hi")]
    content = await claude_asks(http, with_nonce("aaa"), messages)
    # As the harness does, the cache marker moves to the last message.
    marked = {"type": "text", "text": "say Bye", "cache_control": {"type": "ephemeral"}}
    messages += [{"role": "assistant", "content": content}, user([marked])]
    await claude_asks(http, with_nonce("bbb"), messages)
    first, second = await calls_of(store)
    assert second.parent == first.id
    known = [*first.prompt_ids_P, *first.response_ids_R]
    assert second.prompt_ids_P[: len(known)].tolist() == known
    assert ["aaa" in edit for edit in first.edits] == [True]
    assert ["bbb" in edit for edit in second.edits] == [True]


async def test_harness_of_the_run_is_filtered_whatever_its_headers_say(http, rollout, store, gateway):
    await rollout("r2", config={"agent": {"harness": "claude-code"}})
    gateway.services.settings.forget("run")
    headers = {"authorization": f"Bearer {gateway.services.auth.agent_key('r2', 0)}", "user-agent": "mine"}
    await claude_asks(http, with_nonce("aaa"), [user("say Hi")], headers)
    [call] = await calls_of(store, "r2")
    assert len(call.edits) == 1


async def test_side_calls_and_sub_agents_have_threads_of_their_own(http, store):
    await claude_asks(http, "You are a coder.", [user("say Hi")])
    await claude_asks(http, "You are a coder.", [user("say Hi")], {"x-claude-code-agent-id": "a1"})
    await claude_asks(http, "Summarise.", [user("say Sum")], tools=[])
    assert [call.thread for call in await calls_of(store)] == ["main", "agent:a1", "side:other"]


async def test_dates_go_only_where_the_run_wants_common_prompts(http, rollout, store, gateway):
    prompts = {}
    for number, common in enumerate((False, True)):
        for day in (28, 29):
            name = f"c{number}{day}"
            await rollout(name, config={"agent": {"harness": "codex", "common_prompts": common}})
            gateway.services.settings.forget("run")
            headers = {"authorization": f"Bearer {gateway.services.auth.agent_key(name, 0)}"}
            told = f"<cwd>/w</cwd>\n<current_date>2026-11-{day}</current_date>\nsay Hi"
            answer = await http.post("/v1/responses", json={"input": told}, headers=headers)
            assert answer.status_code == 200, answer.text
            [call] = await calls_of(store, name)
            assert [edit.startswith("date: ") for edit in call.edits] == [True] * common
            prompts.setdefault(common, []).append(call.prompt_ids_P.tolist())
    assert prompts[False][0] != prompts[False][1]
    assert prompts[True][0] == prompts[True][1]


async def test_program_that_is_not_known_stays_as_it_is(agent, store):
    await ask(agent, [{"role": "system", "content": "x-anthropic-billing-header: a"}, user("say Hi")])
    [call] = await calls_of(store)
    assert (call.thread, call.edits, call.request["messages"][0]["content"]) == (
        "main",
        [],
        "x-anthropic-billing-header: a",
    )
